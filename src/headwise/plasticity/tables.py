"""Plasticity as tables: the seed's three CSV files, and the summary as one JSON artefact.

Invariant: documented columns come first and in their order; None is an empty field (null in JSON).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headwise.artefacts import versions, write_text
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.values import (
    MAPS,
    DistanceMap,
    HeadFailure,
    HeadGrid,
    HeadRecord,
    PlasticitySummary,
)

Row = dict[str, object]

_ID = ("layer", "q_head", "k_head")
_QUINTILES = tuple(f"ap_quintile_{number}" for number in range(1, 6))

_CELL = ("q_bucket", "k_bucket", "plasticity", "n_pairs", "n_queries", "se", "q_position")


def _columns(*names: str, **renamed: str) -> dict[str, str]:
    """A column's name in the file -> its name in a row."""
    return {name: name for name in names} | renamed


# A table's name -> its columns; those of heads are attributes of a head's record.
COLUMNS = {
    "heads": _columns(
        *_ID,
        *("n_q_tokens", "n_k_tokens", "d_model", "q_R2_pos", "q_R2_scalar"),
        *("q_mae_baseline", "q_mae_proj", "q_mae_ratio"),
        *("q_resid0_skew", "q_resid0_kurt", "q_resid0_ks_p"),
        *("q_noise_med_abs_skew", "q_noise_med_abs_kurt", "q_noise_med_ks_p"),
        *("q_noise_frac_ks_p_lt_alpha", "ap_overall", "q_beta_norm", "ap_se"),
        *("ap_first_20pct", "ap_last_20pct", "ap_drop", *_QUINTILES),
        *("q_resid0_lilliefors_p", "q_noise_med_lilliefors_p"),
        *("q_noise_frac_lilliefors_p_lt_alpha", "n_cells", "n_pairs"),
    ),
    "buckets": _columns(*_ID, *_CELL),
    "components": _columns(*_ID, "component", "weight", "r2"),
}

# The same for the public code's files.
LEGACY_COLUMNS = {
    "heads": _columns(
        *_ID,
        *("n_q_tokens", "n_k_tokens", "d_model", "q_R2_pos", "q_beta_norm", "q_R2_scalar"),
        *("q_mae_baseline", "q_mae_proj", "q_mae_ratio"),
        *("q_resid0_skew", "q_resid0_kurt", "q_resid0_ks_p"),
        *("q_noise_med_abs_skew", "q_noise_med_abs_kurt", "q_noise_med_ks_p"),
        *("q_noise_frac_ks_p_lt_alpha", "ap_overall"),
    ),
    "buckets": _columns(*_ID, "q_bucket", "k_bucket", ap_bucket="plasticity"),
    "components": _columns(*_ID, "component", component_r2="r2", component_weight="weight"),
}


def table_rows(table: str, heads: Iterable[HeadRecord]) -> list[Row]:
    """The rows of `heads`, of `buckets` (a row for each cell) or of `components`."""
    if table == "heads":
        return [_named(head, COLUMNS["heads"]) for head in heads]
    if table == "buckets":
        return [_named(head, _ID) | _named(cell, _CELL) for head in heads for cell in head.cells]
    return [
        _named(head, _ID) | {"component": index, "weight": weight, "r2": r2}
        for head in heads
        for index, (weight, r2) in enumerate(zip(component_weights(head), head.r2, strict=True))
    ]


def _named(value: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}


def component_weights(head: HeadRecord) -> list[float]:
    """Each component's share of the R2 on position; equal shares if there is none."""
    positive = np.maximum(np.array([value or 0.0 for value in head.r2]), 0.0)
    total = positive.sum()
    weights = positive / total if total > 0 else np.full(len(positive), 1 / len(positive))
    return [float(weight) for weight in weights]


def write_tables(
    out: Path, settings: PlasticitySettings, heads: Sequence[HeadRecord]
) -> tuple[Path, ...]:
    """Write the three CSV files under `out`, with the public code's columns if asked."""
    names = (settings.output_csv, settings.bucket_csv, settings.component_csv)
    columns = LEGACY_COLUMNS if settings.legacy_columns else COLUMNS
    return tuple(
        write_csv(out / name, columns[table], table_rows(table, heads))
        for table, name in zip(columns, names, strict=True)
    )


def write_csv(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> Path:
    """The csv module, not pandas: the same bytes without half a second of import."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row[name] for name in columns.values()] for row in rows)
    return write_text(path, text.getvalue())


def head_map(heads: Sequence[HeadRecord], column: str) -> HeadGrid:
    """One column of the head table as [layer][head]; None where a head was not measured."""
    num_layers = 1 + max((head.layer for head in heads), default=-1)
    num_heads = 1 + max((head.q_head for head in heads), default=-1)
    values = {(head.layer, head.q_head): getattr(head, column) for head in heads}
    return tuple(
        tuple(values.get((layer, index)) for index in range(num_heads))
        for layer in range(num_layers)
    )


def distance_map(heads: Sequence[HeadRecord]) -> DistanceMap:
    """The pairs of all heads pooled by distance."""
    bins = [one for head in heads for one in head.distance]
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


def make_summary(
    model: Mapping[str, str],
    settings: PlasticitySettings,
    heads: Sequence[HeadRecord],
    failures: Sequence[HeadFailure],
) -> PlasticitySummary:
    """Per-head maps, the position profile and the distance map."""
    averaged = ("ap_overall", *_QUINTILES, "ap_drop")
    return PlasticitySummary(
        model=model,
        maps={name: head_map(heads, column) for name, column in MAPS.items()},
        mean={name: _mean(getattr(head, name) for head in heads) for name in averaged},
        inter_key_distance=distance_map(heads),
        failures=tuple(failures),
        settings=settings,
        versions=versions(),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return float(np.mean(finite)) if finite else None
