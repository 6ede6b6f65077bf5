"""The search of `prune` and `stream`: nested sets, and the largest that surely costs little.

A unit is what leaves together: one head, or the heads of a key/value group. Units leave one after
the other. In each step the few that promise to cost least are tried together with those already
out, and the one whose joint loss is least leaves: single costs do not add up. All that is found on
choosing text is tested on other documents (`values` says why the test holds). Losses are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from headwise.artefacts import content_hash, load_artefact, save_artefact, to_json, versions
from headwise.errors import ArtefactError, SelectionError, TextError
from headwise.forward.guard import guard
from headwise.forward.interventions import Intervention, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head
from headwise.intervals import ERROR, FEWEST, Interval, paired_interval
from headwise.models.loaded_model import LoadedModel
from headwise.progress import Budget, Progress, Work, silent, stage
from headwise.provenance import TextInfo
from headwise.pruning.settings import PruneSettings, SearchSettings, StreamSettings
from headwise.pruning.values import OURS, PART_NAMES, RANDOM, NestedSets, Part
from headwise.staged import document_order, student_interval
from headwise.texts.batches import require_embedded, token_ids
from headwise.texts.text_sets import TextSet, bundled_texts, document_hash
from headwise.values import from_plain, to_plain

Unit = tuple[Head, ...]
Costs = dict[int, dict[Part, Interval]]  # by number of units and text
Deltas = Float[np.ndarray, "set document"]  # change of a document's summed loss

LEAST = 21  # documents: a quarter to choose on, and FEWEST for each verdict of the rest
SHORTEST = 16  # tokens of a document: a heading is none
DRAWS = 3  # random orders that are averaged
MEASURED = "measured.json"
FEWER = "--max-texts, --max-length, --exact, --width, --most"
_CHECKED: tuple[Part, ...] = ("held_out", "other")
_CHUNK = 16  # sets that are measured, and kept, at once
_AHEAD = 4  # sizes that are measured at once: the model as it is runs once for all of them
_COSTLY = 0.05  # nats per token
_GLANCE = 6  # documents after which a unit that clearly costs too much is measured no further


def deal_documents(
    loaded: LoadedModel,
    texts: TextSet,
    also: TextSet | None,
    search: SearchSettings,
    *,
    length: int,
    minimum: int = SHORTEST,
    progress: Progress = silent,
) -> JointCosts:
    """A quarter of the documents to choose on, the others to validate and to check, half each.

    Another kind of text is `also`, or the bundled texts; documents of `texts` are left out there.
    Documents of fewer than `minimum` tokens are left out.
    """
    unique = {document_hash(text): text for text in texts.texts}
    order = document_order(len(unique), search.seed)
    every = list(unique.values())
    own = _encoded(loaded, [every[i] for i in order], length, minimum, search.max_texts)
    quarter = max(2, len(own) // 4)
    half = quarter + (len(own) - quarter) // 2
    parts: dict[Part, list[tuple[str, list[int]]]] = {
        "choosing": own[:quarter],
        "validation": own[quarter:half],
        "held_out": own[half:],
    }
    if len(parts["validation"]) < FEWEST:
        raise TextError(
            f"too few documents: {len(own)} of {minimum} tokens or more, {LEAST} are needed "
            f"(--texts). {FEWEST} must validate a set and {FEWEST} check it, on none of which it "
            "was chosen",
            where=texts.name,
            fix="give more or longer documents (a .txt file is one; with --lines every line is "
            "one), or a larger --max-texts",
        )
    others = bundled_texts() if also is None else also
    foreign = [text for text in others.texts if document_hash(text) not in unique]
    other = _encoded(loaded, foreign, length, minimum, max(FEWEST, search.max_texts // 2))
    if other:
        parts["other"] = other
    names: dict[Part, str] = {"other": others.name}
    require_embedded(loaded, [ids for some in parts.values() for _, ids in some])
    sets: dict[Part, TextSet] = {
        part: TextSet(names.get(part, texts.name), tuple(text for text, _ in some))
        for part, some in parts.items()
    }
    encoded = {part: [ids for _, ids in some] for part, some in parts.items()}
    return JointCosts(loaded, sets, encoded, progress)


def _encoded(
    loaded: LoadedModel, texts: Sequence[str], length: int, minimum: int, most: int
) -> list[tuple[str, list[int]]]:
    """The first `most` texts that are long enough, each with its tokens."""
    encoded: list[tuple[str, list[int]]] = []
    for text in texts:
        ids = token_ids(loaded.tokenizer, text, loaded.bos, most=length)[:length]
        if len(ids) >= minimum:
            encoded.append((text, ids))
        if len(encoded) == most:
            break
    return encoded


def require_units(units: Mapping[str, Unit], noun: str) -> None:
    """Raise if there is nothing to choose from."""
    if len(units) < 2:
        raise SelectionError(
            f"the model has {len(units)} {noun}: nothing is left if it goes",
            fix=f"choose a model with two {noun}s or more",
        )


class JointCosts:
    """What sets of units cost jointly on dealt documents, none in two parts; kept on disk.

    A resumed search asks the same calls in the same order and gets the same bits.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Mapping[Part, TextSet],
        encoded: Mapping[Part, list[list[int]]],
        progress: Progress = silent,
    ) -> None:
        self.loaded, self.texts, self.encoded, self.progress = loaded, texts, encoded, progress
        self.longest = max(len(ids) for part in encoded.values() for ids in part)
        self.known = dict[str, list[list[float]]]()

    def infos(self) -> dict[Part, TextInfo]:
        """What an artefact says of the texts."""
        sizes = {part: sum(map(len, rows)) for part, rows in self.encoded.items()}
        return {part: texts.describe(sizes[part]) for part, texts in self.texts.items()}

    def tokens(self, part: Part) -> Int[np.ndarray, "document"]:
        """Predicted tokens of every document."""
        return np.array([len(ids) - 1 for ids in self.encoded[part]])

    def announce(self, units: Mapping[str, Unit], search: SearchSettings, budget: Budget) -> None:
        """Tell the budget how much work it is at most; refuse a model that is not what it seems.

        Single costs of half the layers each, every step of the search, and every test.
        """
        exact = min(search.exact, len(units))
        most = min(search.most or exact, exact)
        choosing, validation, held_out, other = (
            sum(map(len, self.encoded.get(part, []))) for part in PART_NAMES
        )
        work = choosing * (6 + exact / 2 + most * (search.width + 1)) + validation * 1.25 * most
        work += (held_out + other) * 8 * (search.curve + 2)
        budget(self.loaded.model, Work(work, 8 * self.longest, kept=self.longest, less=FEWER))
        guard(self.loaded, self.longest)

    def begin(
        self, intervention: Intervention, folder: Path, asked: Sequence[object], *, resume: bool
    ) -> None:
        """Keep what is measured in `folder`; with `resume` go on with what is there.

        `asked` is what losses depend on besides model and texts: not the limit, nor how much is
        tried.
        """
        self.intervention = intervention
        texts = {part: one.sha256 for part, one in self.texts.items()}
        parts = [self.loaded.describe().fingerprint, texts, *asked, self.loaded.bos]
        self.path, self.identity = folder / MEASURED, content_hash([to_json(to_plain(parts))])
        if not resume or not self.path.exists():
            return
        body = load_artefact(self.path, "measured")
        if body.get("identity") != self.identity:
            raise ArtefactError(
                "what was measured there is of another model, text or setting",
                where=self.path,
                fix="run without --resume, or choose another --out",
            )
        self.known = from_plain(dict[str, list[list[float]]], body.get("known"), self.path)

    def deltas(
        self, part: Part, sets: Sequence[Sequence[Unit]], title: str, most: int | None = None
    ) -> Deltas:
        """Change of the summed loss of every document (or of the first `most`) under every set."""
        encoded = self.encoded[part][:most]
        rows: list[list[float]] = []
        for at in range(0, len(sets), _CHUNK):
            heads = [tuple(sorted(h for unit in one for h in unit)) for one in sets[at:][:_CHUNK]]
            names = ";".join(",".join(map(str, one)) for one in heads)
            key = f"{part} {len(encoded)} {names}"
            if key not in self.known:
                variants = [Variant(one, self.intervention) for one in heads if one]
                self.known[key] = variant_losses(
                    self.loaded.model,
                    encoded,
                    variants,
                    title=f"{title}, {at} of {len(sets)}",
                    progress=self.progress,
                ).deltas.tolist()
                body = {"identity": self.identity, "known": self.known}
                save_artefact(self.path, "measured", body)
            rows += self.known[key]
        return np.array(rows).reshape(len(sets), len(encoded))

    def interval(self, part: Part, deltas: Float[np.ndarray, "document"]) -> Interval:
        """Change of loss per token with its 95% interval over documents.

        Choosing text decides nothing, and may have fewer documents than a verdict needs.
        """
        tokens = self.tokens(part)[: len(deltas)]
        if part == "choosing":
            return student_interval(deltas, tokens, ERROR)
        return paired_interval(deltas, tokens)


