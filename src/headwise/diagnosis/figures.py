"""Figures: one look everywhere, colour-blind-safe, PNG for slides and SVG for papers.

Every function takes values (a `Diagnosis`, maps) and returns a matplotlib `Figure`; `save_figure`
writes it. No pyplot: no global state, nothing to close. The same figure gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:  # the report draws from artefacts and must not load torch
    from headwise.diagnosis.survey import Survey
    from headwise.diagnosis.values import Diagnosis
from headwise.drawing import (
    BLUE,
    GREY,
    RED,
    STYLE,
    count_axis,
    draw_masses,
    head_heat_map,
    mark_sliding,
    new_figure,
    save_figures,
    titled_axes,
)


def mass_histogram(diagnosis: Diagnosis) -> Figure:
    """Histogram of first-token mass over heads (paper Fig. 1), bars coloured by the threshold."""
    mass = diagnosis.maps["first_token_mass"].ravel()
    cut = diagnosis.thresholds.sink
    figure = new_figure(6.4, 3.6)
    title = f"{diagnosis.model.short_name}: first-token mass of {mass.size} heads"
    axes = titled_axes(figure, title, "first-token mass", "heads")
    counts, edges = np.histogram(mass, bins=50, range=(0, 1))
    colours = [RED if left >= cut else BLUE for left in edges[:-1]]
    axes.bar(edges[:-1], counts, width=0.02, align="edge", color=colours, edgecolor="white", lw=0.3)
    axes.axvline(cut, color="black", ls="--", lw=1)
    count_axis(axes)
    counted = diagnosis.counts
    axes.text(cut + 0.01, axes.get_ylim()[1] * 0.94, f"{counted['sick']} sick", color=RED)
    axes.text(
        cut - 0.01,
        axes.get_ylim()[1] * 0.94,
        f"{counted['total'] - counted['sick']} not",
        color=BLUE,
        ha="right",
    )
    sweep = diagnosis.threshold_sweep
    note = (
        f"between 0.4 and 0.6: {sweep.share_between:.0%} of heads; valley depth {sweep.depth:.2f}"
    )
    axes.set_xlabel(f"first-token mass   ({note})")
    return figure


def mass_against_slope(diagnosis: Diagnosis) -> Figure:
    """First-token mass of every head against its ALiBi slope, with the positional baseline."""
    slope = diagnosis.maps["slope"]
    mass = diagnosis.maps["first_token_mass"]
    figure = new_figure(6.4, 3.6)
    axes = titled_axes(
        figure,
        f"{diagnosis.model.short_name}: shallow slopes sink",
        "ALiBi slope (log)",
        "first-token mass",
    )
    sick = diagnosis.sick
    axes.scatter(slope[~sick], mass[~sick], s=12, color=BLUE, alpha=0.7, label="not sick")
    axes.scatter(slope[sick], mass[sick], s=12, color=RED, alpha=0.7, label="sick")
    axes.plot(slope[0], mass.mean(0), color="black", lw=1, label="mean of index")
    baseline = diagnosis.maps.get("first_token_mass_positional_baseline")
    if baseline is not None:
        axes.plot(slope[0], baseline[0], color=GREY, ls=":", label="q.k = 0")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8)
    return figure


def position_profile(diagnosis: Diagnosis) -> Figure:
    """First-token mass by query position: sick and other heads apart, one thin line a head."""
    assert diagnosis.profile is not None
    profile = diagnosis.profile.first_token_mass
    starts = np.array(diagnosis.profile.bucket_start)
    middle = np.sqrt((starts + 0.5) * (np.array(diagnosis.profile.bucket_stop) - 0.5))
    figure = new_figure(6.4, 3.6)
    axes = titled_axes(
        figure,
        f"{diagnosis.model.short_name}: first-token mass along the text",
        "query position (log2 buckets)",
        "first-token mass",
    )
    sick = diagnosis.sick
    for mask, colour, label in ((~sick, BLUE, "not sick"), (sick, RED, "sick")):
        if not mask.any():
            continue
        axes.plot(middle, profile[mask].T, color=colour, alpha=0.15, lw=0.7)
        axes.plot(middle, profile[mask].mean(0), color=colour, lw=2.2, label=f"mean of {label}")
    axes.plot(middle, 1 / (middle + 0.5), color=GREY, ls=":", label="uniform attention")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, fontsize=8)
    return figure


def survey_panels(survey: Survey) -> Figure:
    """Heat maps of first-token mass side by side (paper Fig. 2)."""
    count = len(survey.diagnoses)
    columns = min(2, count)
    rows = -(-count // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    with mpl.rc_context(STYLE):
        grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes, diagnosis, row in zip(grid.flat, survey.diagnoses, survey.rows, strict=False):
        mass, layers = diagnosis.maps["first_token_mass"], diagnosis.model.layers
        draw_masses(axes, mass, diagnosis.sick, layers, diagnosis.thresholds.sink)
        mark_sliding(axes, diagnosis.model.sliding_rows)
        axes.set_title(
            f"{row.model}: {row.sick_share:.1%} sick ({row.sick}/{row.total_heads})",
            loc="left",
        )
    image = grid[0, 0].images[0]  # all panels share one scale
    figure.colorbar(image, ax=grid, label="first-token mass", fraction=0.03)
    return figure


def diagnosis_figures(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """All figures of one diagnosis that its maps allow."""
    mass, name = diagnosis.maps["first_token_mass"], diagnosis.model.short_name
    figures = {
        "first_token_mass_histogram": mass_histogram(diagnosis),
        "first_token_mass_map": head_heat_map(
            mass,
            f"{name}\nfirst-token mass; a dot marks a sick head",
            "first-token mass",
            marked=diagnosis.sick,
            layers=diagnosis.model.layers,
            sliding=diagnosis.model.sliding_rows,
            turn=diagnosis.thresholds.sink,
        ),
    }
    if "entropy" in diagnosis.maps:
        figures["entropy_map"] = head_heat_map(
            diagnosis.maps["entropy"],
            f"{name}\nattention entropy",
            "nats",
            layers=diagnosis.model.layers,
            sliding=diagnosis.model.sliding_rows,
        )
    if "slope" in diagnosis.maps:
        figures["mass_against_slope"] = mass_against_slope(diagnosis)
    if diagnosis.profile:
        figures["profile_by_position"] = position_profile(diagnosis)
    return save_figures(figures, folder)
