"""The paper's tables of losses (3 and 9), and the losses that other tables quote."""

from __future__ import annotations

import math

from headwise.intervals import Interval
from headwise.report.paper import values as paper
from headwise.report.source import Condition, Source
from headwise.report.tables import (
    OURS,
    PAPER,
    Entry,
    Table,
    columns_of,
    make_table,
)


def best_validation(condition: Condition) -> float | None:
    """The best validation perplexity of a run."""
    losses = [check.loss for check in condition.validations]
    return math.exp(min(losses)) if losses else None


def held_out(source: Source, condition: Condition) -> Interval | None:
    """Perplexity on the judged text set."""
    name = source.judged_set
    found = condition.text_sets.get(name) if name else None
    return None if found is None else found.perplexity


def disjoint_perplexity(source: Source) -> Table:
    """Table 3: perplexity on every held-out set, and the paired change from stock."""
    columns = columns_of(
        "condition; source; text set; documents; predicted tokens [,]; perplexity [.4g]; "
        "loss - stock (nats) [+.4f]; reading"
    )
    rows: list[list[Entry]] = []
    for condition in source.conditions:
        for name, entry in condition.text_sets.items():
            paired = None if condition.comparison is None else condition.comparison.losses.get(name)
            rows.append(
                [
                    condition.label,
                    OURS,
                    name,
                    entry.documents,
                    entry.predicted_tokens,
                    entry.perplexity,
                    None if paired is None else paired.difference,
                    None if paired is None else paired.verdict,
                ]
            )
    for name, (c4, prompts) in paper.HELD_OUT.items():
        rows.append([f"BLOOM-1b7 {name}", PAPER, "C4 validation", 50, 4024, c4, None, None])
        rows.append([f"BLOOM-1b7 {name}", PAPER, "12 prompts", 12, None, prompts, None, None])
    return make_table(
        3,
        "held_out_perplexity",
        "Perplexity on disjoint held-out texts",
        columns,
        rows,
        notes=paper.NOTES[3],
        missing="No evaluation here: no loss on held-out text.",
    )


def against_stock(source: Source, arm: str, text_set: str | None = None) -> Interval | None:
    """Paired change of held-out loss: over all seeds if summarised, else of the first run."""
    name = text_set or source.judged_set
    if name is None:
        return None
    if source.summary is not None and arm in source.summary.against_stock:
        over_seeds = source.summary.against_stock[arm].get(name)
        return None if over_seeds is None else over_seeds.interval
    comparison = source.of_arm(arm)[0].comparison
    found = None if comparison is None else comparison.losses.get(name)
    return None if found is None else found.difference


def stock_validation(source: Source, condition: Condition) -> float | None:
    """Stock's loss on a run's validation text: step 0 of an arm that does not operate."""
    if condition.run is None:
        return None
    for other in source.runs:
        same = other.run is not None and other.run.corpus == condition.run.corpus
        if same and other.number == 1 and other.mode in ("gradient-only", "lora"):
            return next((check.loss for check in other.validations if check.step == 0), None)
    return None


def perplexities(source: Source) -> Table:
    """Table 9: validation perplexity right after the operation, at its best and at the end."""
    columns = columns_of(
        "condition; source; stock [.4g]; post-operation [.4g]; best [.4g]; best at step; "
        "last [.4g]; last step; held-out ppl [.4g]"
    )
    rows: list[list[Entry]] = []
    for condition in source.runs:
        checks = condition.validations
        if not checks:
            continue
        best = min(checks, key=lambda check: check.loss)
        before = stock_validation(source, condition) if condition.number == 1 else None
        rows.append(
            [
                condition.label,
                OURS,
                None if before is None else math.exp(before),
                math.exp(checks[0].loss) if checks[0].step == 0 else None,
                math.exp(best.loss),
                best.step,
                math.exp(checks[-1].loss),
                checks[-1].step,
                held_out(source, condition),
            ]
        )
    rows += _printed_perplexities()
    note = (
        "Post-operation is the validation at step 0, after the heads were changed and before any "
        "training. Stock is step 0 of an arm on the same corpus that changes nothing first."
    )
    return make_table(
        9,
        "perplexity",
        "Perplexity by condition, post-operation included",
        columns,
        rows,
        notes=(note, *paper.NOTES[9]),
        missing="No run with a trace here: only the published rows.",
    )


def _printed_perplexities() -> list[list[Entry]]:
    printed = paper.PERPLEXITIES
    stock, band = printed["stock"], printed["band only, epoch 3"]
    operated, best = printed["post-operation, 126 heads"], printed["band + H5, step 42 of 140"]
    last = printed["band + H5, epoch 1"]
    return [
        ["BLOOM-1b7 band only", PAPER, stock, None, band, None, None, None, 27.52],
        ["BLOOM-1b7 band + H5", PAPER, stock, operated, best, 42, last, 140, None],
    ]


TABLES = (disjoint_perplexity, perplexities)