@dataclass
class NestedSearch:
    """The search on choosing text, step by step, and the tests that follow it."""

    costs: JointCosts
    units: Mapping[str, Unit]  # by name
    settings: SearchSettings
    noun: str
    total: int  # units that the model has; orders of others may name more
    singles: dict[str, Interval] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    measured: Costs = field(default_factory=dict)

    def measure_singles(self, names: Sequence[str]) -> None:
        """The exact cost of each unit alone; what clearly exceeds the limit is left after a glance.

        Clearly: the interval of the first documents lies above the limit, or above `_COSTLY` so
        that a search resumed with another limit asks the same.
        """
        limit = max(self.settings.max_loss, _COSTLY)
        sets = [[self.units[name]] for name in names]
        title = f"costs of {len(names)} {self.noun}s"
        glance = self.costs.deltas("choosing", sets, title, _GLANCE)
        self.singles = {
            name: self.costs.interval("choosing", row)
            for name, row in zip(names, glance, strict=True)
        }
        open_names = [name for name in names if self.singles[name].low <= limit]
        if len(self.costs.encoded["choosing"]) <= _GLANCE:
            return
        sets = [[self.units[name]] for name in open_names]
        for name, row in zip(
            open_names, self.costs.deltas("choosing", sets, title + ", all texts"), strict=True
        ):
            self.singles[name] = self.costs.interval("choosing", row)

    def grow(self) -> None:
        """Let units leave one after the other, until the set clearly costs too much."""
        stale = {name: cost.value for name, cost in self.singles.items()}
        if self.settings.width == 1:
            self.take_in_order(sorted(stale, key=lambda name: (stale[name], name)))
            return
        joint, most = 0.0, self._most(len(stale))
        while len(self.order) < most and joint <= self._beyond:
            tried = sorted(stale, key=lambda name: (stale[name], name))[: self.settings.width]
            sets = [[self.units[n] for n in (*self.order, name)] for name in tried]
            title = f"{self.noun} {len(self.order) + 1} to leave"
            rows = self.costs.deltas("choosing", sets, title)
            values = rows.sum(1) / self.costs.tokens("choosing").sum()
            stale |= {name: float(v) - joint for name, v in zip(tried, values, strict=True)}
            best = int(values.argmin())
            joint = float(values[best])
            self.order.append(tried[best])
            del stale[tried[best]]
            self._keep(len(self.order), "choosing", rows[best])

    def take_in_order(self, names: Sequence[str]) -> None:
        """Let units leave in a given order, until the set clearly costs too much."""
        self.order = list(names[: self._most(len(names))])
        for _, cost in self._in_turn(sizes_up_to(len(self.order)), "choosing"):
            if cost.value > self._beyond:
                del self.order[max(self.measured) :]
                break

    def validate(self) -> int:
        """Test growing sets on validation text; the largest before the first that fails."""
        chosen = 0
        for count, cost in self._in_turn(sizes_up_to(len(self.order)), "validation"):
            if cost.high >= self.settings.max_loss:
                break
            chosen = count
        return chosen

    def lowest(self) -> int:
        """The number of units with the least loss on choosing text, 0 if none gains there."""
        values = {n: costs["choosing"].value for n, costs in self.measured.items()}
        best = min(values, key=lambda n: values[n], default=0)
        return best if best and values[best] < 0 else 0

    def run(
        self,
        how: PruneSettings | StreamSettings,
        estimates: Float[np.ndarray, "unit"],
        ranks: Mapping[str, Float[np.ndarray, "unit"]],
    ) -> NestedSets:
        """The whole search; `ranks` are other orders, in which the lowest leave first."""
        names = list(self.units)
        self.measure_singles(candidates(names, estimates, self.settings.exact))
        self.grow()
        others = {
            name: [[names[i] for i in np.argsort(row, kind="stable")]]
            for name, row in ranks.items()
        }
        return self.result(how, others | {RANDOM: random_orders(names, self.settings.seed)})

    def result(
        self, how: PruneSettings | StreamSettings, others: Mapping[str, Sequence[Sequence[str]]]
    ) -> NestedSets:
        """Test, check and compare with other orders; of several under one name the mean counts."""
        stage(f"testing sets of {self.noun}s on other documents", self.costs.progress)
        chosen, lowest = self.validate(), self.lowest()
        self._measure([lowest] if lowest else [], "validation")
        counts = sorted({chosen or 1, *self._curve_counts(), *filter(None, [lowest])})
        checked = [part for part in _CHECKED if part in self.costs.encoded]
        for part in checked:
            self._measure(counts, part)
        every = {OURS: dict(sorted(self.measured.items()))}
        for name, orders in others.items():
            every[name] = self._others(name, orders, counts, checked)
        found = NestedSets(
            model=self.costs.loaded.describe(),
            settings=how,
            bos=self.costs.loaded.bos,
            unit=self.noun,
            units=self.total,
            texts=self.costs.infos(),
            singles=self.singles,
            order=tuple(self.order),
            costs=every,
            chosen=chosen,
            lowest=lowest,
            heads=self._heads(chosen),
            gain_heads=(),
            versions=versions(),
        )
        gains = found.gain not in ("none", "chance")
        return replace(found, gain_heads=self._heads(lowest)) if gains else found

    def _others(
        self,
        name: str,
        orders: Sequence[Sequence[str]],
        counts: Sequence[int],
        checked: Sequence[Part],
    ) -> Costs:
        """The same numbers of units in other orders, averaged; on the texts that check."""
        sets = [[self.units[n] for n in order[:count]] for count in counts for order in orders]
        costs: Costs = {count: {} for count in counts}
        for part in checked:
            deltas = self.costs.deltas(part, sets, f"{self.noun}s by {name}")
            means = deltas.reshape(len(counts), len(orders), -1).mean(1)
            for count, row in zip(counts, means, strict=True):
                costs[count][part] = self.costs.interval(part, row)
        return costs

    def _heads(self, count: int) -> tuple[str, ...]:
        return tuple(str(head) for name in self.order[:count] for head in self.units[name])

    def _curve_counts(self) -> list[int]:
        points = np.linspace(1, len(self.order), self.settings.curve).round().astype(int)
        return sorted({int(point) for point in points}) if self.order else []

    @property
    def _beyond(self) -> float:
        """A joint cost on choosing text from which on no larger set is tried."""
        return 1.5 * self.settings.max_loss + 0.005

    def _most(self, count: int) -> int:
        """How many may leave: one of all stays."""
        return min(self.settings.most or count, count, self.total - 1)

    def _in_turn(self, counts: Sequence[int], part: Part) -> Iterator[tuple[int, Interval]]:
        """Costs of growing sets, some at a time: the caller stops where it has seen enough."""
        for at in range(0, len(counts), _AHEAD):
            some = counts[at : at + _AHEAD]
            yield from zip(some, self._measure(some, part), strict=True)

    def _measure(self, counts: Sequence[int], part: Part) -> list[Interval]:
        sets = [[self.units[name] for name in self.order[:count]] for count in counts]
        title = f"sets of {self.noun}s on {PART_NAMES[part]}"
        rows = self.costs.deltas(part, sets, title)
        return [self._keep(count, part, row) for count, row in zip(counts, rows, strict=True)]

    def _keep(self, count: int, part: Part, deltas: Float[np.ndarray, "document"]) -> Interval:
        interval = self.costs.interval(part, deltas)
        self.measured.setdefault(count, {})[part] = interval
        return interval


def sizes_up_to(most: int) -> list[int]:
    """Every size up to 16, then steps of a twelfth; the largest is among them."""
    sizes = list(range(1, min(16, most) + 1))
    while sizes and sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 12)))
    return sizes


def candidates(names: Sequence[str], estimates: Float[np.ndarray, "unit"], count: int) -> list[str]:
    """Of many units those worth an exact cost: least change by estimate, a quarter most gain."""
    if len(names) <= count:
        return list(names)
    by_size = np.argsort(np.abs(estimates), kind="stable")
    gaining = np.argsort(estimates, kind="stable")[: count // 4]
    chosen = list(dict.fromkeys([*gaining.tolist(), *by_size.tolist()]))[:count]
    return [names[i] for i in sorted(chosen)]


def random_orders(names: Sequence[str], seed: int) -> list[list[str]]:
    """A few orders of all units, drawn: what any set of that size would cost."""
    generator = np.random.default_rng([seed, len(names)])
    return [[names[i] for i in generator.permutation(len(names))] for _ in range(DRAWS)]
