"""Saved values of plasticity: the record of each measured head, and the summary of a run.

Tables made from fresh and from resumed heads are the same bytes because both are made from the
records. A number that is not defined is None here (null in JSON, an empty field in CSV); in the
arithmetic before it is NaN. Nothing here imports torch, so that comparisons and reports can read a
summary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headwise.artefacts import load_artefact, save_artefact
from headwise.plasticity.settings import PlasticitySettings
from headwise.values import from_plain, to_plain

HeadGrid = tuple[tuple[float | None, ...], ...]  # [layer][head]; None where nothing was measured


FILE = "plasticity.json"


# Where and how the work was done: no part of what two runs must have in common.
_NOT_SAVED = {"dataset_local_root", "max_workers", "backend", "scheduler"}


_MAY_DIFFER = {*_NOT_SAVED, "model_dir", "dataset_name", "revision"}


@dataclass(frozen=True)
class QueryMetrics:
    """How a head's queries follow position and how normal they are, under their CSV columns."""

    n_q_tokens: int
    n_k_tokens: int
    d_model: int
    q_R2_pos: float | None
    q_R2_scalar: float | None
    q_mae_baseline: float | None
    q_mae_proj: float | None
    q_mae_ratio: float | None
    q_resid0_skew: float | None
    q_resid0_kurt: float | None
    q_resid0_ks_p: float | None
    q_noise_med_abs_skew: float | None
    q_noise_med_abs_kurt: float | None
    q_noise_med_ks_p: float | None
    q_noise_frac_ks_p_lt_alpha: float | None
    q_beta_norm: float | None
    q_resid0_lilliefors_p: float | None
    q_noise_med_lilliefors_p: float | None
    q_noise_frac_lilliefors_p_lt_alpha: float | None


class CellRecord(NamedTuple):
    """One (query bucket, key bucket); a list in JSON, for there are many."""

    q_bucket: int
    k_bucket: int
    plasticity: float | None
    n_pairs: int
    n_queries: int
    n_keys: int
    se: float | None


class DistanceRecord(NamedTuple):
    """Summed plasticity of the pairs in one bin of (key distance, query distance); also a list."""

    key_bin: int
    query_bin: int
    total: float
    n_pairs: int


@dataclass(frozen=True)
class HeadRecord:
    """One head's result; `fifths` and `tau` are by query bucket."""

    layer: int
    q_head: int
    k_head: int
    metrics: QueryMetrics
    r2: tuple[float | None, ...]  # of each oriented component on position
    fifths: dict[int, tuple[int, ...]]  # queries by fifth of the position range
    tau: dict[int, float]  # mean position
    cells: tuple[CellRecord, ...]
    overall: float | None
    se: float | None
    distance: tuple[DistanceRecord, ...]


@dataclass(frozen=True)
class KeptHead:
    """A finished head's file: its record, and the hash of what the record is valid for."""

    key: str
    head: HeadRecord

    def save(self, path: Path) -> Path:
        """Write the file."""
        return save_artefact(path, "plasticity-head", to_plain(self))

    @staticmethod
    def load(path: Path) -> KeptHead:
        """Read the file; a damaged one is an `ArtefactError`."""
        return from_plain(KeptHead, load_artefact(path, "plasticity-head"), path)


def defined(value: float) -> float | None:
    """None for a number that is not defined."""
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class HeadFailure:
    """A head that could not be measured, and why."""

    layer: int
    q_head: int
    reason: str


@dataclass(frozen=True)
class DistanceMap:
    """Mean plasticity by distance between the two keys and distance of the query from them.

    Both axes are powers of two in tokens, given by their lower edges.
    """

    key_distance: tuple[int, ...]
    query_distance: tuple[int, ...]
    plasticity: HeadGrid
    n_pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MeasuredModel:
    """The model as the capture names it."""

    id: str


@dataclass(frozen=True)
class PlasticityProvenance:
    """The settings of a run, and the versions that can change a number."""

    settings: PlasticitySettings
    versions: dict[str, str]


@dataclass(frozen=True)
class PlasticityMaps:
    """Columns of the head table as [layer][head]."""

    plasticity: HeadGrid
    plasticity_se: HeadGrid
    plasticity_drop: HeadGrid
    plasticity_first_20pct: HeadGrid
    plasticity_last_20pct: HeadGrid
    q_R2_scalar: HeadGrid


@dataclass(frozen=True)
class PlasticitySummary:
    """One run's `plasticity.json`."""

    model: MeasuredModel
    maps: PlasticityMaps
    mean: dict[str, float | None]
    inter_key_distance: DistanceMap
    failures: tuple[HeadFailure, ...]
    provenance: PlasticityProvenance

    def measured_like(self, other: PlasticitySummary) -> bool:
        """Whether two captures were measured with the same settings."""
        mine, yours = (
            summary.provenance.settings.model_dump(exclude=_MAY_DIFFER) for summary in (self, other)
        )
        return mine == yours

    def save(self, path: Path) -> Path:
        """Write `plasticity.json`."""
        settings = self.provenance.settings.model_dump(mode="json", exclude=_NOT_SAVED)
        provenance = {"settings": settings, "versions": self.provenance.versions}
        return save_artefact(path, "plasticity", {**to_plain(self), "provenance": provenance})

    @staticmethod
    def load(path: Path) -> PlasticitySummary:
        """Read `plasticity.json`; a damaged one is an `ArtefactError`."""
        return from_plain(PlasticitySummary, load_artefact(path, "plasticity"), path)


def find_plasticity(*folders: Path) -> PlasticitySummary | None:
    """The first plasticity.json in these folders or their subfolders `plasticity`."""
    found = [place / FILE for folder in folders for place in (folder, folder / "plasticity")]
    return next((PlasticitySummary.load(path) for path in found if path.exists()), None)
