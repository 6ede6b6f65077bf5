"""The paper's tables of change (5 to 8): drift outside and inside the band, columns, one column.

Heads below the operation cannot move; they are counted apart everywhere, because their zeros would
dilute every rate. Maps of single steps are read on a few fixed blocks of validation text, and so is
the map they are compared with: only training moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.proof.zones import DRIFT, ZoneDrift, drift_by_zone
from headwise.report.paper import values as paper
from headwise.report.source import MASS, Condition, Source
from headwise.report.tables import (
    OURS,
    PAPER,
    Entry,
    Table,
    columns_of,
    make_table,
)

CHANGE = "+.3f"


def zone_drift(condition: Condition, name: str) -> ZoneDrift | None:
    """Drift of a zone, all passes counted; None without a comparison or without such heads."""
    if condition.comparison is None or condition.zones is None:
        return None
    drift = drift_by_zone(condition.comparison.delta[MASS], condition.zones)
    found: ZoneDrift = getattr(drift, name)
    return found if found.heads else None


def _drift_rows(source: Source, zone: str) -> list[list[Entry]]:
    rows: list[list[Entry]] = []
    for condition in source.runs:
        found = zone_drift(condition, zone)
        if found is not None:
            share = found.drifting / found.movable if found.movable else None
            worst = found.worst if found.worst is not None and found.worst.delta else None
            rows.append(
                [
                    condition.label,
                    OURS,
                    found.drifting,
                    found.heads,
                    found.movable,
                    share,
                    found.mean_abs_delta,
                    found.mean_abs_delta_movable,
                    "none" if worst is None else worst.head,
                    None if worst is None else worst.delta,
                ]
            )
    return rows


_DRIFT_COLUMNS = columns_of(
    "condition; source; heads with |change| > 0.05; heads; movable; "
    "of movable [.1%]; mean |change| [.4f]; mean |change|, movable [.4f]; "
    "worst head; its change [+.3f]"
)


def outside_drift(source: Source) -> Table:
    """Table 5: heads outside the zone."""
    rows = _drift_rows(source, "outside")
    heads, movable = paper.OUTSIDE_HEADS, paper.OUTSIDE_MOVABLE
    for name, (drifting, mean, worst, change) in paper.OUTSIDE.items():
        rows.append(
            [
                f"BLOOM-1b7 {name}",
                PAPER,
                drifting,
                heads,
                movable,
                drifting / movable,
                mean,
                mean * heads / movable,
                worst,
                change,
            ]
        )
    return make_table(
        5,
        "drift_outside",
        "Change of first-token mass outside the zone",
        _DRIFT_COLUMNS,
        rows,
        notes=paper.NOTES[5],
        missing="No comparison with stock here: only the published rows.",
    )


def watched_drift(source: Source) -> Table:
    """Table 6: frozen heads of the band."""
    rows = _drift_rows(source, "watched")
    heads, movable = paper.FROZEN_HEADS, paper.FROZEN_MOVABLE
    for name, (drifting, mean) in paper.FROZEN.items():
        rows.append(
            [
                f"BLOOM-1b7 {name}",
                PAPER,
                drifting,
                heads,
                movable,
                drifting / movable,
                mean,
                mean * heads / movable,
                None,
                None,
            ]
        )
    return make_table(
        6,
        "drift_watched",
        "Change of watched heads (in the band, not operated on)",
        _DRIFT_COLUMNS,
        rows,
        notes=paper.NOTES[6],
        missing="No plan of this study watches a head: the whole zone was operated on.",
    )


def columns_over_steps(source: Source) -> Table:
    """Table 7: mean |change| of the watched heads of each index over checkpoints."""
    columns = columns_of(
        "condition; source; column; watched heads; first; mean |change| first [.3f]; "
        "last; mean |change| last [.3f]; trend"
    )
    rows: list[list[Entry]] = []
    for condition in source.runs:
        found = {} if condition.comparison is None else condition.comparison.columns
        for name, entry in sorted(found.items(), key=lambda item: int(item[0][1:])):
            steps, means = entry.steps, entry.mean_abs_delta
            rows.append(
                [
                    condition.label,
                    OURS,
                    name,
                    entry.heads,
                    f"step {steps[0]}",
                    means[0],
                    f"step {steps[-1]}",
                    means[-1],
                    entry.trend,
                ]
            )
    for name, (heads, means, trend) in paper.COLUMNS.items():
        rows.append(
            ["BLOOM-1b7 C4", PAPER, name, heads, "epoch 3", means[0], "epoch 15", means[-1], trend]
        )
    note = (
        "Step maps are read on the same few blocks of validation text as the map before the "
        "operation, so a head that cannot move shows exactly 0."
    )
    return make_table(
        7,
        "columns",
        "Columns of watched heads over checkpoints",
        columns,
        rows,
        notes=(note, *paper.NOTES[7]),
        missing="No watched head in this study, so no column to follow.",
    )


def column_runs(source: Source) -> list[tuple[Condition, list[int]]]:
    """Surgery runs that also operate on heads that were not sick, and in which columns."""
    stock = None if source.stock is None else source.stock.sick
    found = []
    for condition in source.runs:
        if stock is None or condition.zones is None or condition.mode != "surgery":
            continue
        columns = [int(i) for i in np.flatnonzero((condition.zones.operated & ~stock).any(0))]
        if columns and condition.number == 1:
            found.append((condition, columns))
    return found


def column_heads(source: Source) -> Table:
    """Table 8: the column experiment, head by head."""
    columns = columns_of(
        "condition; source; head; stock mass [.3f]; stock class; mass after [.3f]; "
        "class after; change [+.0%]; ablation cost, stock [+.4f]; "
        "ablation cost, after [+.4f]"
    )
    rows: list[list[Entry]] = []
    for condition, indices in column_runs(source):
        rows += _column_rows(source, condition, indices)
    for layer, (before, after) in paper.COLUMN_H5.items():
        rows.append(
            [
                "BLOOM-1b7 band + H5",
                PAPER,
                f"L{layer}H5",
                before,
                "sink" if before > 0.5 else "healthy",
                after,
                "healthy",
                after / before - 1,
                None,
                None,
            ]
        )
    return make_table(
        8,
        "column_heads",
        "The column experiment: operating on healthy heads too",
        columns,
        rows,
        notes=paper.NOTES[8],
        missing="No surgery arm of this study operates on a head that was healthy in stock.",
    )


def _column_rows(source: Source, condition: Condition, indices: Sequence[int]) -> list[list[Entry]]:
    zones, stock = condition.zones, source.stock
    if zones is None or stock is None or stock.diagnosis is None or condition.diagnosis is None:
        return []
    before, after = stock.maps[MASS], condition.maps[MASS]
    rows: list[list[Entry]] = []
    for index in indices:
        for layer in np.flatnonzero(zones.operated[:, index]):
            head = f"L{layer}H{index}"
            old, new = float(before[layer, index]), float(after[layer, index])
            rows.append(
                [
                    condition.label,
                    OURS,
                    head,
                    old,
                    stock.diagnosis.classes[layer][index],
                    new,
                    condition.diagnosis.classes[layer][index],
                    new / old - 1 if old else None,
                    stock.ablation(head),
                    condition.ablation(head),
                ]
            )
    return rows


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


TABLES = (outside_drift, watched_drift, columns_over_steps, column_heads)
