"""Trajectories: how head maps move over the steps of a run, by column, by head and by zone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headwise.heads import heads_where
from headwise.surgery.run_state import read_maps

TREND = 0.02  # the paper's rule for a column


Map = Float[np.ndarray, "layer head"]


Mask = Bool[np.ndarray, "layer head"]


def run_maps(run: Path, first: Path | None = None) -> list[tuple[int, Map]]:
    """The (step, first-token mass) maps of a run; step -1 from its `first` pass, if that is given.

    A second pass starts from the patched model, and changes are told from the untouched one.
    """
    maps = read_maps(run)
    if first is not None:
        start = [found for found in read_maps(first) if found.step < 0]
        maps = start + [found for found in maps if found.step >= 0]
    return [(found.step, np.array(found.first_token_mass, dtype=float)) for found in maps]


def step_deltas(maps: Sequence[tuple[int, Map]], stock: Map) -> list[tuple[int, Map]]:
    """Changes by step: from the map of step -1 if the run kept one, else from stock."""
    start = next((mass for step, mass in maps if step < 0), stock)
    return [(step, mass - start) for step, mass in maps if step >= 0]


def column_trends(deltas: Sequence[tuple[int, Map]], watched: Mask) -> dict[str, Any]:
    """Mean |delta| of the watched heads of each index over checkpoints, and the paper's rule."""
    columns = {}
    for index in np.flatnonzero(watched.any(0)):
        rows = watched[:, index]
        means = [float(np.abs(delta[rows, index]).mean()) for _, delta in deltas]
        columns[f"H{int(index)}"] = {
            "heads": int(rows.sum()),
            "steps": [int(step) for step, _ in deltas],
            "mean_abs_delta": means,
            "trend": trend(means),
        }
    return columns


def trend(values: Sequence[float]) -> str:
    """spreading, recovering or stable: last against first, with a margin of 0.02."""
    if values[-1] > values[0] + TREND:
        return "spreading"
    return "recovering" if values[-1] < values[0] - TREND else "stable"


def trajectory_shapes(deltas: Sequence[tuple[int, Map]], watched: Mask) -> dict[str, str]:
    """The shape of each watched head's way over checkpoints, by the paper's rules."""
    return (
        {
            str(head): trajectory_shape([float(d[head.layer, head.index]) for _, d in deltas])
            for head in heads_where(watched)
        }
        if deltas
        else {}
    )


def trajectory_shape(values: Sequence[float]) -> str:
    """stable, increasing, decreasing, plateau, oscillating or mixed."""
    path = np.asarray(values)
    if len(path) < 3:
        return "insufficient"
    steps = np.diff(path)
    if np.abs(path).max() < 0.03:
        return "stable"
    if (steps > 0.005).all():
        return "increasing"
    if (steps < -0.005).all():
        return "decreasing"
    if np.ptp(path) < 0.03:
        return "plateau"
    changes = int((np.diff(np.sign(steps[steps != 0])) != 0).sum())
    return "oscillating" if changes >= 2 else "mixed"


def two_phenomena(
    deltas: Sequence[tuple[int, Map]], zones: Mapping[str, Mask]
) -> dict[str, Any] | None:
    """Early redistribution outside against later drift of watched heads, at matched steps."""
    if len(deltas) < 2:
        return None
    picked = {"early": deltas[len(deltas) // 5], "late": deltas[-1]}
    rows: dict[str, Any] = {name: {"step": int(step)} for name, (step, _) in picked.items()}
    rows["late_minus_early"] = {}
    for zone in ("outside", "watched"):
        mask = zones[zone] & zones["movable"]
        means = [_zone_mean(delta, mask) for _, delta in picked.values()]
        rows["early"][zone], rows["late"][zone] = means
        rows["late_minus_early"][zone] = None if None in means else means[1] - means[0]  # type: ignore[operator]
    return rows


def _zone_mean(delta: Map, mask: Mask) -> float | None:
    return float(np.abs(delta[mask]).mean()) if mask.any() else None
