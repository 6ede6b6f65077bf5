"""A comparison as a value: transitions, drift by zone, columns, paired losses. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.alarms import Alarm
from headwise.artefacts import load_artefact, save_artefact
from headwise.frames import head_frame
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.proof.trajectories import ColumnTrend, Phase, PhaseMeans
from headwise.proof.values import Recovery
from headwise.proof.zones import DriftByZone, Transitions
from headwise.provenance import Provenance
from headwise.surgery.plan import SurgeryPlan
from headwise.tables import tables_html
from headwise.values import OMITTED, Finite, HeadArray, from_plain, plain_fields

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PairedLoss:
    """Mean loss on one text set before and after, and their difference paired by document."""

    before: Interval
    after: Interval
    perplexity_before: Interval
    perplexity_after: Interval
    difference: Interval
    verdict: str


@dataclass(frozen=True)
class PlasticityChange:
    """Change of attention plasticity: by head (None where one side has none), and by zone."""

    delta: tuple[tuple[Finite | None, ...], ...] = field(repr=False)
    mean_delta: Mapping[str, Finite]


@dataclass(frozen=True)
class ComparisonProvenance:
    """Versions, settings, and what produced both sides."""

    versions: Mapping[str, str]
    settings: Mapping[str, int]  # `seed`, which decides the intervals
    before: Provenance
    after: Provenance
    identity: str = ""  # of the two evaluations that were compared
    # hash of the last patch on the side after, "" for stock; None: of diagnoses alone, or older
    patch: str | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Comparison:
    """What changed between two conditions of one model."""

    model: ModelInfo
    plan: SurgeryPlan | None = field(repr=False)
    transitions: Transitions = field(repr=False)
    drift: DriftByZone = field(repr=False)
    delta: Mapping[str, HeadArray] = field(repr=False)
    columns: Mapping[str, ColumnTrend] = field(repr=False)
    trajectories: Mapping[str, str] = field(repr=False)
    two_phenomena: Mapping[Phase, PhaseMeans] | None = field(repr=False)
    plasticity: PlasticityChange | None = field(repr=False)
    losses: Mapping[str, PairedLoss]
    recovery: Recovery | None
    provenance: ComparisonProvenance = field(repr=False)
    alarms: tuple[Alarm, ...] = ()

    def __post_init__(self) -> None:
        if any(value.shape != self.model.shape for value in self.delta.values()):
            raise ValueError(f"delta: maps must have the model's shape {self.model.shape}")

    def to_json(self) -> dict[str, Any]:
        """The body of `comparison.json`."""
        return plain_fields(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: the change of every measure (needs pandas)."""
        return head_frame(self.delta, {}, self.model.layer_numbers)

    def to_csv(self) -> str:
        """The same as text, in full precision; needs no pandas."""
        buffer, names = io.StringIO(), sorted(self.delta)
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["layer", "head", *(f"delta_{name}" for name in names)])
        for row, head in np.ndindex(*self.model.shape):
            changes = [float(self.delta[name][row, head]) for name in names]
            writer.writerow([self.model.layer_numbers[row], head, *changes])
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        from headwise.proof.view import comparison_tables

        return tables_html(comparison_tables(self))

    def save(self, path: Path) -> Path:
        """Write `comparison.json`."""
        return save_artefact(path, "comparison", self.to_json())

    @staticmethod
    def load(path: Path) -> Comparison:
        """Read `comparison.json`."""
        return from_plain(Comparison, load_artefact(path, "comparison"), path)
