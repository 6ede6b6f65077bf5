"""A triage as a value: what each head costs under four interventions, and why it is ill. No torch.

Costs are changes of loss in nats per token. `zero`: the head's output taken away; `mean`: replaced
by its mean; `unsink`: its first key hidden; `release`: its queries released from the first key
(negative: a gain). The rules of the classes stand in `RULES`; a rule speaks only where the
intervals decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from headwise.artefacts import load_artefact, save_artefact
from headwise.diagnosis.values import Diagnosis
from headwise.frames import frame, interval_columns
from headwise.heads import Head
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.provenance import Decisions, TextInfo
from headwise.tables import Table, table, tables_html
from headwise.triaging.settings import TriageThresholds
from headwise.values import Finite, from_plain, plain_fields, to_plain

if TYPE_CHECKING:
    import pandas as pd

TriageClass = Literal["asleep", "harmful", "parked", "working", "empty", "constant", "undecided"]
TRIAGE_CLASSES: tuple[TriageClass, ...] = (
    "asleep",
    "harmful",
    "parked",
    "working",
    "empty",
    "constant",
    "undecided",
)


RULES: dict[TriageClass, str] = {
    "asleep": "release lowers the loss, by a gain worth a treatment",
    "harmful": "taking the head away, or its mean in its place, lowers the loss, well more than "
    "release does",
    "parked": "hiding the key of its sink costs well more than taking the head away",
    "constant": "taking the head away costs, replacing it by its mean does not",
    "working": "taking the head away costs, and it is neither parked nor constant",
    "empty": "neither taking it away nor hiding its sink's key costs, and release brings nothing",
    "undecided": "the intervals do not decide",
}


@dataclass(frozen=True)
class HeadTriage:
    """One head's costs per token, what they are worth as evidence, and its class."""

    zero: Interval
    mean: Interval
    unsink: Interval
    release: Interval
    parking: Interval  # unsink - parked_ratio zero, document by document
    release_kind: str  # the query treatment that `release` speaks of
    costs: bool  # zero > 0, at the false discovery rate over the heads
    gains: bool  # release < 0, at the same
    documents: int
    harms: bool = False  # zero < 0 or mean < 0, at the same
    class_: Annotated[TriageClass, Field(alias="class")] = "undecided"


def triage_class(found: HeadTriage, thresholds: TriageThresholds) -> TriageClass:
    """The class that the evidence shows.

    A gain is seen directly, so it comes first: without the head, if that is well more than by
    release. Then what must be left alone; a head is empty only if every cost is negligible.
    """
    nothing = thresholds.negligible
    without = min(found.zero.value, found.mean.value)
    more = not found.gains or without < thresholds.parked_ratio * found.release.value
    if found.harms and without < -nothing and more:
        return "harmful"
    if found.gains and found.release.value < -thresholds.gain:
        return "asleep"
    if found.unsink.low > nothing and found.parking.low > nothing:
        return "parked"
    if found.costs and found.zero.value > nothing:
        return "constant" if found.mean.high <= nothing else "working"
    small = max(found.zero.high, found.unsink.high) < nothing and found.release.low > -nothing
    return "empty" if small else "undecided"


def is_decided(found: HeadTriage, thresholds: TriageThresholds) -> bool:
    """Whether more text is not needed: no rule before the one that speaks is still open."""
    nothing = thresholds.negligible
    label = triage_class(found, thresholds)
    if label in ("asleep", "harmful", "empty"):
        return True
    awake = found.release.low > -nothing  # asleep is ruled out
    unparked = found.parking.high < nothing or found.unsink.high < nothing
    if label == "parked":
        return awake
    varies = found.mean.low > 0 or label == "constant"
    return label != "undecided" and awake and unparked and varies


@dataclass(frozen=True)
class TriageProvenance:
    """Texts, settings and versions."""

    texts: TextInfo
    selection: str
    max_texts: int
    max_length: int
    bos: bool
    dose: Finite
    seed: int
    decisions: Decisions
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Triage:
    """Every judged head with its class, and the diagnosis that it was chosen from."""

    heads: Mapping[str, HeadTriage] = field(repr=False)
    thresholds: TriageThresholds
    diagnosis: Diagnosis = field(repr=False)
    provenance: TriageProvenance = field(repr=False)

    def __post_init__(self) -> None:
        for name in self.heads:
            Head.parse(name)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        return f"Triage({self.model.short_name}, {counts or 'no head judged'})"

    @property
    def model(self) -> ModelInfo:
        """The model that was judged."""
        return self.diagnosis.model

    @property
    def counts(self) -> dict[str, int]:
        """Heads in each class."""
        found = Counter(head.class_ for head in self.heads.values())
        return {name: found[name] for name in TRIAGE_CLASSES}

    def of_class(self, *names: str) -> list[Head]:
        """The heads of these classes, in order."""
        return sorted(Head.parse(name) for name, h in self.heads.items() if h.class_ in names)

    def head_sets(self) -> dict[str, list[Head]]:
        """What the words of a selection mean: the classes of triage beside those of diagnosis."""
        own = {str(name): self.of_class(name) for name in TRIAGE_CLASSES}
        return {**self.diagnosis.head_sets(), **own}

    def tables(self) -> list[Table]:
        """One row per head: class, the four costs, and how many documents it took."""
        columns = ("head", "class", "zero", "mean", "unsink", "release", "by", "documents")
        rows = [
            (name, h.class_, h.zero, h.mean, h.unsink, h.release, h.release_kind, h.documents)
            for name, h in self.heads.items()
        ]
        title = f"change of loss, nats per token (95% interval): {self.model.id}"
        return [table(title, columns, rows)]

    def _repr_html_(self) -> str:
        return tables_html(self.tables())

    def to_frame(self) -> pd.DataFrame:
        """One row per judged head: class, documents, and every cost with its interval."""
        costs = ("zero", "mean", "unsink", "release", "parking")
        return frame(
            [
                {
                    "head": name,
                    "class": found.class_,
                    "documents": found.documents,
                    **interval_columns({cost: getattr(found, cost) for cost in costs}),
                }
                for name, found in self.heads.items()
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """The body of `triage.json`."""
        derived = {"model": self.model, "counts": self.counts, "rules": RULES}
        return {**plain_fields(self), **to_plain(derived)}

    def save(self, path: Path) -> Path:
        """Write `triage.json`."""
        return save_artefact(path, "triage", self.to_json())

    @staticmethod
    def load(path: Path) -> Triage:
        """Read `triage.json`."""
        return Triage.from_json(load_artefact(path, "triage"), path)

    @staticmethod
    def from_json(body: Mapping[str, Any], where: object = "a triage") -> Triage:
        """Rebuild a triage from the body of its artefact."""
        return from_plain(Triage, body, where)
