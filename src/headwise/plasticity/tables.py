"""Plasticity as tables: one record a head, the seed's three CSV files, and one JSON artefact.

A record is a head's result as plain values. It is what a finished head leaves on disk, so tables
made from fresh and from resumed heads are the same bytes.

Invariant: documented columns come first and in their order; NaN is an empty field (null in JSON).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise.artefacts import save_artefact, versions, write_text
from headwise.plasticity.head_group import HeadFailure, HeadResult
from headwise.plasticity.settings import PlasticitySettings

Record = dict[str, Any]


Row = dict[str, Any]


_ID = ("layer", "q_head", "k_head")


_SHAPE = ("n_q_tokens", "n_k_tokens", "d_model", "q_R2_pos")


_NORMALITY = (
    "q_R2_scalar",
    "q_mae_baseline",
    "q_mae_proj",
    "q_mae_ratio",
    "q_resid0_skew",
    "q_resid0_kurt",
    "q_resid0_ks_p",
    "q_noise_med_abs_skew",
    "q_noise_med_abs_kurt",
    "q_noise_med_ks_p",
    "q_noise_frac_ks_p_lt_alpha",
)


_QUINTILES = tuple(f"ap_quintile_{number}" for number in range(1, 6))


HEAD_COLUMNS = (
    *_ID,
    *_SHAPE,
    *_NORMALITY,
    "ap_overall",
    "q_beta_norm",
    "ap_se",
    "ap_first_20pct",
    "ap_last_20pct",
    "ap_drop",
    *_QUINTILES,
    "q_resid0_lilliefors_p",
    "q_noise_med_lilliefors_p",
    "q_noise_frac_lilliefors_p_lt_alpha",
    "n_cells",
    "n_pairs",
)


BUCKET_COLUMNS = (
    *_ID,
    "q_bucket",
    "k_bucket",
    "plasticity",
    "n_pairs",
    "n_queries",
    "se",
    "q_position",
)


COMPONENT_COLUMNS = (*_ID, "component", "weight", "r2")


LEGACY_HEAD_COLUMNS = (*_ID, *_SHAPE, "q_beta_norm", *_NORMALITY, "ap_overall")


LEGACY_BUCKET_COLUMNS = {name: name for name in BUCKET_COLUMNS[:5]} | {"ap_bucket": "plasticity"}


LEGACY_COMPONENT_COLUMNS = {name: name for name in COMPONENT_COLUMNS[:4]} | {
    "component_r2": "r2",
    "component_weight": "weight",
}


_CELL = ("q_bucket", "k_bucket", "plasticity", "n_pairs", "n_queries", "n_keys", "se")


def record_of(result: HeadResult) -> Record:
    """One head's result as plain values; NaN as None."""
    cells = result.cells
    used = np.argwhere(cells.distance_count > 0)
    return {
        **{name: getattr(result, name) for name in _ID},
        "metrics": {name: _plain(value) for name, value in result.metrics.items()},
        "r2": [_plain(value) for value in result.r2],
        "fifths": {str(bucket): counts for bucket, counts in result.fifths.items()},
        "tau": {str(bucket): position for bucket, position in result.tau.items()},
        "cells": [[_plain(getattr(cell, name)) for name in _CELL] for cell in cells.cells],
        "overall": _plain(cells.overall),
        "se": _plain(cells.se),
        "distance": [
            [int(i), int(j), float(cells.distance_sum[i, j]), int(cells.distance_count[i, j])]
            for i, j in used
        ],
    }


def _plain(value: float) -> float | int | None:
    number = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def head_row(record: Record, *, weighted: bool) -> Row:
    """The head's line of metrics: the seed's columns, then standard error and position profile."""
    quintiles = _quintiles(record, weighted=weighted)
    first, last = quintiles[0], quintiles[-1]
    finite = [cell for cell in record["cells"] if cell[2] is not None]
    return {
        **{name: record[name] for name in _ID},
        **record["metrics"],
        "ap_overall": record["overall"],
        "ap_se": record["se"],
        "ap_first_20pct": first,
        "ap_last_20pct": last,
        "ap_drop": None if first is None or last is None else first - last,
        **dict(zip(_QUINTILES, quintiles, strict=True)),
        "n_cells": len(finite),
        "n_pairs": sum(cell[3] for cell in finite),
    }


def _quintiles(record: Record, *, weighted: bool) -> list[float | None]:
    """Plasticity by fifths of the position range; a cell counts where its queries lie."""
    sums, weights = np.zeros(5), np.zeros(5)
    for q_bucket, _, plasticity, _, n_queries, n_keys, _ in record["cells"]:
        if plasticity is None:
            continue
        share = np.array(record["fifths"][str(q_bucket)]) / n_queries
        weight = share * (n_queries * n_keys if weighted else 1)
        sums += weight * plasticity
        weights += weight
    return [float(s / w) if w > 0 else None for s, w in zip(sums, weights, strict=True)]


