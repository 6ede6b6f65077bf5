"""What a search for nested sets shows, as `prune.json` and `stream.json` keep it. No torch.

The promise: sets grow along one order that was found on choosing text. On validation text they are
tested from the smallest up, and the first that is not surely below the limit ends the test. Such a
fixed sequence needs no correction for the many tests: with 95% confidence the set costs less than
the limit on text of that kind. Held-out text and another kind of text only check it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwise.artefacts import load_artefact, save_artefact
from headwise.frames import frame, interval_columns
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.provenance import Origin, TextInfo
from headwise.pruning.settings import PruneSettings, StreamSettings
from headwise.tables import Table, table, tables_html
from headwise.values import OMITTED, HeadArray, from_plain, plain_fields

if TYPE_CHECKING:
    import pandas as pd

Part = Literal["choosing", "validation", "held_out", "other"]
PART_NAMES: dict[Part, str] = {
    "choosing": "choosing text",
    "validation": "validation text",
    "held_out": "held-out text",
    "other": "another kind of text",
}
_ACTS = {"group": "can be restricted"}
PRUNE, PATCH, GAIN = "prune.json", "patch.safetensors", "gain.safetensors"
STREAM = "stream.json"
PATTERN, PATTERN_CONFIG = "full_attention_heads.tsv", "config.json"  # DuoAttention's own names
OURS = "joint loss"  # the order of the search itself
RANDOM = "random"


@dataclass(frozen=True)
class NestedSets:
    """Sets that grow along one order, what each costs, and the largest that keeps the promise.

    `prune.json` or `stream.json`, after the verb whose settings it holds.
    """

    model: ModelInfo
    settings: PruneSettings | StreamSettings
    bos: bool
    unit: str  # what leaves together: head, group, or row (a head of every layer)
    units: int  # how many the model has
    texts: Mapping[Part, TextInfo]
    singles: Mapping[str, Interval] = field(repr=False)  # each alone, on choosing text
    order: tuple[str, ...]
    # by order (the search's own, others), number of units out and text: change of loss
    costs: Mapping[str, Mapping[int, Mapping[Part, Interval]]] = field(repr=False)
    chosen: int  # units of the largest set below the limit; 0: none
    lowest: int  # units of the set with the least loss on choosing text; 0: none gains there
    heads: tuple[str, ...]  # of the chosen set, in the order in which they left
    gain_heads: tuple[str, ...]  # of the set that lowers the loss, if that is confirmed
    versions: Mapping[str, str] = field(repr=False)
    # hash of patch.safetensors, which takes the chosen set out: whose evaluations are its own
    patch: str | None = field(default=None, metadata=OMITTED)
    # of stream: attention on both ends, [layer][key/value group], and what the cache takes
    mass: HeadArray | None = field(default=None, repr=False, metadata=OMITTED)
    bytes_per_token: int | None = field(default=None, metadata=OMITTED)  # keys and values of all
    full_bytes: int | None = field(default=None, metadata=OMITTED)  # at the context
    saved_bytes: int | None = field(default=None, metadata=OMITTED)

    def cost(self, count: int, part: Part, order: str = OURS) -> Interval | None:
        """What `count` units of an order cost on one text, if that was measured."""
        return self.costs.get(order, {}).get(count, {}).get(part)

    @property
    def kind(self) -> Literal["prune", "stream"]:
        """The verb that wrote it."""
        return "prune" if isinstance(self.settings, PruneSettings) else "stream"

    def origin(self, name: object) -> Origin:
        """What it is of."""
        return Origin(str(name), self.model.id, self.model.fingerprint, self.patch)

    @property
    def groups(self) -> tuple[str, ...]:
        """The units of the chosen set, in the order in which they left."""
        return self.order[: self.chosen]

    @property
    def files(self) -> tuple[str, ...]:
        """What its verb writes."""
        if isinstance(self.settings, StreamSettings):
            return STREAM, PATTERN, PATTERN_CONFIG
        return (PRUNE, PATCH, GAIN) if self.gain_heads else (PRUNE, PATCH)

    @property
    def gain(self) -> str:
        """Whether a set that lowers the loss where it was chosen does so elsewhere.

        `none`, `chance` (not confirmed on other documents), `here` (only on text like this),
        `there too` or `costs elsewhere`.
        """
        if not self.lowest:
            return "none"
        judged = [self.cost(self.lowest, part) for part in ("validation", "held_out")]
        if not all(one is not None and one.high < 0 for one in judged):
            return "chance"
        other = self.cost(self.lowest, "other")
        if other is None or other.low <= 0 <= other.high:
            return "here"
        return "there too" if other.high < 0 else "costs elsewhere"

    @property
    def sentences(self) -> list[str]:
        """The answer in words: the largest set, what it costs, and what a smaller one gains."""
        lines = [self._answer(self.settings.search.max_loss)]
        lines += [f"{PART_NAMES[part]}: {text}" for part, text in self._checks()]
        lines += self._gain_lines()
        if isinstance(self.settings, PruneSettings):
            return lines
        how, share = self.settings, self.saved_share
        kept = f"the first {how.first} and the {how.recent} recent tokens"
        saved = f"{(self.saved_bytes or 0) / 1e6:.1f} of {(self.full_bytes or 0) / 1e6:.1f} MB"
        cache = f"key/value cache at {how.context:,} tokens: {saved} saved ({share:.0%})"
        return [f"groups that keep {kept}:", *lines, cache]

    @property
    def saved_share(self) -> float:
        """What restricted groups save of the cache."""
        return (self.saved_bytes or 0) / (self.full_bytes or 1)

    def _answer(self, limit: float) -> str:
        noun = self.unit + "s" * (self.units != 1)
        act = _ACTS.get(self.unit, "can go")
        if self.chosen:
            share = f"{self.chosen} of {self.units} {noun} ({self.chosen / self.units:.0%})"
            return f"{share} {act} below {limit:g} nats per token, with 95% confidence"
        first = self.cost(1, "validation")
        if first is None:
            return f"no {self.unit} {act}: none was tried"
        count, tested = self.texts["validation"].count, f"{self.order[0]} costs {_told(first)}"
        if first.low < limit:
            return (
                f"{count} documents cannot tell: {tested}, which is not surely below {limit:g}; "
                f"give more text, or a --max-loss above {first.high:.4f}"
            )
        return f"no {self.unit} {act} below {limit:g} nats per token: already {tested}"

    def _checks(self) -> list[tuple[Part, str]]:
        parts: tuple[Part, ...] = ("validation", "held_out", "other")
        measured = [(part, self.cost(self.chosen, part)) for part in parts]
        return [
            (part, f"{_told(cost)} ({self.texts[part].count} documents: {self.texts[part].name})")
            for part, cost in measured
            if cost is not None
        ]

    def _gain_lines(self) -> list[str]:
        if self.gain == "none":
            return []
        cost = self.cost(self.lowest, "held_out") or self.cost(self.lowest, "validation")
        without = f"without {', '.join(self.order[: self.lowest])}"
        if cost is None:
            return []
        if self.gain == "chance":
            return [f"chance: the loss seemed to fall {without}; other documents: {_told(cost)}"]
        line = f"gain: {without} the loss falls, {_told(cost)} on held-out text"
        other = self.cost(self.lowest, "other")
        return [line] + ([] if other is None else [f"  and on another kind of text {_told(other)}"])

    def tables(self) -> list[Table]:
        """The chosen number beside other orders; then the steps of the search."""
        count = self.chosen or 1
        rows = [
            (name, *(self.cost(count, part, name) for part in ("held_out", "other")))
            for name in self.costs
        ]
        plural = f"{count} {self.unit}{'s' * (count != 1)}"
        against = table(
            f"change of loss without {plural}, nats per token (95% interval)",
            "order; held out [+.4f]; other text [+.4f]",
            rows,
            key="orders",
        ).narrowed()
        return [against, self._steps()]

    def _steps(self) -> Table:
        rows = [
            (count, self.order[count - 1], *(costs.get(part) for part in PART_NAMES))
            for count, costs in self.costs[OURS].items()
        ]
        columns = "out; last; choosing [+.4f]; validation [+.4f]; held out [+.4f]; other [+.4f]"
        title = f"change of loss as {self.unit}s leave one after the other, nats per token"
        return table(title, columns, rows, key="steps").narrowed()

    def to_frame(self) -> pd.DataFrame:
        """One row per order and number of units: the costs on every text (needs pandas)."""
        return frame(
            [
                {
                    "order": name,
                    "count": count,
                    **interval_columns({str(part): cost for part, cost in costs.items()}),
                }
                for name, sets in self.costs.items()
                for count, costs in sets.items()
            ]
        )

    def _repr_html_(self) -> str:
        return tables_html(self.tables())

    def save(self, path: Path) -> Path:
        """Write `prune.json` or `stream.json`."""
        return save_artefact(path, self.kind, plain_fields(self))

    @staticmethod
    def load(path: Path) -> NestedSets:
        """Read `prune.json` or `stream.json`."""
        return from_plain(NestedSets, load_artefact(path, ("prune", "stream")), path)


def _told(cost: Interval) -> str:
    return f"{cost.value:+.4f} ({cost.low:+.4f} to {cost.high:+.4f})"
