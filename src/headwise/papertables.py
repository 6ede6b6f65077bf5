"""The paper's tables of counts and losses (1 to 4, 9, 10) from this study's artefacts.

Each table has rows of this study and rows of the paper under the same headings, so that a reader
compares without leafing, and the known errors of the printed numbers as notes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headwise import papervalues as paper
from headwise.heads import format_indices
from headwise.reportdata import MASS, Body, Condition, Source
from headwise.reporttables import OURS, PAPER, Cell, Column, Estimate, Table, make_table

BAND_SHARE = 0.3  # the paper's code: an index is in the band if more of its layers are sick
PPL, LOSS, SHARE = ".4g", "+.4f", ".1%"


def cross_scale(source: Source) -> Table:
    """Table 1: bands and sick shares over model sizes."""
    columns = (
        Column("model"), Column("source"), Column("weights", ","), Column("layers"),
        Column("heads a layer"), Column("sick heads"), Column("sick", SHARE), Column("band"),
        Column("layers sick in band, lowest", ".0%"), Column("highest", ".0%"),
        Column("slope ~ sick (Spearman)", ".2f"), Column("paper: band"),
        Column("paper: sick", ".0%"), Column("paper: 'layers affected'"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for name, mass in paper.stock_masses().items():
        printed = paper.CROSS_SCALE[name]
        slopes = paper.alibi_slopes(mass.shape[1])
        rows.append([f"BLOOM-{name}", "published map, recounted", None,
                     *_cross_scale_row(mass > 0.5, slopes), printed[2], printed[3] / 100,
                     printed[4]])  # fmt: skip
    stock = source.stock
    if stock is not None and stock.sick is not None:
        slope = stock.maps.get("slope")
        weights = source.model.get("num_parameters")
        rows.append([source.model_name, OURS, weights,
                     *_cross_scale_row(stock.sick, None if slope is None else slope[0]),
                     None, None, None])  # fmt: skip
    notes = paper.NOTES[1]
    return make_table(1, "cross_scale", "Sick heads over model sizes", columns, rows, notes=notes)


def _cross_scale_row(sick: np.ndarray, slopes: np.ndarray | None) -> list[Cell]:
    share = sick.mean(0)
    band = [int(i) for i in np.flatnonzero(share > BAND_SHARE)]
    inside = share[band]
    rho = None if slopes is None or share.std() == 0 else _spearman(slopes, share)
    return [
        int(sick.shape[0]), int(sick.shape[1]), int(sick.sum()), float(sick.mean()),
        format_indices(band),
        float(inside.min()) if band else None, float(inside.max()) if band else None, rho,
    ]  # fmt: skip


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of mean ranks (scipy's, without its half second of import)."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return np.asarray((ends - (counts - 1) / 2)[inverse])

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def recovery_counts(source: Source) -> Table:
    """Table 2: classes, perplexities and true weight counts of every condition."""
    columns = (
        Column("condition"), Column("source"), Column("healthy"), Column("sink"), Column("dead"),
        Column("low entropy"), Column("sick", SHARE), Column("validation ppl", PPL),
        Column("held-out ppl", PPL), Column("weights in patch", ","), Column("of model", ".2%"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for condition in source.conditions:
        if condition.diagnosis is None:
            continue
        counts = condition.diagnosis["counts"]
        rows.append([
            condition.label, OURS, counts["healthy"], counts["sink"], counts["dead"],
            counts["low_entropy"], counts["sick"] / counts["total"],
            _best_validation(condition), held_out(source, condition), condition.weights,
            _share(condition.weights, source.model),
        ])  # fmt: skip
    for name, (healthy, sink, dead, low, quick, held, weights, share) in paper.RECOVERY.items():
        rows.append([f"BLOOM-1b7 {name}", PAPER, healthy, sink, dead, low, (sink + dead) / 384,
                     quick, held, weights, share])  # fmt: skip
    note = (
        "Validation ppl: best over the run, on documents of the training corpus kept out of "
        "training; the paper's rows hold its 'training PPL' there."
    )
    return make_table(2, "recovery", "Heads by class, perplexity and trained weights", columns,
                      rows, notes=(note, *paper.NOTES[2]),
                      missing="No diagnosis here: only the published rows.")  # fmt: skip


def _share(weights: int | None, model: Body) -> float | None:
    total = model.get("num_parameters")
    return None if weights is None or not total else weights / float(total)


def _best_validation(condition: Condition) -> float | None:
    losses = [loss for _, loss in condition.validations]
    return math.exp(min(losses)) if losses else None


def held_out(source: Source, condition: Condition) -> Estimate | None:
    """Perplexity on the judged text set."""
    name = source.judged_set
    found = condition.text_sets.get(name) if name else None
    return None if found is None else Estimate.of(found["perplexity"])


def disjoint_perplexity(source: Source) -> Table:
    """Table 3: perplexity on every held-out set, and the paired change from stock."""
    columns = (
        Column("condition"), Column("source"), Column("text set"), Column("documents"),
        Column("predicted tokens", ","), Column("perplexity", PPL),
        Column("loss - stock (nats)", LOSS), Column("reading"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for condition in source.conditions:
        for name, entry in condition.text_sets.items():
            paired = (condition.comparison or {}).get("losses", {}).get(name)
            rows.append([
                condition.label, OURS, name, entry["documents"], entry["predicted_tokens"],
                Estimate.of(entry["perplexity"]),
                Estimate.of(None if paired is None else paired["difference"]),
                None if paired is None else paired["verdict"],
            ])  # fmt: skip
    for name, (c4, prompts) in paper.HELD_OUT.items():
        rows.append([f"BLOOM-1b7 {name}", PAPER, "C4 validation", 50, 4024, c4, None, None])
        rows.append([f"BLOOM-1b7 {name}", PAPER, "12 prompts", 12, None, prompts, None, None])
    return make_table(3, "held_out_perplexity", "Perplexity on disjoint held-out texts", columns,
                      rows, notes=paper.NOTES[3],
                      missing="No evaluation here: no loss on held-out text.")  # fmt: skip


def arms_side_by_side(source: Source) -> Table:
    """Table 4: one row an arm, all seeds together."""
    columns = (
        Column("arm"), Column("source"), Column("mode"), Column("corpus"), Column("steps"),
        Column("seeds"), Column("operated", ".4g"), Column("not sick by mass", ".4g"),
        Column("functionally recovered", ".4g"), Column("validation ppl", PPL),
        Column("held-out ppl", PPL), Column("loss - stock (nats)", LOSS),
        Column("cost of losing all operated heads", LOSS),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for arm in source.arms():
        runs = source.of_arm(arm)
        rows.append([
            arm, OURS, runs[0].mode, _corpus(runs[0]), _steps(runs[0]), len(runs),
            *_recovered(runs), _mean([_best_validation(c) for c in runs]),
            _mean([e.value for c in runs if (e := held_out(source, c))]),
            against_stock(source, arm), Estimate.of(runs[0].ablation("joint:operated")),
        ])  # fmt: skip
    for name, (woken, operated, quick, held) in paper.ARMS.items():
        rows.append([f"BLOOM-1b7 {name}", PAPER, "surgery", name.split(",")[0], None, 1, operated,
                     woken, None, quick, held, None, None])  # fmt: skip
    note = (
        "Means over seeds; the loss difference is paired by document with a 95% bootstrap "
        "interval, the last column is the first seed's."
    )
    return make_table(4, "arms", "Arms side by side", columns, rows,
                      notes=(note, *paper.NOTES[4]),
                      missing="No arm was run here: only the published rows.")  # fmt: skip


def _corpus(condition: Condition) -> str | None:
    if condition.run is None:
        return None
    return str(condition.run["corpus"]["name"])


def _steps(condition: Condition) -> int | None:
    taken = [int(row["step"]) + 1 for row in condition.trace if "step" in row]
    return max(taken, default=0) if condition.run is not None else None


def _recovered(runs: Sequence[Condition]) -> list[Cell]:
    found = [c.evaluation["recovery"] for c in runs if c.evaluation and c.evaluation["recovery"]]
    if not found:
        return [None, None, None]
    means = [_mean([r[key] for r in found]) for key in ("operated", "not_sick", "functional")]
    return [int(v) if v == int(v) else v for v in means if v is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def against_stock(source: Source, arm: str, text_set: str | None = None) -> Estimate | None:
    """Paired change of held-out loss: over all seeds if summarised, else of the first run."""
    name = text_set or source.judged_set
    if name is None:
        return None
    if source.summary is not None and arm in source.summary["against_stock"]:
        return Estimate.of(source.summary["against_stock"][arm].get(name))
    comparison = source.of_arm(arm)[0].comparison
    found = None if comparison is None else comparison["losses"].get(name)
    return None if found is None else Estimate.of(found["difference"])


def stock_validation(source: Source, condition: Condition) -> float | None:
    """Stock's loss on a run's validation text: step 0 of an arm that does not operate."""
    if condition.run is None:
        return None
    for other in source.runs:
        same = other.run is not None and other.run["corpus"] == condition.run["corpus"]
        if same and other.number == 1 and other.mode in ("gradient-only", "lora"):
            return next((loss for step, loss in other.validations if step == 0), None)
    return None


def perplexities(source: Source) -> Table:
    """Table 9: validation perplexity right after the operation, at its best and at the end."""
    columns = (
        Column("condition"), Column("source"), Column("stock", PPL), Column("post-operation", PPL),
        Column("best", PPL), Column("best at step"), Column("last", PPL), Column("last step"),
        Column("held-out ppl", PPL),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for condition in source.runs:
        checks = condition.validations
        if not checks:
            continue
        best_step, best = min(checks, key=lambda check: check[1])
        before = stock_validation(source, condition) if condition.number == 1 else None
        rows.append([
            condition.label, OURS, None if before is None else math.exp(before),
            math.exp(checks[0][1]) if checks[0][0] == 0 else None, math.exp(best), best_step,
            math.exp(checks[-1][1]), checks[-1][0], held_out(source, condition),
        ])  # fmt: skip
    printed = paper.PERPLEXITIES
    rows.append(["BLOOM-1b7 band only", PAPER, printed["stock"], None,
                 printed["band only, epoch 3"], None, None, None, 27.52])  # fmt: skip
    rows.append(["BLOOM-1b7 band + H5", PAPER, printed["stock"],
                 printed["post-operation, 126 heads"], printed["band + H5, step 42 of 140"], 42,
                 printed["band + H5, epoch 1"], 140, None])  # fmt: skip
    note = (
        "Post-operation is the validation at step 0, after the heads were changed and before any "
        "training. Stock is step 0 of an arm on the same corpus that changes nothing first."
    )
    return make_table(9, "perplexity", "Perplexity by condition, post-operation included", columns,
                      rows, notes=(note, *paper.NOTES[9]),
                      missing="No run with a trace here: only the published rows.")  # fmt: skip


def slopes(source: Source) -> Table:
    """Table 10: ALiBi slopes, what they do alone, and how sick each index is."""
    columns = (
        Column("head"), Column("source"), Column("slope", ".4f"), Column("10 tokens away", ".2f"),
        Column("100 tokens away", ".2f"), Column("mass if q.k = 0", ".3f"),
        Column("mean first-token mass", ".3f"), Column("layers sick", ".0%"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    stock = source.stock
    maps = {} if stock is None else stock.maps
    if stock is not None and stock.sick is not None and "slope" in maps:
        alone = maps.get(f"{MASS}_positional_baseline")
        for head, slope in enumerate(maps["slope"][0]):
            rows.append([f"H{head}", OURS, float(slope), float(-10 * slope), float(-100 * slope),
                         None if alone is None else float(alone[0, head]),
                         float(maps[MASS][:, head].mean()),
                         float(stock.sick[:, head].mean())])  # fmt: skip
    stated = paper.stock_masses()["1b7"]
    for head, (slope, near, far) in paper.SLOPES.items():
        rows.append([f"H{head}", PAPER, slope, near, far, None, float(stated[:, head].mean()),
                     float((stated[:, head] > 0.5).mean())])  # fmt: skip
    note = "Paper rows: slopes as printed for 16 heads; masses from the digitised BLOOM-1b7 map."
    positions = source.model.get("positions", "unknown")
    return make_table(10, "alibi_slopes", "ALiBi slopes by head index", columns, rows,
                      notes=(note, *paper.NOTES[10]),
                      missing=f"No ALiBi slopes in this model ({positions}).")  # fmt: skip
