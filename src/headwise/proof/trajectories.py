"""Trajectories: how head maps move over the steps of a run, by column, by head and by zone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from headwise.heads import heads_where
from headwise.proof.zones import Map, Mask, Zones
from headwise.surgery.run_state import read_maps
from headwise.values import OMITTED, Finite

TREND = 0.02  # the paper's rule for a column


@dataclass(frozen=True)
class ColumnTrend:
    """Mean |change| of the watched heads of one index over checkpoints."""

    heads: int
    steps: tuple[int, ...]
    mean_abs_delta: tuple[Finite, ...]
    trend: str


Phase = Literal["early", "late", "late_minus_early"]


@dataclass(frozen=True)
class PhaseMeans:
    """Mean |change| of the heads that can move, at one step or from one step to a later one."""

    outside: Finite | None
    watched: Finite | None
    step: int | None = field(default=None, metadata=OMITTED)  # None: a difference of two steps


def run_maps(run: Path, first: Path | None = None) -> list[tuple[int, Map]]:
    """The (step, first-token mass) maps of a run; step -1 from its `first` pass, if that is given.

    A second pass starts from the patched model, but changes are counted from the untouched one.
    """
    maps = read_maps(run)
    if first is not None:
        start = {step: mass for step, mass in read_maps(first).items() if step < 0}
        maps = start | {step: mass for step, mass in maps.items() if step >= 0}
    return [(step, np.array(mass, dtype=float)) for step, mass in maps.items()]


def step_deltas(maps: Sequence[tuple[int, Map]], stock: Map) -> list[tuple[int, Map]]:
    """Changes by step: from the map of step -1 if the run kept one, else from stock."""
    start = next((mass for step, mass in maps if step < 0), stock)
    return [(step, mass - start) for step, mass in maps if step >= 0]


def column_trends(deltas: Sequence[tuple[int, Map]], watched: Mask) -> dict[str, ColumnTrend]:
    """Mean |delta| of the watched heads of each index over checkpoints, and the paper's rule."""
    columns = {}
    for index in np.flatnonzero(watched.any(0)):
        rows = watched[:, index]
        means = [float(np.abs(delta[rows, index]).mean()) for _, delta in deltas]
        columns[f"H{int(index)}"] = ColumnTrend(
            int(rows.sum()), tuple(int(step) for step, _ in deltas), tuple(means), trend(means)
        )
    return columns


def trend(values: Sequence[float]) -> str:
    """spreading, recovering or stable: last against first, with a margin of 0.02."""
    if values[-1] > values[0] + TREND:
        return "spreading"
    return "recovering" if values[-1] < values[0] - TREND else "stable"


def trajectory_shapes(
    deltas: Sequence[tuple[int, Map]], watched: Mask, layers: Sequence[int] | None = None
) -> dict[str, str]:
    """The shape of each watched head's way over checkpoints, by the paper's rules."""
    if not deltas:
        return {}
    places = zip(np.argwhere(watched), heads_where(watched, layers), strict=True)
    return {
        str(head): trajectory_shape([float(delta[tuple(at)]) for _, delta in deltas])
        for at, head in places
    }


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
    deltas: Sequence[tuple[int, Map]], zones: Zones
) -> dict[Phase, PhaseMeans] | None:
    """Early redistribution outside against later drift of watched heads, at matched steps.

    The means at a fifth of the checkpoints and at the last one; None of fewer than two.
    """
    if len(deltas) < 2:
        return None
    early, late = (_phase(step, d, zones) for step, d in (deltas[len(deltas) // 5], deltas[-1]))
    change = PhaseMeans(
        _difference(late.outside, early.outside), _difference(late.watched, early.watched)
    )
    return {"early": early, "late": late, "late_minus_early": change}


def _phase(step: int, delta: Map, zones: Zones) -> PhaseMeans:
    masks = [mask & zones.movable for mask in (zones.outside, zones.watched)]
    outside, watched = (float(np.abs(delta[m]).mean()) if m.any() else None for m in masks)
    return PhaseMeans(outside, watched, int(step))


def _difference(late: float | None, early: float | None) -> float | None:
    return None if late is None or early is None else late - early
