"""Plasticity as tables: the seed's three CSV files, and the summary as one JSON artefact.

Invariant: documented columns come first and in their order; None is an empty field (null in JSON).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.artefacts import versions, write_text
from headwise.plasticity.head_group import HeadResult
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.values import (
    CellRecord,
    DistanceMap,
    DistanceRecord,
    HeadFailure,
    HeadGrid,
    HeadRecord,
    MeasuredModel,
    PlasticityMaps,
    PlasticityProvenance,
    PlasticitySummary,
    QueryMetrics,
    defined,
)


@dataclass(frozen=True)
class HeadRow:
    """One line of `head_metrics.csv`; the fields are its columns."""

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
    ap_first_20pct: float | None
    ap_last_20pct: float | None
    ap_drop: float | None
    ap_quintile_1: float | None
    ap_quintile_2: float | None
    ap_quintile_3: float | None
    ap_quintile_4: float | None
    ap_quintile_5: float | None
    q_resid0_lilliefors_p: float | None
    q_noise_med_lilliefors_p: float | None
    q_noise_frac_lilliefors_p_lt_alpha: float | None
    n_cells: int
    n_pairs: int


@dataclass(frozen=True)
class BucketRow:
    """One line of `head_bucket_plasticity.csv`: a cell of a head."""

    layer: int
    q_head: int
    k_head: int
    q_bucket: int
    k_bucket: int
    plasticity: float | None
    n_pairs: int
    n_queries: int
    se: float | None
    q_position: float


@dataclass(frozen=True)
class ComponentRow:
    """One line of `head_component_weights.csv`."""

    layer: int
    q_head: int
    k_head: int
    component: int
    weight: float
    r2: float | None


Row = HeadRow | BucketRow | ComponentRow


Columns = Mapping[str, str]  # a column's name -> the field it shows


def _columns(*names: str, **renamed: str) -> Columns:
    return {name: name for name in names} | renamed


_ID = ("layer", "q_head", "k_head")


HEAD_COLUMNS = _columns(*(field.name for field in fields(HeadRow)))


BUCKET_COLUMNS = _columns(*(field.name for field in fields(BucketRow)))


COMPONENT_COLUMNS = _columns(*(field.name for field in fields(ComponentRow)))


LEGACY_HEAD_COLUMNS = _columns(
    *_ID,
    *("n_q_tokens", "n_k_tokens", "d_model", "q_R2_pos", "q_beta_norm", "q_R2_scalar"),
    *("q_mae_baseline", "q_mae_proj", "q_mae_ratio"),
    *("q_resid0_skew", "q_resid0_kurt", "q_resid0_ks_p"),
    *("q_noise_med_abs_skew", "q_noise_med_abs_kurt", "q_noise_med_ks_p"),
    *("q_noise_frac_ks_p_lt_alpha", "ap_overall"),
)


LEGACY_BUCKET_COLUMNS = _columns(*_ID, "q_bucket", "k_bucket", ap_bucket="plasticity")


LEGACY_COMPONENT_COLUMNS = _columns(*_ID, "component", component_r2="r2", component_weight="weight")


_QUINTILES = tuple(f"ap_quintile_{number}" for number in range(1, 6))


def record_of(result: HeadResult) -> HeadRecord:
    """One head's result as plain values; NaN as None."""
    cells = result.cells
    used = np.argwhere(cells.distance_count > 0)
    return HeadRecord(
        layer=result.layer,
        q_head=result.q_head,
        k_head=result.k_head,
        metrics=_without_nan(result.metrics),
        r2=tuple(defined(value) for value in result.r2),
        fifths={bucket: tuple(counts) for bucket, counts in result.fifths.items()},
        tau=result.tau,
        cells=tuple(
            CellRecord(**vars(cell))._replace(
                plasticity=defined(cell.plasticity), se=defined(cell.se)
            )
            for cell in cells.cells
        ),
        overall=defined(cells.overall),
        se=defined(cells.se),
        distance=tuple(
            DistanceRecord(
                int(i), int(j), float(cells.distance_sum[i, j]), int(cells.distance_count[i, j])
            )
            for i, j in used
        ),
    )


def _without_nan(metrics: QueryMetrics) -> QueryMetrics:
    numbers: Any = {name: defined(v) for name, v in vars(metrics).items() if isinstance(v, float)}
    return replace(metrics, **numbers)


def head_row(record: HeadRecord, *, weighted: bool) -> HeadRow:
    """The head's line of metrics: the seed's columns, then standard error and position profile."""
    quintiles = _quintiles(record, weighted=weighted)
    first, last = quintiles[0], quintiles[-1]
    finite = [cell for cell in record.cells if cell.plasticity is not None]
    return HeadRow(
        layer=record.layer,
        q_head=record.q_head,
        k_head=record.k_head,
        **vars(record.metrics),
        ap_overall=record.overall,
        ap_se=record.se,
        ap_first_20pct=first,
        ap_last_20pct=last,
        ap_drop=None if first is None or last is None else first - last,
        ap_quintile_1=first,
        ap_quintile_2=quintiles[1],
        ap_quintile_3=quintiles[2],
        ap_quintile_4=quintiles[3],
        ap_quintile_5=last,
        n_cells=len(finite),
        n_pairs=sum(cell.n_pairs for cell in finite),
    )


