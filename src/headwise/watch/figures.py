"""Figures of a film: first-token mass of the heads that moved, and the run's scalars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from headwise.drawing import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    head_heat_map,
    new_figure,
    save_figures,
    titled_axes,
)
from headwise.heads import Head
from headwise.watch.film import Film

_NAMED = 6  # heads of the trajectories that the legend names


def film_figures(film: Film, out: Path) -> list[Path]:
    """Trajectories, scalars and the last map, as PNG and SVG."""
    last = film.readings[-1]
    figures = {
        "watch_trajectories": plot_trajectories(film),
        "watch_scalars": plot_scalars(film),
        "watch_last": head_heat_map(
            last.maps["first_token_mass"],
            f"first-token mass at step {last.step}",
            "first-token mass",
            marked=film.diagnosis().sick,
            layers=film.model.layers,
            sliding=film.model.sliding_rows,
            turn=film.thresholds.sink,
        ),
    }
    return save_figures(figures, out)


def plot_trajectories(film: Film) -> Figure:
    """Every head's first-token mass over steps; the ones that moved most by name."""
    mass = np.array([reading.maps["first_token_mass"] for reading in film.readings])
    moved = np.ptp(mass, axis=0)
    order = np.argsort(-moved, axis=None, kind="stable")
    places = [np.unravel_index(int(place), moved.shape) for place in order]
    figure = new_figure(6.4, 3.4)
    axes = titled_axes(figure, "first-token mass over training", "step", "first-token mass")
    for row, index in reversed(places[_NAMED:]):
        axes.plot(film.steps, mass[:, row, index], color=GREY, lw=0.5, alpha=0.5)
    for number, (row, index) in enumerate(places[:_NAMED]):
        head = Head(film.model.layer_numbers[row], int(index))
        axes.plot(film.steps, mass[:, row, index], lw=1.4, color=f"C{number}", label=str(head))
    axes.axhline(film.thresholds.sink, color=GREY, lw=0.8, ls="--")
    for alarm in film.alarms:
        axes.axvline(alarm.step, color=RED, lw=0.8, alpha=0.5)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=7)
    return figure


def plot_scalars(film: Film) -> Figure:
    """Sick heads and sink rate on the left, median entropy on the right."""
    rows = [reading.scalars for reading in film.readings]
    total = film.model.num_layers * film.model.num_heads
    figure = new_figure(6.4, 3.0)
    axes = titled_axes(figure, "the run", "step", "share of heads")
    axes.plot(film.steps, [r["sick_heads"] / total for r in rows], color=RED, label="sick")
    axes.plot(film.steps, [r["sink_rate"] for r in rows], color=ORANGE, label="sink rate")
    axes.set_ylim(0, 1)
    beside = axes.twinx()
    beside.plot(film.steps, [r["median_entropy"] for r in rows], color=BLUE)
    beside.set_ylabel("median entropy, nats", color=BLUE)
    axes.legend(frameon=False, fontsize=7)
    return figure
