"""Does the sick count depend on where the line is drawn? The threshold sweep and the valley."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.values import plain_fields

SWEEP = (0.40, 0.50, 0.60)
MODE_SHARE = 0.05  # a mode holds at least this share of the heads
BETWEEN = "share_between_0.4_and_0.6"  # the key in diagnosis.json


@dataclass(frozen=True)
class ThresholdSweep:
    """Sick counts at several thresholds (by name, "0.40"), the share of heads between, the valley.

    The valley is the deepest dip of the density of first-token mass: depth 1 is an empty gap, 0 no
    dip.
    """

    counts: Mapping[str, int]
    share_between: float
    depth: float = 0.0
    position: float | None = None
    modes: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The entry of `diagnosis.json`."""
        body = plain_fields(self)
        body[BETWEEN] = body.pop("share_between")
        valley = {name: body.pop(name) for name in ("depth", "position", "modes")}
        return {**body, "valley": valley}


def threshold_sweep(mass: Float[np.ndarray, "layer head"]) -> ThresholdSweep:
    """Sick counts at 0.40, 0.50 and 0.60, the share between, and the valley of the histogram."""
    counts = {f"{cut:.2f}": int((mass > cut).sum()) for cut in SWEEP}
    share_between = float(((mass > 0.4) & (mass <= 0.6)).mean())
    return ThresholdSweep(counts, share_between, *_valley(mass.ravel()))


def _density(
    values: Float[np.ndarray, " head"], grid: Float[np.ndarray, " point"]
) -> Float[np.ndarray, " point"]:
    """Gaussian kernels of Scott's width (scipy's `gaussian_kde`, whose import takes a second)."""
    width = values.std(ddof=1) * len(values) ** -0.2
    kernels = np.exp(-0.5 * ((grid[:, None] - values[None]) / width) ** 2)
    return np.asarray(kernels.mean(1) / (width * np.sqrt(2 * np.pi)))


def _valley(
    values: Float[np.ndarray, " head"],
) -> tuple[float, float | None, tuple[float, ...]]:
    """Depth, place and neighbouring modes of the deepest dip of a kernel density.

    Each side must hold 5% of the heads, or one stray head in a tail would pass for a mode.
    """
    if values.std() < 1e-6:
        return 0.0, None, ()
    grid = np.linspace(0, 1, 201)
    density = _density(values, grid)
    left = np.maximum.accumulate(density)
    right = np.maximum.accumulate(density[::-1])[::-1]
    below = (values[None] <= grid[:, None]).mean(1)
    sided = np.minimum(below, 1 - below) >= MODE_SHARE
    depth = np.where(sided, 1 - density / np.maximum(np.minimum(left, right), 1e-12), 0.0)
    lowest = int(np.argmax(depth))
    if depth[lowest] <= 0:
        return 0.0, None, ()
    modes = (grid[np.argmax(density[:lowest])], grid[lowest + np.argmax(density[lowest:])])
    return float(depth[lowest]), float(grid[lowest]), tuple(float(mode) for mode in modes)