def _quintiles(record: HeadRecord, *, weighted: bool) -> list[float | None]:
    """Plasticity by fifths of the position range; a cell counts where its queries lie."""
    sums, weights = np.zeros(5), np.zeros(5)
    for cell in record.cells:
        if cell.plasticity is None:
            continue
        share = np.array(record.fifths[cell.q_bucket]) / cell.n_queries
        weight = share * (cell.n_queries * cell.n_keys if weighted else 1)
        sums += weight * cell.plasticity
        weights += weight
    return [float(s / w) if w > 0 else None for s, w in zip(sums, weights, strict=True)]


def bucket_rows(record: HeadRecord) -> list[BucketRow]:
    """One row per cell, by query bucket, then key bucket."""
    return [
        BucketRow(
            layer=record.layer,
            q_head=record.q_head,
            k_head=record.k_head,
            q_bucket=cell.q_bucket,
            k_bucket=cell.k_bucket,
            plasticity=cell.plasticity,
            n_pairs=cell.n_pairs,
            n_queries=cell.n_queries,
            se=cell.se,
            q_position=record.tau[cell.q_bucket],
        )
        for cell in record.cells
    ]


def component_rows(record: HeadRecord) -> list[ComponentRow]:
    """Each component's share of the R2 on position; equal shares if there is none."""
    positive = np.maximum(np.array([value or 0.0 for value in record.r2]), 0.0)
    total = positive.sum()
    weight = positive / total if total > 0 else np.full(len(positive), 1 / len(positive))
    return [
        ComponentRow(record.layer, record.q_head, record.k_head, i, float(w), r2)
        for i, (w, r2) in enumerate(zip(weight, record.r2, strict=True))
    ]


def write_csv(path: Path, columns: Columns, rows: Iterable[Row]) -> Path:
    """Write rows under the given columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, field) for field in columns.values()] for row in rows)
    return write_text(path, text.getvalue())


def write_tables(
    out: Path,
    settings: PlasticitySettings,
    heads: Sequence[HeadRow],
    buckets: Sequence[BucketRow],
    components: Sequence[ComponentRow],
) -> tuple[Path, ...]:
    """Write the three CSV files under `out`, with the public code's columns if asked."""
    legacy = settings.legacy_columns
    return (
        write_csv(
            out / settings.output_csv, LEGACY_HEAD_COLUMNS if legacy else HEAD_COLUMNS, heads
        ),
        write_csv(
            out / settings.bucket_csv, LEGACY_BUCKET_COLUMNS if legacy else BUCKET_COLUMNS, buckets
        ),
        write_csv(
            out / settings.component_csv,
            LEGACY_COMPONENT_COLUMNS if legacy else COMPONENT_COLUMNS,
            components,
        ),
    )


def head_map(rows: Sequence[HeadRow], column: str) -> HeadGrid:
    """One column of the head table as [layer][head]; None where a head was not measured."""
    num_layers = 1 + max((row.layer for row in rows), default=-1)
    num_heads = 1 + max((row.q_head for row in rows), default=-1)
    found = {(row.layer, row.q_head): getattr(row, column) for row in rows}
    return tuple(
        tuple(found.get((layer, head)) for head in range(num_heads)) for layer in range(num_layers)
    )


def distance_map(records: Sequence[HeadRecord]) -> DistanceMap:
    """The pairs of all heads pooled by distance."""
    bins = [found for record in records for found in record.distance]
    if not bins:
        return DistanceMap((), (), (), ())
    high = (1 + max(b.key_bin for b in bins), 1 + max(b.query_bin for b in bins))
    total, count = np.zeros(high), np.zeros(high)
    for key_bin, query_bin, value, pairs in bins:
        total[key_bin, query_bin] += value
        count[key_bin, query_bin] += pairs
    edges = [tuple(2 ** max(e - 1, 0) for e in range(1, size)) for size in high]
    return DistanceMap(
        key_distance=edges[0],
        query_distance=edges[1],
        plasticity=tuple(
            tuple(float(t / n) if n else None for t, n in zip(*rows, strict=True))
            for rows in zip(total[1:, 1:], count[1:, 1:], strict=True)
        ),
        n_pairs=tuple(tuple(row) for row in count[1:, 1:].astype(int).tolist()),
    )


def summarise(
    model: str,
    settings: PlasticitySettings,
    heads: Sequence[HeadRow],
    distances: DistanceMap,
    failures: Sequence[HeadFailure],
) -> PlasticitySummary:
    """Per-head maps, the position profile and the distance map."""
    averaged = ("ap_overall", *_QUINTILES, "ap_drop")
    return PlasticitySummary(
        model=MeasuredModel(model),
        maps=PlasticityMaps(
            plasticity=head_map(heads, "ap_overall"),
            plasticity_se=head_map(heads, "ap_se"),
            plasticity_drop=head_map(heads, "ap_drop"),
            plasticity_first_20pct=head_map(heads, "ap_first_20pct"),
            plasticity_last_20pct=head_map(heads, "ap_last_20pct"),
            q_R2_scalar=head_map(heads, "q_R2_scalar"),
        ),
        mean={name: _mean(getattr(row, name) for row in heads) for name in averaged},
        inter_key_distance=distances,
        failures=tuple(failures),
        provenance=PlasticityProvenance(settings, versions()),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return float(np.mean(finite)) if finite else None
