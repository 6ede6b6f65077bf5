"""Functional recovery: what became of every operated head, given what it was in stock.

A head that was never sick cannot recover: it is unchanged, or harmed.
"""

from __future__ import annotations

from headwise.diagnosis.values import SICK, Diagnosis
from headwise.heads import Head
from headwise.proof.evaluation import HeadCosts, HeadRecovery, Outcome, Recovery

RULE = (
    "sick in stock, not sick now, and zero ablation raises held-out loss with 95% confidence, "
    "at a false discovery rate of 5% over the judged heads"
)


def recovery_of(
    stock: Diagnosis, now: Diagnosis, costs: HeadCosts, targets: list[Head]
) -> Recovery | None:
    """Functional recovery of the operated heads; None if nothing was operated on."""
    if not targets:
        return None
    rows = {str(head): _head(stock, now, costs, head) for head in targets}
    ill = [row for row in rows.values() if row.was_sick]
    return Recovery(
        heads=rows,
        operated=len(rows),
        was_sick=len(ill),
        not_sick=sum(not row.sick for row in rows.values()),
        judged=sum(row.useful is not None for row in ill),
        functional=sum(row.functional for row in rows.values()),
        harmed=sum(row.outcome == "harmed" for row in rows.values()),
        exceptions=tuple(name for name, row in rows.items() if not row.functional),
        rule=RULE,
    )


def _head(stock: Diagnosis, now: Diagnosis, costs: HeadCosts, head: Head) -> HeadRecovery:
    cost = costs.ablation_zero.get(str(head))
    # one document has no interval
    useful = cost.is_useful if cost is not None and costs.documents > 1 else None
    was_sick, label = stock.class_of(head) in SICK, now.class_of(head)
    sick = label in SICK
    outcome = _outcome(was_sick, sick, useful)
    return HeadRecovery(label, sick, useful, outcome == "recovered", was_sick, outcome)


def _outcome(was_sick: bool, sick: bool, useful: bool | None) -> Outcome:
    if not was_sick:
        return "harmed" if sick else "unchanged"
    if sick:
        return "still sick"
    if useful is None:
        return "not judged"
    return "recovered" if useful else "no use shown"