def bucket_rows(record: Record) -> list[Row]:
    """One row a cell, by query bucket, then key bucket."""
    head = {name: record[name] for name in _ID}
    return [
        {**head, **dict(zip(_CELL, cell, strict=True)), "q_position": record["tau"][str(cell[0])]}
        for cell in record["cells"]
    ]


def component_rows(record: Record) -> list[Row]:
    """Each component's share of the R2 on position; equal shares if there is none."""
    positive = np.maximum(np.array([value or 0.0 for value in record["r2"]]), 0.0)
    total = positive.sum()
    weight = positive / total if total > 0 else np.full(len(positive), 1 / len(positive))
    head = {name: record[name] for name in _ID}
    return [
        {**head, "component": i, "weight": float(w), "r2": r2}
        for i, (w, r2) in enumerate(zip(weight, record["r2"], strict=True))
    ]


def write_csv(path: Path, columns: Sequence[str] | dict[str, str], rows: Iterable[Row]) -> Path:
    """Write rows under the given columns (a dict maps a column's name to the field it shows)."""
    names = columns if isinstance(columns, dict) else {name: name for name in columns}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row[source] for source in names.values()] for row in rows)
    return write_text(path, text.getvalue())


def write_tables(
    out: Path,
    settings: PlasticitySettings,
    heads: Sequence[Row],
    buckets: Sequence[Row],
    components: Sequence[Row],
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


def head_map(rows: Sequence[Row], column: str) -> list[list[float | None]]:
    """One column of the head table as [layer][head]; None where a head was not measured."""
    num_layers = 1 + max((row["layer"] for row in rows), default=-1)
    num_heads = 1 + max((row["q_head"] for row in rows), default=-1)
    grid: list[list[float | None]] = [[None] * num_heads for _ in range(num_layers)]
    for row in rows:
        grid[row["layer"]][row["q_head"]] = row[column]
    return grid


def distance_map(records: Sequence[Record]) -> dict[str, Any]:
    """Mean plasticity by distance between the two keys and distance of the query from them.

    Both axes are powers of two in tokens; a bin's value is its lower edge. Pairs of all heads are
    pooled.
    """
    cells = [cell for record in records for cell in record["distance"]]
    if not cells:
        return {"key_distance": [], "query_distance": [], "plasticity": [], "n_pairs": []}
    high = [1 + max(cell[axis] for cell in cells) for axis in (0, 1)]
    total, count = np.zeros(high), np.zeros(high)
    for i, j, value, pairs in cells:
        total[i, j] += value
        count[i, j] += pairs
    edges = [[2 ** max(e - 1, 0) for e in range(1, size)] for size in high]
    return {
        "key_distance": edges[0],
        "query_distance": edges[1],
        "plasticity": [
            [float(t / n) if n else None for t, n in zip(*rows, strict=True)]
            for rows in zip(total[1:, 1:], count[1:, 1:], strict=True)
        ],
        "n_pairs": count[1:, 1:].astype(int).tolist(),
    }


def save_summary(
    path: Path,
    model: str,
    settings: PlasticitySettings,
    heads: Sequence[Row],
    distances: dict[str, Any],
    failures: Sequence[HeadFailure],
) -> Path:
    """Write `plasticity.json`: per-head maps, the position profile and the distance map."""
    columns = {"plasticity": "ap_overall", "plasticity_se": "ap_se", "plasticity_drop": "ap_drop"}
    columns |= {"plasticity_first_20pct": "ap_first_20pct", "q_R2_scalar": "q_R2_scalar"}
    columns |= {"plasticity_last_20pct": "ap_last_20pct"}
    means = {name: _mean(row[name] for row in heads) for name in ("ap_overall", *_QUINTILES)}
    hidden = {"dataset_local_root", "max_workers", "backend", "scheduler"}
    return save_artefact(
        path,
        "plasticity",
        {
            "model": {"id": model},
            "maps": {name: head_map(heads, column) for name, column in columns.items()},
            "mean": means | {"ap_drop": _mean(row["ap_drop"] for row in heads)},
            "inter_key_distance": distances,
            "failures": [vars(failure) for failure in failures],
            "provenance": {
                "settings": settings.model_dump(mode="json", exclude=hidden),
                "versions": versions(),
            },
        },
    )


def _mean(values: Iterable[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return float(np.mean(finite)) if finite else None
