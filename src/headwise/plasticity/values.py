"""Saved values: what a capture holds, the record of each measured head, the summary of a run.

Tables made from fresh and from resumed heads are the same bytes because both are made from the
records. A number that is not defined is None here (null in JSON, an empty field in CSV); in the
arithmetic before it is NaN. Nothing here imports torch, so that comparisons and reports can read a
summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from headwise.artefacts import content_hash, load_artefact, save_artefact, to_json
from headwise.errors import ArtefactError
from headwise.models.values import ModelInfo
from headwise.plasticity.settings import CaptureSettings, PlasticitySettings
from headwise.provenance import TextInfo
from headwise.values import OMITTED, from_plain, to_plain

HeadGrid = tuple[tuple[float | None, ...], ...]  # [layer][head]; None where nothing was measured

CAPTURE, FILE = "capture.json", "plasticity.json"

# A map of the summary -> the column of the head table that it shows.
MAPS = {
    "plasticity": "ap_overall",
    "plasticity_se": "ap_se",
    "plasticity_drop": "ap_drop",
    "plasticity_first_20pct": "ap_first_20pct",
    "plasticity_last_20pct": "ap_last_20pct",
    "q_R2_scalar": "q_R2_scalar",
}

# Where and how the work was done: no part of what two runs must have in common.
_NOT_SAVED = {"dataset_local_root", "max_workers", "backend", "scheduler"}
_MAY_DIFFER = {*_NOT_SAVED, "model_dir", "dataset_name", "revision"}


@dataclass(frozen=True)
class CaptureInfo:
    """One capture: of what, how, and how far it has come."""

    model: ModelInfo
    texts: TextInfo
    settings: CaptureSettings
    heads: tuple[str, ...]
    capture_point: str
    note: str
    versions: dict[str, str]
    head_sampling: Literal["selection"] | None = field(default=None, metadata=OMITTED)
    rows: dict[str, int] = field(default_factory=dict, repr=False)  # `l00h00q` -> rows
    # `l00h00q` -> of its Parquet file
    checksums: dict[str, str] = field(default_factory=dict, repr=False)
    finished: bool = False
    # hash of the (last) patch on the model, "" for stock; None: an older capture does not say
    patch: str | None = field(default=None, metadata=OMITTED)
    folder: Path | None = field(default=None, metadata=OMITTED, compare=False)  # not written

    def __repr__(self) -> str:
        rows = f"{len(self.heads)} heads, {sum(self.rows.values()):,} vectors"
        return f"CaptureInfo({self.model.short_name}, {rows} of {self.texts.name})"

    @property
    def identity(self) -> str:
        """A hash of what decides the vectors; progress and versions do not count."""
        what = replace(self, versions={}, rows={}, checksums={}, finished=False, folder=None)
        return content_hash([to_json(to_plain(what))])

    def save(self, folder: Path) -> Path:
        """Write `capture.json`."""
        return save_artefact(folder / CAPTURE, "capture", to_plain(replace(self, folder=None)))

    @staticmethod
    def load(folder: Path) -> CaptureInfo:
        """Read `capture.json`; a damaged one is an `ArtefactError`."""
        path = folder / CAPTURE
        info: CaptureInfo = from_plain(CaptureInfo, load_artefact(path, "capture"), path)
        return replace(info, folder=folder)


class Cell(NamedTuple):
    """One (query bucket, key bucket) of a head; a list in JSON, for there are many."""

    q_bucket: int
    k_bucket: int
    plasticity: float | None  # None: no pair could be scored
    n_pairs: int
    n_queries: int
    n_keys: int
    se: float | None
    q_position: float  # mean position of the bucket's queries


class DistanceBin(NamedTuple):
    """Summed plasticity of the pairs in one bin of (key distance, query distance); also a list."""

    key_bin: int
    query_bin: int
    total: float
    n_pairs: int


@dataclass(frozen=True)
class HeadRecord:
    """All that is measured on one head: names are the columns of `head_metrics.csv`."""

    layer: int
    q_head: int
    k_head: int
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
    ap_overall: float | None
    q_beta_norm: float | None
    ap_se: float | None
    ap_quintile_1: float | None  # of the position range
    ap_quintile_2: float | None
    ap_quintile_3: float | None
    ap_quintile_4: float | None
    ap_quintile_5: float | None
    q_resid0_lilliefors_p: float | None
    q_noise_med_lilliefors_p: float | None
    q_noise_frac_lilliefors_p_lt_alpha: float | None
    r2: tuple[float | None, ...]  # of each oriented component on position
    cells: tuple[Cell, ...]  # by query bucket, then key bucket
    distance: tuple[DistanceBin, ...]

    def save(self, path: Path, key: str) -> Path:
        """Write a finished head's file; `key` is a hash of what the record is valid for."""
        return save_artefact(path, "plasticity-head", {"key": key, "head": to_plain(self)})

    @staticmethod
    def load(path: Path) -> tuple[str, HeadRecord]:
        """Read a finished head's key and record; a damaged file is an `ArtefactError`."""
        body = load_artefact(path, "plasticity-head")
        key: str = from_plain(str, body.get("key"), path)
        return key, from_plain(HeadRecord, body.get("head"), path)

    @property
    def ap_first_20pct(self) -> float | None:
        """Plasticity in the first fifth of the position range."""
        return self.ap_quintile_1

    @property
    def ap_last_20pct(self) -> float | None:
        """Plasticity in the last fifth of the position range."""
        return self.ap_quintile_5

    @property
    def ap_drop(self) -> float | None:
        """How much plasticity falls from the first fifth to the last."""
        first, last = self.ap_quintile_1, self.ap_quintile_5
        return None if first is None or last is None else first - last

    @property
    def n_cells(self) -> int:
        """Cells that could be scored."""
        return sum(cell.plasticity is not None for cell in self.cells)

    @property
    def n_pairs(self) -> int:
        """Pairs of the cells that could be scored."""
        return sum(cell.n_pairs for cell in self.cells if cell.plasticity is not None)


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
class PlasticitySummary:
    """One run's `plasticity.json`."""

    # `id`, as the capture names it; its `fingerprint`, and `patch` ("" for stock), if it says them
    model: Mapping[str, str]
    maps: Mapping[str, HeadGrid]  # of `MAPS`
    mean: dict[str, float | None]
    inter_key_distance: DistanceMap
    failures: tuple[HeadFailure, ...]
    settings: PlasticitySettings
    versions: dict[str, str]  # that can change a number

    def measured_like(self, other: PlasticitySummary) -> bool:
        """Whether two captures were measured with the same settings."""
        mine, yours = (
            summary.settings.model_dump(exclude=_MAY_DIFFER) for summary in (self, other)
        )
        return mine == yours

    def save(self, path: Path) -> Path:
        """Write `plasticity.json`."""
        body = to_plain(self)
        body["provenance"] = {
            "settings": self.settings.model_dump(mode="json", exclude=_NOT_SAVED),
            "versions": body.pop("versions"),
        }
        del body["settings"]
        return save_artefact(path, "plasticity", body)

    @staticmethod
    def load(path: Path) -> PlasticitySummary:
        """Read `plasticity.json`; a damaged one is an `ArtefactError`."""
        body = load_artefact(path, "plasticity")
        provenance = body.pop("provenance", None)
        if not isinstance(provenance, dict):
            raise ArtefactError("no provenance in it", where=path, fix="measure the heads again")
        summary = from_plain(PlasticitySummary, {**body, **provenance}, path)
        for name in MAPS:
            if name not in summary.maps:
                raise ArtefactError(f"no map {name}", where=path, fix="measure the heads again")
        return summary


def find_plasticity(*folders: Path) -> PlasticitySummary | None:
    """The first plasticity.json in these folders or their subfolders `plasticity`."""
    paths = [place / FILE for folder in folders for place in (folder, folder / "plasticity")]
    return next((PlasticitySummary.load(path) for path in paths if path.exists()), None)
