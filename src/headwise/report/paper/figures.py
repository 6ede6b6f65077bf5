"""The paper's seven figures and three more, this study beside the published numbers.

Every function takes a `Source` and gives a matplotlib figure, or None where the study has nothing
to show. Published panels are drawn from the digitised maps and the printed numbers, in the same
style, so that `published_figures` shows them again without any study.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwise.drawing import (
    BLUE,
    CHANGE_COLOURS,
    GREY,
    RED,
    count_axis,
    draw_map,
    draw_masses,
)
from headwise.proof.zones import DRIFT
from headwise.report.figures import LINES, first_seeds, panels, save_all
from headwise.report.paper import values as paper
from headwise.report.source import MASS, Condition, Source
from headwise.report.verdict import main_run

CHANGES = TwoSlopeNorm(0.0, -0.4, 0.4)


def _histogram(axes: Axes, mass: np.ndarray, cut: float, title: str) -> None:
    counts, edges = np.histogram(mass.ravel(), bins=50, range=(0, 1))
    colours = [RED if left >= cut - 1e-9 else BLUE for left in edges[:-1]]
    axes.bar(edges[:-1], counts, width=0.02, align="edge", color=colours, edgecolor="white", lw=0.3)
    axes.axvline(cut, color="black", ls="--", lw=1)
    sick = int((mass > cut).sum())
    axes.set_ylim(0, max(counts) * 1.18)
    count_axis(axes)
    top = axes.get_ylim()[1] * 0.93
    axes.text(cut + 0.02, top, f"{sick} sick", color=RED)
    axes.text(cut - 0.02, top, f"{mass.size - sick} not", color=BLUE, ha="right")
    between = float(((mass > 0.4) & (mass <= 0.6)).mean())
    axes.set(xlabel=f"first-token mass ({between:.0%} of heads from 0.4 to 0.6)", ylabel="heads")
    axes.set_title(title, loc="left")


def histogram(source: Source | None) -> Figure | None:
    """Fig. 1: first-token mass over heads."""
    shown = [("published: BLOOM-1b7", paper.stock_masses()["1b7"], 0.5)]
    if source is not None and source.stock is not None and source.stock.diagnosis is not None:
        cut = source.stock.diagnosis.thresholds.sink
        shown.insert(0, (f"{source.model_name}, stock", source.stock.maps[MASS], cut))
    figure, grid = panels(len(shown), 5.2, 3.4)
    for axes, (title, mass, cut) in zip(grid, shown, strict=True):
        _histogram(axes, mass, cut, title)
    return figure


def cross_scale_maps(source: Source | None) -> Figure | None:
    """Fig. 2: first-token mass of every head, over model sizes."""
    shown = [(f"published: BLOOM-{name}", mass) for name, mass in paper.stock_masses().items()]
    if source is not None and source.stock is not None and source.stock.diagnosis is not None:
        shown.insert(0, (source.model_name, source.stock.maps[MASS]))
    figure, grid = panels(len(shown), 4.6, 3.7, columns=2 if len(shown) == 4 else 3)
    for axes, (title, mass) in zip(grid, shown, strict=True):
        image = draw_masses(axes, mass)
        sick = int((mass > 0.5).sum())
        axes.set_title(f"{title}: {sick / mass.size:.1%} ({sick}/{mass.size})", loc="left")
    figure.colorbar(image, ax=grid, label="first-token mass", fraction=0.03)
    return figure


def draw_change(
    axes: Axes, change: np.ndarray, operated: np.ndarray, outside: np.ndarray, title: str
) -> None:
    """One change map: dots on operated heads, a box around their zone, drift outside in words."""
    draw_map(axes, change, CHANGES, CHANGE_COLOURS)
    rows, columns = np.nonzero(operated)
    axes.scatter(columns, rows, s=8, fc="white", ec="black", lw=0.4)
    if len(rows):
        left, low = columns.min() - 0.5, rows.min() - 0.5
        size = columns.max() + 0.5 - left, rows.max() + 0.5 - low
        axes.add_patch(Rectangle((left, low), *size, fill=False, ec="black", lw=1.2, clip_on=False))
    size_outside = np.abs(change[outside])
    moved = int((size_outside > DRIFT).sum())
    mean = float(size_outside.mean()) if size_outside.size else 0.0
    axes.set_title(title, loc="left")
    axes.set_xlabel(
        f"head   (outside: {moved} of {int(outside.sum())} with |change| > 0.05, mean {mean:.4f})",
        fontsize=8,
    )


def _published_changes(
    names: Sequence[str],
) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    operated = paper.operated_1b7()
    outside = np.ones_like(operated)
    outside[5:23, 9:16] = False
    found = paper.epoch3_changes()
    return [(f"published: {name}, epoch 3", found[name], operated, outside) for name in names]


def _study_changes(
    source: Source | None, runs: Sequence[Condition]
) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    if source is None or source.stock is None or source.stock.diagnosis is None:
        return []
    shown = []
    for run in runs:
        if run.zones is None:
            continue
        change = run.maps[MASS] - source.stock.maps[MASS]
        shown.append((run.label, change, run.zones.operated, run.zones.outside))
    return shown


def _change_figure(shown: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]]) -> Figure | None:
    if not shown:
        return None
    figure, grid = panels(len(shown), 4.4, 4.0, columns=3 if len(shown) > 4 else 2)
    if len(shown) == 3:
        figure, grid = panels(3, 4.4, 4.4, columns=3)
    for axes, (title, change, operated, outside) in zip(grid, shown, strict=True):
        draw_change(axes, change, operated, outside, title)
    image = grid[0].images[0]
    figure.colorbar(image, ax=grid, label="change of first-token mass", fraction=0.03)
    return figure


def arm_changes(source: Source | None) -> Figure | None:
    """Fig. 3: change maps of every arm, and the published three."""
    ours = _study_changes(source, first_seeds(source))
    return _change_figure(ours + _published_changes(["curated", "Wikipedia", "C4"]))


def matched_changes(source: Source | None) -> Figure | None:
    """Fig. 4: the main arm beside another corpus (or its first control), at matched steps."""
    chosen: list[Condition] = []
    if source is not None and (main := main_run(source)) is not None:
        others = [c for c in first_seeds(source) if c.arm != main.arm and c.steps]
        others.sort(key=lambda c: c.mode != main.mode)
        chosen = [main, *others[:1]]
    return _change_figure(_study_changes(source, chosen) + _published_changes(["curated", "C4"]))


def loss_by_step(source: Source | None) -> Figure | None:
    """Fig. 5: validation perplexity by optimizer step with reference lines and minimum."""
    runs = [c for c in first_seeds(source) if len(c.validations) > 1]
    figure, grid = panels(2 if runs else 1, 5.4, 3.6)
    if runs and source is not None:
        axes = grid[0]
        for colour, run in zip(LINES * 3, runs, strict=False):
            steps = list(run.validations)
            values = [math.exp(loss) for loss in run.validations.values()]
            axes.plot(steps, values, color=colour, lw=1.4, marker=".", ms=4, label=run.arm)
            lowest = int(np.argmin(values))
            axes.scatter(steps[lowest], values[lowest], s=46, fc="none", ec=colour, lw=1.4)
        before = source.stock_validation(runs[0])
        if before is not None:
            axes.axhline(math.exp(before), color=GREY, ls="--", lw=1, label="stock")
        axes.set(xlabel="optimizer step (ring: minimum)", ylabel="validation perplexity")
        axes.set_title(f"{source.model_name}", loc="left")
        axes.legend(frameon=False, fontsize=7)
    _published_loss(grid[-1])
    return figure


def _published_loss(axes: Axes) -> None:
    values = paper.H5_TRAJECTORY
    axes.plot(range(len(values)), values, color=BLUE, lw=1.4)
    lowest = int(np.argmin(values))
    axes.scatter(lowest, values[lowest], s=46, fc="none", ec=BLUE, lw=1.4)
    axes.annotate(
        f"{values[lowest]:.2f} at step {lowest}",
        (lowest, values[lowest]),
        textcoords="offset points",
        xytext=(-78, -3),
        fontsize=8,
    )
    axes.axhline(16.99, color=GREY, ls="--", lw=1)
    axes.text(55, 17.1, "stock 16.99", ha="right", fontsize=8, color=GREY)
    axes.set(xlabel="optimizer step", ylabel="perplexity on 8 sentences")
    axes.set_title("published: BLOOM-1b7 band + H5", loc="left")


def watched_changes(source: Source | None) -> Figure | None:
    """Fig. 6: signed change of the watched heads; R marks operated ones."""
    shown: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
    main = None if source is None else main_run(source)
    if source is not None and main is not None:
        for title, change, operated, _ in _study_changes(source, [main]):
            if main.zones is not None and main.zones.watched.any():
                shown.append((title, change, operated, main.zones.watched))
    frozen = np.zeros((24, 16))
    mask = np.zeros((24, 16), dtype=bool)
    for name, value in paper.FROZEN_CHANGES.items():
        layer, head = map(int, name[1:].split("H"))
        frozen[layer, head], mask[layer, head] = value, True
    shown.append(("published: BLOOM-1b7, C4 epoch 15", frozen, paper.operated_1b7(), mask))
    figure, grid = panels(len(shown), 4.2, 4.4)
    for axes, (title, change, operated, watched) in zip(grid, shown, strict=True):
        _draw_watched(axes, change, operated, watched, title)
    figure.colorbar(grid[0].images[0], ax=grid, label="change of first-token mass", fraction=0.03)
    return figure


def _draw_watched(
    axes: Axes, change: np.ndarray, operated: np.ndarray, watched: np.ndarray, title: str
) -> None:
    zone = operated | watched
    rows, columns = np.flatnonzero(zone.any(1)), np.flatnonzero(zone.any(0))
    low, left = rows[0], columns[0]
    part = np.where(watched, change, np.nan)[low : rows[-1] + 1, left : columns[-1] + 1]
    axes.imshow(
        part,
        origin="lower",
        aspect="auto",
        cmap=CHANGE_COLOURS,
        norm=TwoSlopeNorm(0.0, -0.3, 0.3),
        extent=(left - 0.5, columns[-1] + 0.5, low - 0.5, rows[-1] + 0.5),
    )
    for layer, head in np.argwhere(operated):
        axes.text(head, layer, "R", ha="center", va="center", color=GREY, fontsize=7)
    for layer, head in np.argwhere(watched):
        axes.text(head, layer, f"{change[layer, head]:+.2f}", ha="center", va="center", fontsize=7)
    axes.set(
        xlabel="head",
        ylabel="layer",
        xticks=range(left, columns[-1] + 1),
        yticks=range(low, rows[-1] + 1),
    )
    axes.set_title(title, loc="left")


def column_drift(source: Source | None) -> Figure | None:
    """Fig. 7: mean |change| of the watched heads of each column over checkpoints."""
    main = None if source is None else main_run(source)
    found = {} if main is None or main.comparison is None else dict(main.comparison.columns)
    long = {name: entry for name, entry in found.items() if len(entry.steps) > 1}
    figure, grid = panels(2 if long else 1, 5.2, 3.5)
    if long and main is not None:
        for colour, (name, entry) in zip(LINES * 3, sorted(long.items()), strict=False):
            label = f"{name} ({entry.heads}) {entry.trend}"
            grid[0].plot(entry.steps, entry.mean_abs_delta, color=colour, lw=1.4, label=label)
        grid[0].set(xlabel="optimizer step", ylabel="mean |change| from stock")
        grid[0].set_title(main.label, loc="left")
    for colour, (name, (heads, means, trend)) in zip(LINES, paper.COLUMNS.items(), strict=False):
        grid[-1].plot(
            paper.COLUMN_EPOCHS,
            means,
            color=colour,
            lw=1.4,
            marker=".",
            label=f"{name} ({heads}) {trend}",
        )
    grid[-1].set(xlabel="epoch", ylabel="mean |change| from stock", xticks=paper.COLUMN_EPOCHS)
    grid[-1].set_title("published: BLOOM-1b7, C4", loc="left")
    for axes in grid:
        axes.axhline(DRIFT, color=GREY, ls="--", lw=1, label="0.05")
        axes.legend(frameon=False, fontsize=7)
        axes.set_ylim(bottom=0)
    return figure


PAPER_FIGURES = {
    1: ("histogram", "First-token mass over heads", histogram),
    2: ("cross_scale", "First-token mass by layer and head, over model sizes", cross_scale_maps),
    3: ("arm_changes", "Change of first-token mass, arm by arm", arm_changes),
    4: ("matched_changes", "Two corpora (or arms) at matched steps", matched_changes),
    5: ("loss_by_step", "Perplexity by optimizer step", loss_by_step),
    6: ("watched_changes", "Watched heads of the band", watched_changes),
    7: ("column_drift", "Columns over checkpoints", column_drift),
}


def published_figures(out: Path) -> list[Path]:
    """The published figures again, from the digitised data alone."""
    drawn = {f"figure{n}_{slug}": draw(None) for n, (slug, _, draw) in PAPER_FIGURES.items()}
    return save_all({name: figure for name, figure in drawn.items() if figure is not None}, out)
