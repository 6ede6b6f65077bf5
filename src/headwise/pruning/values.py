"""What a search for nested sets shows, as `prune.json` and `stream.json` keep it. No torch.

The promise: sets grow along one order that was found on choosing text. On validation text they are
tested from the smallest up, and the first that is not surely below the limit ends the test. Such a
fixed sequence needs no correction for the many tests: with 95% confidence the set costs less than
the limit on text of that kind. Held-out text and another kind of text only check it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwise.artefacts import load_artefact, save_artefact
from headwise.frames import frame, interval_columns
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.provenance import TextInfo
from headwise.pruning.settings import PruneSettings, StreamSettings
from headwise.tables import Table, table, tables_html
from headwise.values import HeadArray, from_plain, plain_fields

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
OURS = "joint loss"  # the order of the search itself
RANDOM = "random"


@dataclass(frozen=True)
class SetCost:
    """How many units are out, and the change of loss where it was measured, nats per token."""

    count: int
    costs: Mapping[Part, Interval]


@dataclass(frozen=True)
class NestedSets:
    """Sets that grow along one order, what each costs, and the largest that keeps the promise."""

    unit: str  # what leaves together: head, group, or row (a head of every layer)
    units: int  # how many the model has
    texts: Mapping[Part, TextInfo]
    singles: Mapping[str, Interval] = field(repr=False)  # each alone, on choosing text
    order: tuple[str, ...]
    sets: tuple[SetCost, ...] = field(repr=False)
    chosen: int  # units of the largest set below the limit; 0: none
    lowest: int  # units of the set with the least loss on choosing text; 0: none gains there
    rivals: Mapping[str, tuple[SetCost, ...]] = field(repr=False)  # other orders, equal numbers

    def cost(self, count: int, part: Part, order: str = OURS) -> Interval | None:
        """What `count` units of an order cost on one text, if that was measured."""
        sets = self.sets if order == OURS else self.rivals.get(order, ())
        return next((one.costs.get(part) for one in sets if one.count == count), None)

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

    def sentences(self, limit: float) -> list[str]:
        """The answer in words: the largest set, what it costs, and what a smaller one gains."""
        lines = [self._answer(limit)]
        lines += [f"{PART_NAMES[part]}: {text}" for part, text in self._checks()]
        return lines + self._gain_lines()

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
            for name in (OURS, *self.rivals)
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
        known = {one.count: one.costs for one in self.sets}
        rows = [
            (count, self.order[count - 1], *(costs.get(part) for part in PART_NAMES))
            for count, costs in sorted(known.items())
        ]
        columns = "out; last; choosing [+.4f]; validation [+.4f]; held out [+.4f]; other [+.4f]"
        title = f"change of loss as {self.unit}s leave one after the other, nats per token"
        return table(title, columns, rows, key="steps").narrowed()

    def to_frame(self) -> pd.DataFrame:
        """One row per order and number of units: the costs on every text (needs pandas)."""
        every: dict[str, Sequence[SetCost]] = {OURS: self.sets, **self.rivals}
        return frame(
            [
                {
                    "order": name,
                    "count": one.count,
                    **interval_columns({str(part): cost for part, cost in one.costs.items()}),
                }
                for name, sets in every.items()
                for one in sets
            ]
        )


def _told(cost: Interval) -> str:
    return f"{cost.value:+.4f} ({cost.low:+.4f} to {cost.high:+.4f})"


@dataclass(frozen=True)
class Prune:
    """Which heads can go: `prune.json`. The patch beside it takes them out."""

    model: ModelInfo
    settings: PruneSettings
    bos: bool
    nested: NestedSets
    heads: tuple[str, ...]  # of the chosen set, in the order in which they left
    gain_heads: tuple[str, ...]  # of the set that lowers the loss, if that is confirmed
    versions: Mapping[str, str] = field(repr=False)

    @property
    def sentences(self) -> list[str]:
        """The answer in words."""
        return self.nested.sentences(self.settings.search.max_loss)

    def tables(self) -> list[Table]:
        """Other orders at equal number, and the steps of the search."""
        return self.nested.tables()

    def _repr_html_(self) -> str:
        return tables_html(self.tables())

    def to_frame(self) -> pd.DataFrame:
        """One row per order and number of heads."""
        return self.nested.to_frame()

    def save(self, path: Path) -> Path:
        """Write `prune.json`."""
        return save_artefact(path, "prune", plain_fields(self))

    @staticmethod
    def load(path: Path) -> Prune:
        """Read `prune.json`."""
        return from_plain(Prune, load_artefact(path, "prune"), path)


@dataclass(frozen=True)
class Streaming:
    """Which key/value groups need only the first and the recent tokens: `stream.json`."""

    model: ModelInfo
    settings: StreamSettings
    bos: bool
    nested: NestedSets
    groups: tuple[str, ...]  # that may be restricted, in the order in which they were
    mass: HeadArray = field(repr=False)  # attention on both ends: [layer][key/value group]
    bytes_per_token: int  # of the cache, keys and values of all groups
    full_bytes: int  # of the cache at the context
    saved_bytes: int
    versions: Mapping[str, str] = field(repr=False)

    @property
    def sentences(self) -> list[str]:
        """The answer in words, and what the cache saves."""
        how, nested = self.settings, self.nested
        share = self.saved_bytes / self.full_bytes if self.full_bytes else 0.0
        saved = (
            f"key/value cache at {how.context:,} tokens: {self.saved_bytes / 1e6:.1f} of "
            f"{self.full_bytes / 1e6:.1f} MB saved ({share:.0%})"
        )
        kept = f"the first {how.first} and the {how.recent} recent tokens"
        return [f"groups that keep {kept}:", *nested.sentences(how.search.max_loss), saved]

    def tables(self) -> list[Table]:
        """Other orders at equal number, and the steps of the search."""
        return self.nested.tables()

    def _repr_html_(self) -> str:
        return tables_html(self.tables())

    def to_frame(self) -> pd.DataFrame:
        """One row per order and number of groups."""
        return self.nested.to_frame()

    def save(self, path: Path) -> Path:
        """Write `stream.json`."""
        return save_artefact(path, "stream", plain_fields(self))

    @staticmethod
    def load(path: Path) -> Streaming:
        """Read `stream.json`."""
        return from_plain(Streaming, load_artefact(path, "stream"), path)
