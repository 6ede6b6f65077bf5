"""The tables of a study, a run or a diagnosis: classes, losses, arms and slopes.

A table is a function from `Source` to `Table`. The order of `TABLES` is the BLOOM paper's, so that
the rows it published can stand below ours (`paper/reference.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwise.diagnosis.survey import rank_correlation
from headwise.diagnosis.values import BAND_SHARE
from headwise.heads import JOINT, format_indices
from headwise.provenance import text_name
from headwise.report import drift
from headwise.report.source import MASS, Condition, Source
from headwise.tables import Entry, Table, table


def sick_heads(source: Source) -> Table:
    """How many heads of stock are sick, and in which band of indices."""
    rows: list[list[Entry]] = []
    stock = source.stock
    if stock is not None and stock.sick is not None:
        slopes = stock.maps.get("slope")
        counts = sick_counts(stock.sick, None if slopes is None else slopes[0])
        if slopes is None:  # without ALiBi an index means nothing, and there is no band
            counts = [*counts[:4], None, None, None, None]
        weights = None if source.model is None else source.model.num_parameters
        rows.append([source.model_name, weights, *counts])
    return table(
        "Sick heads",
        "model; weights [,]; layers; heads a layer; sick heads; sick [.1%]; band; "
        "layers sick in band, lowest [.0%]; highest [.0%]; slope ~ sick (Spearman) [.2f]",
        rows,
        key="cross_scale",
    )


def sick_counts(sick: np.ndarray, slopes: np.ndarray | None) -> list[Entry]:
    """Layers, heads a layer, sick heads and their share, the band and how sick it is."""
    share = sick.mean(0)
    band = [int(i) for i in np.flatnonzero(share > BAND_SHARE)]
    inside = share[band]
    rho = None if slopes is None or share.std() == 0 else rank_correlation(slopes, share)
    return [
        int(sick.shape[0]),
        int(sick.shape[1]),
        int(sick.sum()),
        float(sick.mean()),
        format_indices(band),
        float(inside.min()) if band else None,
        float(inside.max()) if band else None,
        rho,
    ]


def heads_by_class(source: Source) -> Table:
    """Classes, perplexities and changed weights of every condition."""
    total = None if source.model is None else source.model.num_parameters
    rows = [
        [
            condition.label,
            *(condition.diagnosis.counts[name] for name in ("healthy", "sink", "dead")),
            condition.diagnosis.counts["low_entropy"],
            condition.diagnosis.counts["sick"] / condition.diagnosis.counts["total"],
            condition.best_perplexity,
            source.held_out(condition),
            condition.weights,
            condition.weights / total if condition.weights is not None and total else None,
        ]
        for condition in source.conditions
        if condition.diagnosis is not None
    ]
    return table(
        "Heads by class, perplexity and trained weights",
        "condition; healthy; sink; dead; low entropy; sick [.1%]; validation ppl [#.4g]; "
        "held-out ppl [#.4g]; weights in patch [,]; of model [.2%]",
        rows,
        key="recovery",
        notes=[
            "Validation ppl: best over the run, on documents of the training corpus kept out of "
            "training."
        ],
        missing="No diagnosis here.",
    )


def held_out_perplexity(source: Source) -> Table:
    """Perplexity on every held-out set, and the paired change from stock."""
    rows: list[list[Entry]] = []
    for condition in source.conditions:
        losses = {} if condition.comparison is None else condition.comparison.losses
        for name, entry in condition.text_sets.items():
            paired = losses.get(name)
            rows.append(
                [
                    condition.label,
                    text_name(name),
                    entry.documents,
                    entry.predicted_tokens,
                    entry.perplexity,
                    None if paired is None else paired.difference,
                    None if paired is None else paired.verdict,
                ]
            )
    return table(
        "Perplexity on disjoint held-out texts",
        "condition; text set; documents; predicted tokens [,]; perplexity [#.4g]; "
        "loss - stock (nats) [+.4f]; reading",
        rows,
        key="held_out_perplexity",
        missing="No evaluation here: no loss on held-out text.",
    )


def arms_side_by_side(source: Source) -> Table:
    """One row an arm, all seeds together."""
    rows: list[list[Entry]] = []
    for arm in source.arms():
        runs = source.of_arm(arm)
        first = runs[0]
        rows.append(
            [
                arm,
                first.mode,
                None if first.run is None else text_name(first.run.corpus.name),
                None if first.run is None else first.steps_taken,
                len(runs),
                *_recovered(runs),
                _mean([c.best_perplexity for c in runs]),
                _mean([e.value for c in runs if (e := source.held_out(c))]),
                source.against_stock(arm),
                first.ablation(f"{JOINT}operated"),
            ]
        )
    return table(
        "Arms side by side",
        "arm; mode; corpus; steps; seeds; operated [.4g]; not sick by mass [.4g]; "
        "functionally recovered [.4g]; validation ppl [#.4g]; held-out ppl [#.4g]; "
        "loss - stock (nats) [+.4f]; cost of losing all operated heads [+.4f]",
        rows,
        key="arms",
        notes=[
            "Means over seeds; the loss difference is paired by document with a 95% "
            "interval, the last column is the first seed's."
        ],
        missing="No arm was run here.",
    )


def arms_summary(source: Source) -> Table:
    """What a terminal shows of the arms: the columns that tell them apart, in 80 letters."""
    every = arms_side_by_side(source)
    shown = {"arm": 0, "heads treated": 5, "not sick now": 6, "loss - stock (95% interval)": -2}
    columns = tuple(replace(every.columns[at], name=name) for name, at in shown.items())
    rows = tuple(tuple(row[at] for at in shown.values()) for row in every.rows)
    return Table("what each arm did, on held-out text (nats per token)", columns, rows)


def _recovered(runs: Sequence[Condition]) -> list[Entry]:
    known = [c.evaluation.recovery for c in runs if c.evaluation and c.evaluation.recovery]
    if not known:
        return [None, None, None]
    means = [
        _mean([getattr(r, key) for r in known]) for key in ("operated", "not_sick", "functional")
    ]
    return [int(v) if v == int(v) else v for v in means if v is not None]


def _mean(values: Sequence[int | float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def perplexities(source: Source) -> Table:
    """Validation perplexity right after the operation, at its best and at the end."""
    rows: list[list[Entry]] = []
    for condition in source.runs:
        checks = condition.validations
        if not checks:
            continue
        best, last = min(checks, key=lambda step: checks[step]), max(checks)
        before = source.stock_validation(condition) if condition.number == 1 else None
        rows.append(
            [
                condition.label,
                None if before is None else math.exp(before),
                math.exp(checks[0]) if 0 in checks else None,
                math.exp(checks[best]),
                best,
                math.exp(checks[last]),
                last,
                source.held_out(condition),
            ]
        )
    return table(
        "Perplexity by condition, post-operation included",
        "condition; stock [#.4g]; post-operation [#.4g]; best [#.4g]; best at step; last [#.4g]; "
        "last step; held-out ppl [#.4g]",
        rows,
        key="perplexity",
        notes=[
            "Post-operation is the validation at step 0, after the heads were changed and before "
            "any training. Stock is step 0 of an arm on the same corpus that changes nothing first."
        ],
        missing="No run with a trace here.",
    )


def slopes(source: Source) -> Table:
    """ALiBi slopes, what they do alone, and how sick each index is."""
    rows: list[list[Entry]] = []
    stock = source.stock
    maps = {} if stock is None else stock.maps
    if stock is not None and stock.sick is not None and "slope" in maps:
        baseline = maps.get(f"{MASS}_positional_baseline")
        rows = [
            [
                f"H{head}",
                float(slope),
                float(-10 * slope),
                float(-100 * slope),
                None if baseline is None else float(baseline[0, head]),
                float(maps[MASS][:, head].mean()),
                float(stock.sick[:, head].mean()),
            ]
            for head, slope in enumerate(maps["slope"][0])
        ]
    positions = "unknown" if source.model is None else source.model.positions
    return table(
        "ALiBi slopes by head index",
        "head; slope [.4f]; 10 tokens away [.2f]; 100 tokens away [.2f]; "
        "mass if q.k = 0 [.3f]; mean first-token mass [.3f]; layers sick [.0%]",
        rows,
        key="alibi_slopes",
        missing=f"No ALiBi slopes in this model ({positions}).",
    )


TABLES = (
    sick_heads,
    heads_by_class,
    held_out_perplexity,
    arms_side_by_side,
    drift.outside_drift,
    drift.watched_drift,
    drift.columns_over_steps,
    drift.column_heads,
    perplexities,
    slopes,
)
