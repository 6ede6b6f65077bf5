"""The statistics of a study: every arm against stock and against every other arm, paired.

Losses are paired document by document and averaged over seeds before the bootstrap, so an interval
speaks of documents for these seeds; the spread over seeds is given beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headwise.artefacts import versions
from headwise.intervals import mean_interval
from headwise.proof.evaluation import Evaluation
from headwise.studies.study import Study

_RECOVERY = ("operated", "not_sick", "functional", "exceptions")


def summarise_study(out: Path, study: Study) -> dict[str, Any]:
    """The body of `summary.json`, from artefacts alone."""
    stock = Evaluation.load(out / "stock" / "evaluation.json")
    conditions = {arm.name: _evaluations(out, study, arm.name) for arm in study.arms}
    names = list(stock.body["text_sets"])
    return {
        "study": study.name,
        "arms": {name: _arm(name, found, stock) for name, found in conditions.items()},
        "against_stock": {
            name: {text: _difference(found, [stock], text) for text in names}
            for name, found in conditions.items()
        },
        "between_arms": {
            f"{left} - {right}": {
                text: _difference(conditions[left], conditions[right], text) for text in names
            }
            for left in conditions
            for right in conditions
            if left != right
        },
        "provenance": {"versions": versions()},
    }


def _evaluations(out: Path, study: Study, arm: str) -> list[Evaluation]:
    """The last pass of each seed of an arm."""
    found = []
    for one, seed in study.runs():
        if one.name != arm:
            continue
        folder = out / "runs" / f"{arm}-s{seed}"
        last = folder / "pass2" / "evaluation.json"
        found.append(Evaluation.load(last if last.exists() else folder / "evaluation.json"))
    return found


def _arm(name: str, found: list[Evaluation], stock: Evaluation) -> dict[str, Any]:
    joint = [e.body["heads"]["ablation_zero"].get("joint:operated") for e in found]
    return {
        "seeds": len(found),
        "sick": [e.diagnosis.counts["sick"] for e in found],
        "stock_sick": stock.diagnosis.counts["sick"],
        "recovery": [
            None if e.body["recovery"] is None else {k: e.body["recovery"][k] for k in _RECOVERY}
            for e in found
        ],
        "joint_ablation_cost": joint,
        "stock_joint_ablation_cost": stock.body["heads"]["ablation_zero"].get(f"joint:{name}"),
        "patch_weights": [[p["num_weights"] for p in e.body["patches"]] for e in found],
        "perplexity": [
            {text: entry["perplexity"] for text, entry in e.body["text_sets"].items()}
            for e in found
        ],
    }


def _difference(left: list[Evaluation], right: list[Evaluation], text: str) -> dict[str, Any]:
    """Mean over seeds of the paired difference in loss, its interval, and one difference a seed.

    The interval is over documents. Arms with the same number of seeds are paired seed by seed (the
    same data in the same order); else each seed is set against the other arm's mean.
    """
    tokens = np.array(right[0].body["text_sets"][text]["document_tokens"])
    a, b = (
        np.array([e.body["text_sets"][text]["document_loss_sums"] for e in side])
        for side in (left, right)
    )
    interval = mean_interval(a.mean(0) - b.mean(0), tokens)
    means = b if len(a) == len(b) else b.mean(0, keepdims=True)
    seeds = (a.sum(1) - means.sum(1)) / tokens.sum()
    return {
        **interval.to_json(),
        "by_seed": seeds.tolist(),
        "lower_with_confidence": interval.high < 0,
        "higher_with_confidence": interval.low > 0,
    }
