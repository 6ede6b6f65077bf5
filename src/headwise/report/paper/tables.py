"""The paper's tables of counts and losses (1, 2, 4, 10) from this study's artefacts.

Each table has rows of this study and rows of the paper under the same headings, so that a reader
compares without leafing, and the known errors of the printed numbers as notes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwise.diagnosis.bloom_maps import bloom_slopes
from headwise.diagnosis.survey import rank_correlation
from headwise.diagnosis.values import BAND_SHARE
from headwise.heads import JOINT, format_indices
from headwise.models.values import ModelInfo
from headwise.report.paper import values as paper
from headwise.report.paper.losses import against_stock, best_validation, held_out
from headwise.report.source import MASS, Condition, Source
from headwise.report.tables import (
    OURS,
    PAPER,
    RECOUNTED,
    Entry,
    Table,
    columns_of,
    make_table,
)


def cross_scale(source: Source) -> Table:
    """Table 1: bands and sick shares over model sizes."""
    columns = columns_of(
        "model; source; weights [,]; layers; heads a layer; sick heads; sick [.1%]; "
        "band; layers sick in band, lowest [.0%]; highest [.0%]; "
        "slope ~ sick (Spearman) [.2f]; paper: band; paper: sick [.0%]; "
        "paper: 'layers affected'"
    )
    rows: list[list[Entry]] = []
    for name, mass in paper.stock_masses().items():
        printed = paper.CROSS_SCALE[name]
        slopes = bloom_slopes(mass.shape[1])
        rows.append(
            [
                f"BLOOM-{name}",
                RECOUNTED,
                None,
                *_cross_scale_row(mass > 0.5, slopes),
                printed[2],
                printed[3] / 100,
                printed[4],
            ]
        )
    stock = source.stock
    if stock is not None and stock.sick is not None:
        slope = stock.maps.get("slope")
        weights = None if source.model is None else source.model.num_parameters
        rows.append(
            [
                source.model_name,
                OURS,
                weights,
                *_own_scale_row(stock.sick, None if slope is None else slope[0]),
                None,
                None,
                None,
            ]
        )
    notes = paper.NOTES[1]
    return make_table(1, "cross_scale", "Sick heads over model sizes", columns, rows, notes=notes)


def _cross_scale_row(sick: np.ndarray, slopes: np.ndarray | None) -> list[Entry]:
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


def _own_scale_row(sick: np.ndarray, slopes: np.ndarray | None) -> list[Entry]:
    """The same; without ALiBi's slopes an index means nothing, and there is no band."""
    found = _cross_scale_row(sick, slopes)
    return found if slopes is not None else [*found[:4], None, None, None, None]


def recovery_counts(source: Source) -> Table:
    """Table 2: classes, perplexities and true weight counts of every condition."""
    columns = columns_of(
        "condition; source; healthy; sink; dead; low entropy; sick [.1%]; "
        "validation ppl [.4g]; held-out ppl [.4g]; weights in patch [,]; of model [.2%]"
    )
    rows: list[list[Entry]] = []
    for condition in source.conditions:
        if condition.diagnosis is None:
            continue
        counts = condition.diagnosis.counts
        rows.append(
            [
                condition.label,
                OURS,
                counts["healthy"],
                counts["sink"],
                counts["dead"],
                counts["low_entropy"],
                counts["sick"] / counts["total"],
                best_validation(condition),
                held_out(source, condition),
                condition.weights,
                _share(condition.weights, source.model),
            ]
        )
    for name, (healthy, sink, dead, low, quick, held, weights, share) in paper.RECOVERY.items():
        rows.append(
            [
                f"BLOOM-1b7 {name}",
                PAPER,
                healthy,
                sink,
                dead,
                low,
                (sink + dead) / 384,
                quick,
                held,
                weights,
                share,
            ]
        )
    note = (
        "Validation ppl: best over the run, on documents of the training corpus kept out of "
        "training; the paper's rows hold its 'training PPL' there."
    )
    return make_table(
        2,
        "recovery",
        "Heads by class, perplexity and trained weights",
        columns,
        rows,
        notes=(note, *paper.NOTES[2]),
        missing="No diagnosis here: only the published rows.",
    )


