"""What a triage shows: a table for the terminal, letters and colours of its classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.tables import Table, table

if TYPE_CHECKING:
    from headwise.intervals import Interval
    from headwise.triaging.values import Triage


# triage classes: letter and colour
TRIAGE_LETTERS = {
    "asleep": ("Z", "#b39ddb"),
    "harmful": ("X", "#ef9a9a"),
    "parked": ("P", "#90caf9"),
    "working": ("W", "#a5d6a7"),
    "empty": ("0", "#ffcc80"),
    "constant": ("c", "#ffe082"),
    "undecided": ("?", "#e0e0e0"),
}


def triage_table(found: Triage) -> Table:
    """The costs of every judged head in 80 columns: marks instead of intervals."""
    columns = ("head", "class", "zero", "mean", "unsink", "release", "by", "texts")
    rows = [
        (
            name,
            head.class_,
            *(_marked(cost) for cost in (head.zero, head.mean, head.unsink, head.release)),
            head.release_kind,
            head.documents,
        )
        for name, head in found.heads.items()
    ]
    title = f"{found.model.short_name}: change of loss, nats per token"
    on = found.diagnosis.provenance.basis
    title += f"\n(sick heads: {found.diagnosis.counts['sick']} on {on})" if on else ""
    return table(
        f"{title}\n(* the 95% interval leaves out 0; intervals: triage.json)", columns, rows
    )


def _marked(cost: Interval | None) -> str:
    """Seven characters and a mark where the interval is on one side of 0."""
    if cost is None:
        return ""
    digits = 4 if abs(cost.value) < 10 else 2
    return f"{cost.value:+.{digits}f}" + "*" * (cost.low > 0 or cost.high < 0)
