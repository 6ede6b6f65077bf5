"""Tables of change: drift outside and inside the zone, columns, one column; and the cascade.

Heads below the operation cannot move; they are counted apart everywhere, because their zeros would
dilute every rate. Maps of single steps are read on a few fixed blocks of validation text, and so is
the map they are compared with: only training moves them.
"""

from __future__ import annotations

import numpy as np

from headwise.proof.zones import DRIFT, ZoneDrift, drift_by_zone
from headwise.report.source import MASS, Condition, Source
from headwise.tables import Entry, Table, table

DRIFT_COLUMNS = (
    "condition; heads with |change| > 0.05; heads; movable; of movable [.1%]; "
    "mean |change| [.4f]; mean |change|, movable [.4f]; worst head; its change [+.3f]"
)


_ON = (
    "On the texts on which heads are judged; the figure of steps, and the side effects of a run "
    "that kept them, are read on its validation blocks."
)


def _drift_rows(source: Source, name: str) -> list[list[Entry]]:
    """Drift of a zone in every condition that was compared and has such heads."""
    rows: list[list[Entry]] = []
    for condition in source.runs:
        if condition.comparison is None or condition.zones is None:
            continue
        model = condition.comparison.model
        by_zone = drift_by_zone(condition.comparison.delta[MASS], condition.zones, model.layers)
        zone: ZoneDrift = getattr(by_zone, name)
        if zone.heads:
            worst = zone.worst if zone.worst is not None and zone.worst.delta else None
            rows.append(
                [
                    condition.label,
                    zone.drifting,
                    zone.heads,
                    zone.movable,
                    zone.drifting / zone.movable if zone.movable else None,
                    zone.mean_abs_delta,
                    zone.mean_abs_delta_movable,
                    "none" if worst is None else worst.head,
                    None if worst is None else worst.delta,
                ]
            )
    return rows


def outside_drift(source: Source) -> Table:
    """Heads outside the zone."""
    return table(
        "Change of first-token mass outside the zone",
        DRIFT_COLUMNS,
        _drift_rows(source, "outside"),
        key="drift_outside",
        notes=[_ON],
        missing="No comparison with stock here.",
    )


def watched_drift(source: Source) -> Table:
    """Frozen heads of the zone."""
    return table(
        "Change of watched heads (in the band, not operated on)",
        DRIFT_COLUMNS,
        _drift_rows(source, "watched"),
        key="drift_watched",
        notes=[_ON],
        missing="No plan of this study watches a head: the whole zone was operated on.",
    )


def columns_over_steps(source: Source) -> Table:
    """Mean |change| of the watched heads of each index over checkpoints."""
    rows: list[list[Entry]] = []
    for condition in source.runs:
        columns = {} if condition.comparison is None else condition.comparison.columns
        for name, entry in sorted(columns.items(), key=lambda item: int(item[0][1:])):
            steps, means = entry.steps, entry.mean_abs_delta
            ends = (f"step {steps[0]}", means[0], f"step {steps[-1]}", means[-1])
            rows.append([condition.label, name, entry.heads, *ends, entry.trend])
    return table(
        "Columns of watched heads over checkpoints",
        "condition; column; watched heads; first; mean |change| first [.3f]; last; "
        "mean |change| last [.3f]; trend",
        rows,
        key="columns",
        notes=[
            "Step maps are read on the same few blocks of validation text as the map before the "
            "operation, so a head that cannot move shows exactly 0."
        ],
        missing="No watched head in this study, so no column to follow.",
    )


def column_heads(source: Source) -> Table:
    """Surgery runs that also operate on heads that were not sick, head by head."""
    rows: list[list[Entry]] = []
    stock = source.stock
    for run in source.runs:
        if stock is None or stock.diagnosis is None or run.diagnosis is None or run.zones is None:
            continue
        if run.mode != "surgery" or run.number > 1:
            continue
        operated, sick = run.zones.operated, stock.diagnosis.sick
        before, after = stock.maps[MASS], run.maps[MASS]
        numbers = run.diagnosis.model.layer_numbers
        for index in np.flatnonzero((operated & ~sick).any(0)):
            for row in np.flatnonzero(operated[:, index]):
                head = f"L{numbers[row]}H{index}"
                old, new = float(before[row, index]), float(after[row, index])
                rows.append(
                    [
                        run.label,
                        head,
                        old,
                        stock.diagnosis.classes[row][index],
                        new,
                        run.diagnosis.classes[row][index],
                        new / old - 1 if old else None,
                        stock.ablation(head),
                        run.ablation(head),
                    ]
                )
    return table(
        "The column experiment: operating on healthy heads too",
        "condition; head; stock mass [.3f]; stock class; mass after [.3f]; class after; "
        "change [+.0%]; ablation cost, stock [+.4f]; ablation cost, after [+.4f]",
        rows,
        key="column_heads",
        missing="No surgery arm of this study operates on a head that was healthy in stock.",
    )


def moved_untouched(source: Source, condition: Condition) -> tuple[int, int, str] | None:
    """Untouched heads that moved by more than 0.05, of how many that can, and on which text.

    A run that kept maps of its steps is counted on them, so that a verdict and the figure of these
    steps say the same; others are counted on the held-out text.
    """
    zones, comparison = condition.zones, condition.comparison
    if zones is None:
        return None
    untouched = zones.movable & ~zones.operated
    steps = cascade(source, condition)
    if steps:
        return steps[-1][2], int(untouched.sum()), "the run's validation blocks, as in the figure"
    if comparison is None:
        return None
    moved = (np.abs(comparison.delta[MASS]) > DRIFT) & untouched
    on = comparison.provenance.after.basis or "the held-out text"
    return int(moved.sum()), int(untouched.sum()), on


def cascade(source: Source, condition: Condition) -> list[tuple[int, int, int]]:
    """(step, all movable heads, movable heads not operated on) with |change| > 0.05."""
    zones, stock = condition.zones, source.stock
    if zones is None or stock is None or stock.diagnosis is None:
        return []
    if not zones.operated.any() or stock.maps[MASS].shape != zones.movable.shape:
        return []
    start = stock.maps[MASS] if condition.before is None else condition.before
    counts = []
    for step, mass in condition.steps:
        drifting = (np.abs(mass - start) > DRIFT) & zones.movable
        counts.append((step, int(drifting.sum()), int((drifting & ~zones.operated).sum())))
    return counts