def _share(weights: int | None, model: ModelInfo | None) -> float | None:
    total = None if model is None else model.num_parameters
    return None if weights is None or not total else weights / total


def arms_side_by_side(source: Source) -> Table:
    """Table 4: one row an arm, all seeds together."""
    columns = columns_of(
        "arm; source; mode; corpus; steps; seeds; operated [.4g]; "
        "not sick by mass [.4g]; functionally recovered [.4g]; validation ppl [.4g]; "
        "held-out ppl [.4g]; loss - stock (nats) [+.4f]; "
        "cost of losing all operated heads [+.4f]"
    )
    rows: list[list[Entry]] = []
    for arm in source.arms():
        runs = source.of_arm(arm)
        rows.append(
            [
                arm,
                OURS,
                runs[0].mode,
                _corpus(runs[0]),
                _steps(runs[0]),
                len(runs),
                *_recovered(runs),
                _mean([best_validation(c) for c in runs]),
                _mean([e.value for c in runs if (e := held_out(source, c))]),
                against_stock(source, arm),
                runs[0].ablation(f"{JOINT}operated"),
            ]
        )
    for name, (woken, operated, quick, held) in paper.ARMS.items():
        rows.append(
            [
                f"BLOOM-1b7 {name}",
                PAPER,
                "surgery",
                name.split(",")[0],
                None,
                1,
                operated,
                woken,
                None,
                quick,
                held,
                None,
                None,
            ]
        )
    note = (
        "Means over seeds; the loss difference is paired by document with a 95% bootstrap "
        "interval, the last column is the first seed's."
    )
    return make_table(
        4,
        "arms",
        "Arms side by side",
        columns,
        rows,
        notes=(note, *paper.NOTES[4]),
        missing="No arm was run here: only the published rows.",
    )


def _corpus(condition: Condition) -> str | None:
    return None if condition.run is None else condition.run.corpus.name


def _steps(condition: Condition) -> int | None:
    return None if condition.run is None else condition.steps_taken


def _recovered(runs: Sequence[Condition]) -> list[Entry]:
    found = [c.evaluation.recovery for c in runs if c.evaluation and c.evaluation.recovery]
    if not found:
        return [None, None, None]
    means = [
        _mean([getattr(r, key) for r in found]) for key in ("operated", "not_sick", "functional")
    ]
    return [int(v) if v == int(v) else v for v in means if v is not None]


def _mean(values: Sequence[int | float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def slopes(source: Source) -> Table:
    """Table 10: ALiBi slopes, what they do alone, and how sick each index is."""
    columns = columns_of(
        "head; source; slope [.4f]; 10 tokens away [.2f]; 100 tokens away [.2f]; "
        "mass if q.k = 0 [.3f]; mean first-token mass [.3f]; layers sick [.0%]"
    )
    rows: list[list[Entry]] = []
    stock = source.stock
    maps = {} if stock is None else stock.maps
    if stock is not None and stock.sick is not None and "slope" in maps:
        alone = maps.get(f"{MASS}_positional_baseline")
        for head, slope in enumerate(maps["slope"][0]):
            rows.append(
                [
                    f"H{head}",
                    OURS,
                    float(slope),
                    float(-10 * slope),
                    float(-100 * slope),
                    None if alone is None else float(alone[0, head]),
                    float(maps[MASS][:, head].mean()),
                    float(stock.sick[:, head].mean()),
                ]
            )
    stated = paper.stock_masses()["1b7"]
    for head, (slope, near, far) in paper.SLOPES.items():
        rows.append(
            [
                f"H{head}",
                PAPER,
                slope,
                near,
                far,
                None,
                float(stated[:, head].mean()),
                float((stated[:, head] > 0.5).mean()),
            ]
        )
    note = "Paper rows: slopes as printed for 16 heads; masses from the digitised BLOOM-1b7 map."
    positions = "unknown" if source.model is None else source.model.positions
    return make_table(
        10,
        "alibi_slopes",
        "ALiBi slopes by head index",
        columns,
        rows,
        notes=(note, *paper.NOTES[10]),
        missing=f"No ALiBi slopes in this model ({positions}).",
    )


TABLES = (cross_scale, recovery_counts, arms_side_by_side, slopes)
