"""What an evaluation, a comparison and completions show: tables for terminal and notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.heads import JOINT
from headwise.surgery.plan import plans_of
from headwise.tables import Table, table

if TYPE_CHECKING:
    from headwise.intervals import Interval
    from headwise.proof.completed_texts import Completions
    from headwise.proof.values import Comparison, Evaluation

_MOST = 8  # heads shown, those that matter most


def evaluation_tables(found: Evaluation) -> list[Table]:
    """Perplexities, and the heads that matter most."""
    losses = [
        (name, entry.documents, entry.predicted_tokens, entry.perplexity)
        for name, entry in found.text_sets.items()
    ]
    tables = [table("perplexity (95% interval)", ("texts", "documents", "tokens", "ppl"), losses)]
    if found.against_stock:
        changes = [(name, c, loss_verdict(c)) for name, c in found.against_stock.items()]
        title = "loss against stock, paired"
        tables.append(table(title, ("texts", "nats per token", "this patch"), changes))
    costs = found.heads.ablation_zero
    order = sorted(costs, key=lambda name: -costs[name].value)
    named = [name for name in order if name.startswith(JOINT)]
    named += [name for name in order if not name.startswith(JOINT)][:_MOST]
    if named:
        rows = [(name, costs[name].interval) for name in named]
        tables.append(table("loss without the head (nats per token)", ("head", "change"), rows))
    if found.recovery:
        r = found.recovery
        columns = "operated; ill in stock; sick; not sick now; judged; recovered; harmed"
        row = (r.operated, r.was_ill, r.was_sick, r.not_sick, r.judged, r.functional, r.harmed)
        tables.append(table("recovery" + _counted(found), columns, [row]))
        joint = (r.joint_stock, r.joint_now, r.joint_rise)
        if r.joint_rise is not None:
            title = "loss without all treated heads together (nats per token)"
            tables.append(table(title, ("in stock", "now", "difference"), [joint]))
    return tables


def evaluation_line(found: Evaluation) -> str:
    """What an evaluation says, in one line."""
    parts = [f"perplexity {e.perplexity.value:.4g} on {n}" for n, e in found.text_sets.items()]
    for name, change in (found.against_stock or {}).items():
        parts.append(f"this patch: {loss_verdict(change)} ({change.value:+.4f} nats on {name})")
    alone = [c for n, c in found.heads.ablation_zero.items() if not n.startswith(JOINT)]
    if alone:
        costly = sum(cost.interval.low > 0 for cost in alone)
        parts.append(f"{costly} of {len(alone)} heads cost loss when they are silenced")
    return "; ".join(parts)


def _counted(evaluation: Evaluation) -> str:
    """On which texts sick heads were counted here, and for the plan: the counts may differ."""
    on, plans = evaluation.diagnosis.provenance.basis, plans_of(evaluation.patches)
    lines = [f"\n(sick: on {on})"] if on else []
    told = dict.fromkeys(plan.diagnosed for plan in plans if plan.diagnosed)
    return "".join([*lines, *(f"\n(the plan rests on {count})" for count in told)])


def loss_verdict(change: Interval) -> str:
    """What a change of loss means for the model, in three words."""
    if change.low > 0:
        return "makes it WORSE"
    return "makes it better" if change.high < 0 else "no difference shown"


def comparison_tables(found: Comparison) -> list[Table]:
    """Class counts, drift by zone and paired losses."""
    moves, on = found.transitions, found.provenance.after.basis
    before, after = moves.counts_before, moves.counts_after
    counts = [(name, before[name], after[name]) for name in before]
    silent = [
        ("iatrogenic (fell ill untreated)", len(moves.iatrogenic_untreated)),
        ("self-healed (healed untreated)", len(moves.self_healed)),
        ("treated, no longer sick", len(moves.treated_no_longer_sick)),
    ]
    tables = [
        table(f"heads{on and f', counted on {on}'}", ("class", "before", "after"), counts),
        table("transitions", ("", "heads"), silent),
        _drift_table(found),
    ]
    if found.roles:
        whose = "treated heads" if found.plan is not None else "heads"
        roles = [(h, *(r.replace("_", " ") or "-" for r in two)) for h, two in found.roles.items()]
        tables.append(table(f"roles of {whose}", ("head", "before", "after"), roles))
    losses = [(name, entry.difference, entry.verdict) for name, entry in found.losses.items()]
    if losses:
        columns = ("texts", "nats per token", "verdict")
        tables.append(table("loss after - before, paired", columns, losses))
    if found.tasks:
        scores = [(t, m, c) for t, metrics in found.tasks.items() for m, c in metrics.items()]
        tables.append(
            table("tasks after - before, paired by item", ("task", "metric", "change"), scores)
        )
    if found.plasticity:
        moved = list(found.plasticity.mean_delta.items())
        tables.append(table("change of plasticity", ("zone", "mean change"), moved))
    return tables


def _drift_table(found: Comparison) -> Table:
    drifts = {zone: getattr(found.drift, zone) for zone in ("operated", "watched", "outside")}
    rows = []
    for zone, d in drifts.items():
        worst = d.worst and f"{d.worst.head} {d.worst.delta:+.3f}"
        rows.append((zone, d.heads, d.movable, d.drifting, d.mean_abs_delta, worst))
    columns = "zone; heads; movable; |change| > 0.05; mean |change|; worst"
    return table("drift of first-token mass", columns, rows)


def completions_table(found: Completions) -> Table:
    """The measures of every condition, as means over all prompts."""
    columns = ("condition", "words", "distinct-2", "repetition", "markup")
    keys = ("words", "distinct_2", "repetition", "markup_share")
    rows = [(name, *(s["all"][key] for key in keys)) for name, s in found.summary().items()]
    return table("completions", columns, rows)
