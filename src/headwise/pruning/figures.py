"""The curve of a search: units that left against the change of loss, beside other orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from headwise.drawing import BLUE, GREY, ORANGE, RED, new_figure, save_figure, titled_axes
from headwise.pruning.values import OURS, RANDOM, NestedSets, Part, SetCost

CURVE = "curve"
_GREEN = "#009E73"
_LOOKS = {OURS: (BLUE, "-"), RANDOM: (GREY, ":")}
_OTHERS = ((ORANGE, "--"), (RED, "-."), (_GREEN, "--"))


def curve_figure(nested: NestedSets, limit: float, part: Part = "held_out") -> Figure:
    """Change of loss on one text by number of units; the interval is of the search's own order."""
    figure = new_figure(6.0, 3.6)
    axes = titled_axes(
        figure,
        f"loss without {nested.unit}s, {nested.texts[part].name[:40]}",
        f"{nested.unit}s out of {nested.units}",
        "change of loss, nats per token",
    )
    others = dict(zip((n for n in nested.rivals if n != RANDOM), _OTHERS, strict=False))
    for name, sets in {OURS: nested.sets, **nested.rivals}.items():
        colour, line = _LOOKS.get(name) or others.get(name, (GREY, "-"))
        known = [(one.count, one.costs[part]) for one in sets if part in one.costs]
        counts = [0, *(count for count, _ in known)]
        axes.plot(
            counts, [0.0, *(c.value for _, c in known)], line, color=colour, label=name, marker="."
        )
        if name == OURS:
            lows, highs = ([0.0, *(getattr(c, end) for _, c in known)] for end in ("low", "high"))
            axes.fill_between(counts, lows, highs, color=colour, alpha=0.2, lw=0)
    axes.axhline(limit, color=GREY, lw=0.8)
    axes.axhline(0, color=GREY, lw=0.5)
    if nested.chosen:
        axes.axvline(nested.chosen, color=BLUE, lw=0.8, ls=":")
    axes.set_yscale("symlog", linthresh=max(_largest(nested.sets, part), limit, 1e-3))
    axes.legend(frameon=False, fontsize=8)
    return figure


def _largest(sets: Sequence[SetCost], part: Part) -> float:
    return max((abs(one.costs[part].value) for one in sets if part in one.costs), default=0.0)


def curve_figures(nested: NestedSets, limit: float, folder: Path) -> list[Path]:
    """Write `curve.png` and `curve.svg`, and the same for another kind of text."""
    paths = save_figure(curve_figure(nested, limit), folder / CURVE)
    if "other" in nested.texts:
        paths += save_figure(curve_figure(nested, limit, "other"), folder / f"{CURVE}_other")
    return paths
