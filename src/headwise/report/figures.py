"""Figures of any study or run: overview, trajectories, cascade, plasticity."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from headwise.artefacts import write_bytes
from headwise.drawing import (
    AMOUNT_COLOURS,
    BLUE,
    GREY,
    ORANGE,
    RED,
    STYLE,
    count_axis,
    draw_map,
    draw_masses,
    mark_sliding,
    measured_part,
    new_figure,
    save_figure,
)
from headwise.report.drift import cascade
from headwise.report.source import MASS, Condition, Source


def panels(
    count: int, width: float, height: float, *, columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """A row-wise grid of axes in the house style."""
    across = min(columns, count)
    rows = -(-count // across)
    figure = new_figure(width * across, height * rows)
    with mpl.rc_context(STYLE):
        grid = figure.subplots(rows, across, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])


def save_pdf(figure: Figure, path: Path) -> Path:
    """The figure as PDF, without a date: same figure, same bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return write_bytes(path.with_suffix(".pdf"), buffer.getvalue())


def save_all(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """PNG, SVG and PDF of every figure."""
    written = []
    for name, figure in figures.items():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not once a format: half the time
        written += [*save_figure(figure, folder / name), save_pdf(figure, folder / name)]
    return written


def overview(source: Source | None) -> Figure | None:
    """Head maps of stock and of every arm in one row, each with what it did to held-out loss."""
    if source is None or source.stock is None or not source.runs:
        return None
    shown = [source.stock, *first_seeds(source)][:6]
    figure, grid = panels(len(shown), 2.5, 2.9, columns=len(shown))
    for axes, condition in zip(grid, shown, strict=True):
        mass = condition.maps[MASS]
        model = None if condition.diagnosis is None else condition.diagnosis.model
        image = draw_masses(axes, mass, condition.sick, None if model is None else model.layers)
        mark_sliding(axes, [] if model is None else model.sliding_rows)
        change = source.against_stock(condition.arm) if condition.run else None
        told = "" if change is None else f"loss {change.value:+.3f}, ".replace("-0.000", "0.000")
        sick = 0 if condition.sick is None else int(condition.sick.sum())
        axes.set_title(f"{condition.arm}\n{told}{sick} sick", loc="left")
    figure.colorbar(image, ax=grid, label="first-token mass", fraction=0.05)
    return figure


def trajectories(source: Source | None) -> Figure | None:
    """First-token mass of the operated heads over steps, arm by arm."""
    runs = [c for c in first_seeds(source) if len(c.steps) > 1]
    if not runs:
        return None
    figure, grid = panels(len(runs), 3.4, 2.7, columns=3)
    for axes, run in zip(grid, runs, strict=True):
        if run.zones is None or not run.zones.operated.any():
            continue
        operated = run.zones.operated
        steps = [step for step, _ in run.steps]
        paths = np.array([mass[operated] for _, mass in run.steps])  # (step, head)
        axes.plot(steps, paths, color=BLUE, alpha=0.25, lw=0.7)
        axes.plot(steps, np.median(paths, axis=1), color="black", lw=1.6)
        axes.axhline(0.5, color=GREY, ls="--", lw=1)
        axes.set(ylim=(0, 1.02), xlabel="step", ylabel="first-token mass")
        axes.set_title(f"{run.arm}\n{int(operated.sum())} operated heads", loc="left")
    return figure


def cascade_counts(source: Source | None) -> Figure | None:
    """How many heads nobody touched have moved by more than 0.05, by step."""
    counts = [(c.arm, cascade(source, c)) for c in first_seeds(source) if source is not None]
    shown = [(arm, rows) for arm, rows in counts if len(rows) > 1]
    if not shown:
        return None
    figure, (axes,) = panels(1, 6.4, 3.6)
    for colour, (arm, rows) in zip(LINES * 3, shown, strict=False):
        axes.plot([r[0] for r in rows], [r[2] for r in rows], color=colour, lw=1.4, label=arm)
    axes.set(xlabel="optimizer step", ylabel="heads with |change| > 0.05", ylim=(0, None))
    axes.set_title("untouched heads that moved, by step (on validation blocks)", loc="left")
    count_axis(axes)
    axes.legend(frameon=False, fontsize=7)
    return figure


def plasticity_maps(source: Source | None) -> Figure | None:
    """Attention plasticity of every head, where it was measured."""
    conditions = [] if source is None else source.conditions
    shown = [(c.label, c.plasticity.maps["plasticity"]) for c in conditions if c.plasticity]
    if not shown:
        return None
    figure, grid = panels(len(shown), 4.4, 3.6)
    for axes, (title, values) in zip(grid, shown, strict=True):
        known = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
        part, layers, heads = measured_part(known)
        image = draw_map(axes, part, Normalize(0, 1), AMOUNT_COLOURS, layers, heads)
        axes.set_title(f"{title}: attention plasticity", loc="left")
    figure.colorbar(image, ax=grid, label="plasticity", fraction=0.03)
    return figure


FIGURES = {
    "overview": ("Head maps of all arms, with the change of held-out loss", overview),
    "trajectories": ("First-token mass of the operated heads over steps", trajectories),
    "cascade": ("Untouched heads that moved, by step", cascade_counts),
    "plasticity": ("Attention plasticity", plasticity_maps),
}


LINES = (BLUE, RED, "#009E73", ORANGE, "#CC79A7", "#56B4E9", "#000000", GREY)  # Okabe-Ito


def first_seeds(source: Source | None) -> list[Condition]:
    """The last pass of the first seed of every arm."""
    return [] if source is None else [source.of_arm(arm)[0] for arm in source.arms()]
