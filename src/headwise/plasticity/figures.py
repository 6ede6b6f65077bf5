"""Figures of attention plasticity: along position, by bucket, by component, by head.

The seed's three plots with colours that survive colour blindness, the layer x head map in the
style of the diagnosis, and two runs side by side. Every function takes rows or maps and returns a
`Figure`; nothing is measured here.

Invariant: a head or cell that was not measured is left blank, never drawn as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from headwise.drawing import (
    AMOUNT_COLOURS,
    BLUE,
    CHANGE_COLOURS,
    GREY,
    RED,
    draw_map,
    measured_part,
    new_figure,
    save_figures,
)
from headwise.errors import ArtefactError
from headwise.models.values import model_name
from headwise.plasticity.run import Plasticity
from headwise.plasticity.tables import component_weights, distance_map, head_map
from headwise.plasticity.values import DistanceMap, HeadRecord, PlasticitySummary

Statistic = Literal["mean", "median"]

CELL_COLOURS = "magma"
SCALE = Normalize(0, 1)  # what plasticity can be: 0.63 to 0.65 is one colour, as it should be
TREND_CHANGE = 0.1  # a line that moves less than this over its range counts as flat


def _array(grid: Sequence[Sequence[float | None]]) -> Float[np.ndarray, "layer head"]:
    return np.array([[np.nan if v is None else v for v in row] for row in grid], dtype=float)


def _panel(figure: Figure, place: tuple[int, int, int], title: str, x: str, y: str) -> Axes:
    axes = figure.add_subplot(*place)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")
    return axes


def _profile(heads: Sequence[HeadRecord]) -> Float[np.ndarray, "point 2"]:
    """(position, plasticity) of each query bucket: the mean over heads and key buckets."""
    points: dict[int, list[tuple[float, float]]] = {}
    for cell in (cell for head in heads for cell in head.cells):
        if cell.plasticity is not None:
            points.setdefault(cell.q_bucket, []).append((cell.q_position, cell.plasticity))
    means = [np.mean(points[bucket], axis=0) for bucket in sorted(points)]
    return np.array(means).reshape(-1, 2)


def trend_colour(points: Float[np.ndarray, "point 2"], change: float = TREND_CHANGE) -> str:
    """Blue if the fitted line rises by more than `change` over its range, red if it falls."""
    position, value = points.T
    if len(points) < 2 or np.ptp(position) == 0:
        return GREY
    moved = float(np.polyfit(position, value, 1)[0] * np.ptp(position))
    return BLUE if moved > change else RED if moved < -change else GREY


def plot_positions(heads: Sequence[HeadRecord], model: str) -> Figure:
    """Every head's plasticity along position, coloured by its trend, and the mean in black."""
    figure = new_figure(10.0, 6.0)
    title = f"Per-bucket attention plasticity: {model}"
    axes = _panel(figure, (1, 1, 1), title, "Position", "Attention plasticity")
    for head in heads:
        points = _profile([head])
        if len(points):
            axes.plot(*points.T, color=trend_colour(points), alpha=0.25, lw=0.8)
    mean = _profile(heads)
    if len(mean):
        axes.plot(*mean.T, color="black", lw=2.5, label="mean over heads")
    for colour, name in ((BLUE, "rising"), (RED, "falling"), (GREY, "flat")):
        axes.plot([], [], color=colour, lw=1.5, label=name)
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False)
    return figure


def plot_buckets(heads: Sequence[HeadRecord], model: str, statistic: Statistic = "mean") -> Figure:
    """Cells over heads: query buckets are rows, key buckets columns; white is no cell."""
    figure = new_figure(8.0, 6.0)
    title = f"Attention plasticity by bucket ({statistic} over heads): {model}"
    axes = _panel(figure, (1, 1, 1), title, "Key pair bucket", "Query bucket")
    cells = [cell for head in heads for cell in head.cells]
    q_buckets = sorted({cell.q_bucket for cell in cells})
    k_buckets = sorted({cell.k_bucket for cell in cells})
    values: dict[tuple[int, int], list[float]] = {}
    for cell in cells:
        if cell.plasticity is not None:
            place = q_buckets.index(cell.q_bucket), k_buckets.index(cell.k_bucket)
            values.setdefault(place, []).append(cell.plasticity)
    grid = np.full((len(q_buckets), len(k_buckets)), np.nan)
    for place, measured in values.items():
        grid[place] = np.mean(measured) if statistic == "mean" else np.median(measured)
    if grid.size:
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap=CELL_COLOURS, norm=SCALE)
        figure.colorbar(image, ax=axes, label="Attention plasticity")
        axes.set_xticks(range(len(k_buckets)), [str(bucket) for bucket in k_buckets], rotation=45)
        axes.set_yticks(range(len(q_buckets)), [str(bucket) for bucket in q_buckets])
    return figure


