"""Rows that the paper printed, below our own tables: a BLOOM study adds them, nothing else does.

Each function gives the rows for one table (`Table.key`), its source in the second place; what is
known to be wrong with the printed numbers goes along as notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headwise.diagnosis.bloom_maps import published_slopes
from headwise.report.paper import values as paper
from headwise.report.tables import sick_counts
from headwise.tables import Entry, Table, table

PAPER, RECOUNTED = "paper", "published map, recounted"
Rows = list[list[Entry]]


def with_published(ours: Table) -> Table:
    """One of our tables with the paper's rows and their errata."""
    notes = paper.NOTES[ours.key]
    if ours.key != "cross_scale":
        return ours.beside(_ROWS[ours.key](), notes)
    # the paper's own three columns stand beside the recounted ones
    extra = table("", "paper: band; paper: sick [.0%]; paper: 'layers affected'", []).columns
    rows = tuple((*row, None, None, None) for row in ours.rows)
    wide = replace(ours, title="Sick heads over model sizes", columns=ours.columns + extra)
    return replace(wide, rows=rows).beside(_cross_scale(), notes)


def _cross_scale() -> Rows:
    return [
        [
            f"BLOOM-{name}",
            RECOUNTED,
            None,
            *sick_counts(mass > 0.5, published_slopes(mass.shape[1])),
            paper.CROSS_SCALE[name][2],
            paper.CROSS_SCALE[name][3] / 100,
            paper.CROSS_SCALE[name][4],
        ]
        for name, mass in paper.stock_masses().items()
    ]


def _recovery() -> Rows:
    rows: Rows = []
    for name, (healthy, sink, dead, low, quick, held, weights, share) in paper.RECOVERY.items():
        counts = (healthy, sink, dead, low, (sink + dead) / 384)
        rows.append([f"BLOOM-1b7 {name}", PAPER, *counts, quick, held, weights, share])
    return rows


def _held_out() -> Rows:
    rows: Rows = []
    for name, (c4, prompts) in paper.HELD_OUT.items():
        rows.append([f"BLOOM-1b7 {name}", PAPER, "C4 validation", 50, 4024, c4, None, None])
        rows.append([f"BLOOM-1b7 {name}", PAPER, "12 prompts", 12, None, prompts, None, None])
    return rows


def _arms() -> Rows:
    rows: Rows = []
    for name, (woken, operated, quick, held) in paper.ARMS.items():
        what = ("surgery", name.split(",")[0], None, 1)
        counts = (operated, woken, None, quick, held, None, None)
        rows.append([f"BLOOM-1b7 {name}", PAPER, *what, *counts])
    return rows


def _outside() -> Rows:
    heads, movable = paper.OUTSIDE_HEADS, paper.OUTSIDE_MOVABLE
    rows: Rows = []
    for name, (drifting, mean, worst, change) in paper.OUTSIDE.items():
        counts = (drifting, heads, movable, drifting / movable, mean, mean * heads / movable)
        rows.append([f"BLOOM-1b7 {name}", PAPER, *counts, worst, change])
    return rows


def _watched() -> Rows:
    heads, movable = paper.FROZEN_HEADS, paper.FROZEN_MOVABLE
    rows: Rows = []
    for name, (drifting, mean) in paper.FROZEN.items():
        counts = (drifting, heads, movable, drifting / movable, mean, mean * heads / movable)
        rows.append([f"BLOOM-1b7 {name}", PAPER, *counts, None, None])
    return rows


def _columns() -> Rows:
    return [
        ["BLOOM-1b7 C4", PAPER, name, heads, "epoch 3", means[0], "epoch 15", means[-1], trend]
        for name, (heads, means, trend) in paper.COLUMNS.items()
    ]


def _column_heads() -> Rows:
    rows: Rows = []
    for layer, (before, after) in paper.COLUMN_H5.items():
        was = "sink" if before > 0.5 else "healthy"
        masses = (before, was, after, "healthy", after / before - 1)
        rows.append(["BLOOM-1b7 band + H5", PAPER, f"L{layer}H5", *masses, None, None])
    return rows


def _perplexities() -> Rows:
    printed = paper.PERPLEXITIES
    stock, band = printed["stock"], printed["band only, epoch 3"]
    operated, best = printed["post-operation, 126 heads"], printed["band + H5, step 42 of 140"]
    last = printed["band + H5, epoch 1"]
    return [
        ["BLOOM-1b7 band only", PAPER, stock, None, band, None, None, None, 27.52],
        ["BLOOM-1b7 band + H5", PAPER, stock, operated, best, 42, last, 140, None],
    ]


def _slopes() -> Rows:
    mass = paper.stock_masses()["1b7"]
    rows: Rows = []
    for head, slope in paper.SLOPES.items():
        sick = (float(mass[:, head].mean()), float((mass[:, head] > 0.5).mean()))
        rows.append([f"H{head}", PAPER, *slope, None, *sick])
    return rows


_ROWS: dict[str, Callable[[], Rows]] = {
    "recovery": _recovery,
    "held_out_perplexity": _held_out,
    "arms": _arms,
    "drift_outside": _outside,
    "drift_watched": _watched,
    "columns": _columns,
    "column_heads": _column_heads,
    "perplexity": _perplexities,
    "alibi_slopes": _slopes,
}
