"""The statistics of a study: every arm against stock and against every other arm, paired.

Losses are paired document by document and averaged over seeds before the interval is taken, so it
speaks of documents for these seeds; the spread over seeds is given beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headwise.artefacts import load_artefact, save_artefact, versions
from headwise.frames import frame
from headwise.heads import JOINT
from headwise.intervals import Interval, paired_interval
from headwise.proof.values import Evaluation, HeadCost, identity_of
from headwise.provenance import Provenance
from headwise.studies.study import Study
from headwise.surgery.run_state import RUN
from headwise.surgery.values import RunSettings
from headwise.tables import table, tables_html
from headwise.values import Finite, from_plain, plain_fields

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ArmDifference:
    """Mean over seeds of the paired difference in loss, its interval, and one value per seed."""

    value: Finite
    low: Finite
    high: Finite
    by_seed: tuple[Finite, ...]
    lower_with_confidence: bool
    higher_with_confidence: bool

    @property
    def interval(self) -> Interval:
        """The difference without the seeds."""
        return Interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class RecoveredHeads:
    """The counts of one run's recovery."""

    operated: int
    not_sick: int
    functional: int
    exceptions: tuple[str, ...]


@dataclass(frozen=True)
class ArmSummary:
    """One arm, one entry per seed."""

    seeds: int
    sick: tuple[int, ...]
    stock_sick: int
    recovery: tuple[RecoveredHeads | None, ...]
    joint_ablation_cost: tuple[HeadCost | None, ...]
    stock_joint_ablation_cost: HeadCost | None
    patch_weights: tuple[tuple[int | None, ...], ...]
    perplexity: tuple[Mapping[str, Interval], ...]


@dataclass(frozen=True)
class StudySummary:
    """`summary.json`: losses of every arm against stock and against each other, by text set."""

    study: str
    arms: Mapping[str, ArmSummary]
    against_stock: Mapping[str, Mapping[str, ArmDifference]]
    between_arms: Mapping[str, Mapping[str, ArmDifference]] = field(repr=False)
    provenance: Provenance = field(repr=False)
    rate_rule: str = ""  # at which learning rates the arms are compared; "": an older one
    rates: Mapping[str, tuple[Finite, ...]] = field(default_factory=dict)  # by arm and seed
    identity: str = ""  # of the evaluations that it was made from; "": an older one does not say

    def __repr__(self) -> str:
        first = {arm: next(iter(texts.values())) for arm, texts in self.against_stock.items()}
        arms = ", ".join(f"{arm} {change.value:+.4f}" for arm, change in first.items())
        return f"StudySummary({self.study}, loss against stock: {arms})"

    def save(self, path: Path) -> Path:
        """Write `summary.json`."""
        return save_artefact(path, "study-summary", plain_fields(self))

    @staticmethod
    def load(path: Path) -> StudySummary:
        """Read `summary.json`."""
        return from_plain(StudySummary, load_artefact(path, "study-summary"), path)

    def _repr_html_(self) -> str:
        rows = [
            (arm, text, difference.interval)
            for arm, by_text in self.against_stock.items()
            for text, difference in by_text.items()
        ]
        title = f"{self.study}: loss against stock, nats per token"
        return tables_html([table(title, ("arm", "texts", "difference"), rows)])

    def to_frame(self) -> pd.DataFrame:
        """One row per arm and text set: the paired change of loss from stock (needs pandas)."""
        return frame(
            [
                {"arm": arm, "texts": text, **plain_fields(difference)}
                for arm, by_text in self.against_stock.items()
                for text, difference in by_text.items()
            ]
        )


def summarise_study(out: Path, study: Study) -> StudySummary:
    """The statistics of a study from its artefacts alone."""
    stock = Evaluation.load(out / "stock" / "evaluation.json")
    arms = {arm.name: _evaluations(out, study, arm.name) for arm in study.arms}
    pairs = {f"{a} - {b}": (arms[a], arms[b]) for a in arms for b in arms if a != b}
    return StudySummary(
        study=study.name,
        rate_rule=study.rate_rule,
        rates={arm.name: _rates(out, study, arm.name) for arm in study.arms},
        arms={name: _arm(name, seeds, stock) for name, seeds in arms.items()},
        against_stock={
            name: {text: arm_difference(seeds, [stock], text) for text in stock.text_sets}
            for name, seeds in arms.items()
        },
        between_arms={
            name: {text: arm_difference(left, right, text) for text in stock.text_sets}
            for name, (left, right) in pairs.items()
        },
        provenance=Provenance(versions=versions()),
        identity=identity_of([stock, *(one for seeds in arms.values() for one in seeds)]),
    )


def _rates(out: Path, study: Study, arm: str) -> tuple[float, ...]:
    """The learning rate of each seed's run; none where nothing was trained."""
    folders = [out / "runs" / f"{arm}-s{seed}" for one, seed in study.runs() if one.name == arm]
    recipes = [RunSettings.load(folder).recipe for folder in folders if (folder / RUN).exists()]
    return tuple(recipe.lr for recipe in recipes if recipe.steps)


def _evaluations(out: Path, study: Study, arm: str) -> list[Evaluation]:
    """The last pass of each seed of an arm."""
    evaluations = []
    for one, seed in study.runs():
        if one.name != arm:
            continue
        folder = out / "runs" / f"{arm}-s{seed}"
        last = folder / "pass2" / "evaluation.json"
        evaluations.append(Evaluation.load(last if last.exists() else folder / "evaluation.json"))
    return evaluations


def _arm(name: str, evaluations: list[Evaluation], stock: Evaluation) -> ArmSummary:
    return ArmSummary(
        seeds=len(evaluations),
        sick=tuple(e.diagnosis.counts["sick"] for e in evaluations),
        stock_sick=stock.diagnosis.counts["sick"],
        recovery=tuple(
            None
            if (r := e.recovery) is None
            else RecoveredHeads(r.operated, r.not_sick, r.functional, r.exceptions)
            for e in evaluations
        ),
        joint_ablation_cost=tuple(
            e.heads.ablation_zero.get(f"{JOINT}operated") for e in evaluations
        ),
        stock_joint_ablation_cost=stock.heads.ablation_zero.get(f"{JOINT}{name}"),
        patch_weights=tuple(tuple(p.num_weights for p in e.patches) for e in evaluations),
        perplexity=tuple(
            {text: entry.perplexity for text, entry in e.text_sets.items()} for e in evaluations
        ),
    )


def arm_difference(left: list[Evaluation], right: list[Evaluation], text: str) -> ArmDifference:
    """The interval is over documents.

    Arms with the same number of seeds are paired seed by seed (the same data in the same order);
    else each seed is set against the other arm's mean.
    """
    tokens = np.array(right[0].text_sets[text].document_tokens)
    a, b = (
        np.array([e.text_sets[text].document_loss_sums for e in side]) for side in (left, right)
    )
    interval = paired_interval(a.mean(0) - b.mean(0), tokens)
    means = b if len(a) == len(b) else b.mean(0, keepdims=True)
    seeds = (a.sum(1) - means.sum(1)) / tokens.sum()
    return ArmDifference(
        interval.value,
        interval.low,
        interval.high,
        tuple(seeds.tolist()),
        interval.high < 0,
        interval.low > 0,
    )
