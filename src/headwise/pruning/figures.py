"""The curve of a search: units that left against the change of loss, beside other orders."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from headwise.drawing import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    count_axis,
    new_figure,
    save_figure,
    titled_axes,
)
from headwise.pruning.values import OURS, RANDOM, NestedSets, Part

CURVE = "curve"
_GREEN = "#009E73"
_LOOKS = {OURS: (BLUE, "-"), RANDOM: (GREY, ":")}
_OTHERS = ((ORANGE, "--"), (RED, "-."), (_GREEN, "--"))


def curve_figure(nested: NestedSets, part: Part = "held_out") -> Figure:
    """Change of loss on one text by number of units; the interval is of the search's own order."""
    limit, figure = nested.settings.search.max_loss, new_figure(6.0, 3.6)
    axes = titled_axes(
        figure,
        f"loss without {nested.unit}s, {nested.texts[part].name[:40]}",
        f"{nested.unit}s out of {nested.units}",
        "change of loss, nats per token",
    )
    others = dict(zip((n for n in nested.costs if n not in _LOOKS), _OTHERS, strict=False))
    largest = 0.0
    for name, sets in nested.costs.items():
        colour, line = _LOOKS.get(name) or others.get(name, (GREY, "-"))
        known = [(count, costs[part]) for count, costs in sets.items() if part in costs]
        counts = [0, *(count for count, _ in known)]
        axes.plot(
            counts, [0.0, *(c.value for _, c in known)], line, color=colour, label=name, marker="."
        )
        if name == OURS:
            largest = max((abs(cost.value) for _, cost in known), default=0.0)
            lows, highs = ([0.0, *(getattr(c, end) for _, c in known)] for end in ("low", "high"))
            axes.fill_between(counts, lows, highs, color=colour, alpha=0.2, lw=0)
    axes.axhline(limit, color=GREY, lw=0.8)
    axes.axhline(0, color=GREY, lw=0.5)
    if nested.chosen:
        axes.axvline(nested.chosen, color=BLUE, lw=0.8, ls=":")
    axes.set_yscale("symlog", linthresh=max(largest, limit, 1e-3))
    count_axis(axes, across=True)
    axes.legend(frameon=False, fontsize=8)
    return figure


def curve_figures(nested: NestedSets, folder: Path) -> list[Path]:
    """Write `curve.png` and `curve.svg`, and the same for another kind of text."""
    paths = save_figure(curve_figure(nested), folder / CURVE)
    if "other" in nested.texts:
        paths += save_figure(curve_figure(nested, "other"), folder / f"{CURVE}_other")
    return paths