def plot_components(
    heads: Sequence[HeadRecord], model: str, statistic: Statistic = "mean"
) -> Figure:
    """Each component's share of the positional information, over heads."""
    figure = new_figure(10.0, 4.0)
    title = f"Positional information by component ({statistic} over heads): {model}"
    axes = _panel(figure, (1, 1, 1), title, "Component index", "Weight")
    weights: dict[int, list[float]] = {}
    for head in heads:
        for component, weight in enumerate(component_weights(head)):
            weights.setdefault(component, []).append(weight)
    index = sorted(weights)
    summary = np.mean if statistic == "mean" else np.median
    heights = [float(summary(weights[component])) for component in index]
    axes.bar(index, heights, color=BLUE)
    axes.set_xticks(index[:: max(1, -(-len(index) // 20))])
    axes.set_ylim(0, max(0.01, 1.1 * max(heights, default=0.0)))
    return figure


def plot_heads(values: Sequence[Sequence[float | None]], model: str) -> Figure:
    """Plasticity of every captured head as a layer x head map."""
    grid, layers, heads = measured_part(_array(values) if values else np.empty((0, 0)))
    num_layers, num_heads = grid.shape if grid.size else (1, 1)
    figure = new_figure(2.6 + 0.24 * num_heads, 1.6 + 0.2 * num_layers)
    axes = _panel(figure, (1, 1, 1), f"Attention plasticity: {model}", "head", "layer")
    if grid.size:
        image = draw_map(axes, grid, SCALE, AMOUNT_COLOURS, layers, heads)
        figure.colorbar(image, ax=axes, label="Attention plasticity")
    return figure


def plot_distances(distances: DistanceMap, model: str) -> Figure:
    """Plasticity by distance between the two keys and distance of the query from them."""
    figure = new_figure(7.0, 5.0)
    title = f"Plasticity by inter-key distance: {model}"
    axes = _panel(figure, (1, 1, 1), title, "Query to keys (tokens, from)", "Between keys (from)")
    grid = _array(distances.plasticity)
    if grid.size:
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap=CELL_COLOURS, norm=SCALE)
        axes.set_xticks(
            range(grid.shape[1]), [str(v) for v in distances.query_distance], rotation=45
        )
        axes.set_yticks(range(grid.shape[0]), [str(v) for v in distances.key_distance])
        figure.colorbar(image, ax=axes, label="Attention plasticity")
    return figure


def plot_before_and_after(before: Path, after: Path) -> Figure:
    """Two runs' `plasticity.json` side by side as head maps, and the difference."""
    grids = [_array(PlasticitySummary.load(p).maps["plasticity"]) for p in (before, after)]
    if grids[0].shape != grids[1].shape or not grids[0].size:
        shapes = " and ".join(str(grid.shape) for grid in grids)
        raise ArtefactError(f"cannot compare head maps of shapes {shapes}", where=after)
    num_layers, num_heads = grids[0].shape
    figure = new_figure(3.2 + 0.6 * num_heads, 1.8 + 0.2 * num_layers)
    for place, (name, grid) in enumerate(zip(("before", "after"), grids, strict=True), start=1):
        axes = _panel(figure, (1, 3, place), f"plasticity {name}", "head", "layer")
        image = draw_map(axes, grid, SCALE, AMOUNT_COLOURS)
        figure.colorbar(image, ax=axes)
    change = grids[1] - grids[0]
    seen = np.abs(change[np.isfinite(change)])
    reach = max(float(seen.max()) if seen.size else 0.0, 1e-6)
    axes = _panel(figure, (1, 3, 3), "after - before", "head", "layer")
    image = draw_map(axes, change, Normalize(-reach, reach), CHANGE_COLOURS)
    figure.colorbar(image, ax=axes)
    return figure


def plasticity_figures(plasticity: Plasticity, folder: Path) -> list[Path]:
    """Draw a run: PNG and SVG of every figure, into `folder`."""
    heads, model = plasticity.heads, model_name(plasticity.model)
    return save_figures(
        {
            "plasticity_by_position": plot_positions(heads, model),
            "plasticity_by_bucket": plot_buckets(heads, model),
            "component_weights": plot_components(heads, model),
            "plasticity_by_head": plot_heads(head_map(heads, "ap_overall"), model),
            "plasticity_by_distance": plot_distances(distance_map(heads), model),
        },
        folder,
    )
