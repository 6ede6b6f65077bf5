"""One look for all figures: colour-blind-safe, PNG for slides and SVG for papers.

No pyplot: no global state, nothing to close. The same figure gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, TwoSlopeNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.spines import Spine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from headwise.artefacts import write_bytes

BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#7F7F7F"
BLACK, DARK_INK, DARK_PAPER = "#000000", "#e8e6e1", "#1c1f25"  # the page's own dark colours

STYLE: Any = {  # matplotlib types its keys one by one, 300 of them
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "svg.hashsalt": "headwise",
    "svg.fonttype": "none",
}

AMOUNT_COLOURS = "cividis"  # sequential, made for colour-blind readers
CHANGE_COLOURS = "RdBu_r"  # diverging, safe

# first-token mass turns from blue to orange at the threshold: a sequential scale is grey just where
# the question is. Both halves grow darker away from it; blue and orange are safe.
MASS_COLOURS = LinearSegmentedColormap.from_list(
    "mass", [(0, "#08306b"), (0.5, "#d3e4f3"), (0.5, "#fdd9b4"), (1, "#8c2d04")]
)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in the house style."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """The figure as `png` or `svg`, without a date."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write `path` with the endings .png and .svg."""
    return [
        write_bytes(path.with_suffix(f".{kind}"), figure_bytes(figure, kind))
        for kind in ("png", "svg")
    ]


def darken(figure: Figure) -> None:
    """Light ink on dark paper; maps, marks and what stands on them keep their colours."""
    figure.set_facecolor(DARK_PAPER)
    on_maps = {text for axes in figure.axes if axes.images for text in axes.texts}
    for axes in figure.axes:
        axes.set_facecolor(DARK_PAPER)
        axes.tick_params(which="both", color=DARK_INK)
    for artist in figure.findobj():
        if isinstance(artist, (Text, Line2D)) and artist not in on_maps:
            if to_hex(artist.get_color()) == BLACK:
                artist.set_color(DARK_INK)
        elif isinstance(artist, Spine):
            artist.set_edgecolor(DARK_INK)


def titled_axes(figure: Figure, title: str, x: str, y: str) -> Axes:
    """Axes of a figure in the house style, with a title and labels."""
    with mpl.rc_context(STYLE):
        axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")
    return axes


def draw_masses(
    axes: Axes,
    mass: Float[np.ndarray, "layer head"],
    sick: Bool[np.ndarray, "layer head"] | None = None,
    layers: Sequence[int] | None = None,
    cut: float = 0.5,
) -> Any:
    """First-token mass of every head: colours turn at the threshold, sick heads get a dot."""
    image = draw_map(axes, mass, TwoSlopeNorm(cut, 0.0, 1.0), MASS_COLOURS, layers)
    mark_heads(axes, mass > cut if sick is None else sick)
    return image


def mark_heads(axes: Axes, marked: Bool[np.ndarray, "layer head"]) -> None:
    """A dot on some heads of a map."""
    rows, columns = np.nonzero(marked)
    axes.scatter(columns, rows, s=7, color="white", edgecolor="black", lw=0.5)


def mark_sliding(axes: Axes, rows: Sequence[int]) -> None:
    """A bar before the layers whose attention slides over a window; the others see all."""
    for row in rows:
        axes.plot([-0.68] * 2, [row - 0.42, row + 0.42], color=ORANGE, lw=2.5, clip_on=False)
    if rows:
        left, right, *_ = axes.images[0].get_extent()
        axes.set(xlim=(left, right), ylabel="layer (bar: sliding window)")


def measured_part(
    values: Float[np.ndarray, "layer head"],
) -> tuple[Float[np.ndarray, "row column"], list[int], list[int]]:
    """The rows and columns of a map that hold a number, and which layers and heads they are."""
    known = np.isfinite(values)
    rows, columns = np.flatnonzero(known.any(1)), np.flatnonzero(known.any(0))
    return values[np.ix_(rows, columns)], rows.tolist(), columns.tolist()


def count_axis(axes: Axes, across: bool = False) -> None:
    """Whole numbers on the axis that counts heads, upwards or across."""
    (axes.xaxis if across else axes.yaxis).set_major_locator(MaxNLocator(integer=True))


def draw_map(
    axes: Axes,
    values: Float[np.ndarray, "layer head"],
    norm: Normalize,
    colours: str | Colormap,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Any:
    """One layer x head map, layer 0 at the bottom as in the paper.

    `layers` and `heads` number the rows and columns, where these are not all.
    """
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=colours, norm=norm)
    axes.set(xlabel="head", ylabel="layer")
    num_layers, num_heads = values.shape
    columns = range(0, num_heads, max(1, num_heads // 16))
    axes.set_xticks(columns, [str(at if heads is None else heads[at]) for at in columns])
    rows = range(0, num_layers, max(1, num_layers // 12))
    axes.set_yticks(rows, [str(row if layers is None else layers[row]) for row in rows])
    for side in axes.spines.values():
        side.set_visible(False)
    return image


def head_heat_map(
    values: Float[np.ndarray, "layer head"],
    title: str,
    label: str,
    *,
    marked: Bool[np.ndarray, "layer head"] | None = None,
    layers: Sequence[int] | None = None,
    sliding: Sequence[int] = (),
    turn: float | None = None,
) -> Figure:
    """A layer x head map with its colour bar; `marked` heads get a dot.

    `turn`: a share whose colours turn at this threshold, as first-token mass does. `sliding` rows
    are layers whose attention slides over a window.
    """
    num_layers, num_heads = values.shape
    figure = new_figure(max(4.4, 2.2 + 0.24 * num_heads), max(2.8, 1.4 + 0.2 * num_layers))
    axes = titled_axes(figure, title, "head", "layer")
    low, high = float(np.nanmin(values)), float(np.nanmax(values)) or 1.0
    if turn is None:
        norm = Normalize(low, max(high, low + 1e-9))
        image = draw_map(axes, values, norm, AMOUNT_COLOURS, layers)
    else:
        image = draw_map(axes, values, TwoSlopeNorm(turn, 0.0, 1.0), MASS_COLOURS, layers)
    mark_sliding(axes, sliding)
    if marked is not None:
        mark_heads(axes, marked)
    figure.colorbar(image, ax=axes, label=label, fraction=0.05, pad=0.02)
    return figure


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Save named figures into a folder."""
    return [path for name, one in figures.items() for path in save_figure(one, folder / name)]
