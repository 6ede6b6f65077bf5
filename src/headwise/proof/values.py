"""Evaluations and comparisons as values: losses by document, what heads are worth, what moved.

No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import Field

from headwise.alarms import Alarm
from headwise.artefacts import content_hash, load_artefact, save_artefact, to_json
from headwise.diagnosis.values import SICK, Diagnosis, Dormancy, HeadClass
from headwise.errors import ArtefactError
from headwise.frames import frame, head_frame
from headwise.heads import JOINT, Head
from headwise.intervals import Interval, mean_interval, paired_interval
from headwise.models.values import ModelInfo, PatchInfo
from headwise.proof.trajectories import ColumnTrend, Phase, PhaseMeans
from headwise.proof.zones import DriftByZone, Transitions
from headwise.provenance import Decisions, Provenance, TextInfo
from headwise.surgery.plan import SurgeryPlan
from headwise.tables import tables_html
from headwise.values import OMITTED, Empty, Finite, HeadArray, from_plain, plain_fields, to_plain

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of one text set: mean, perplexity, and every document's sum for pairing."""

    texts: TextInfo
    loss: Interval
    perplexity: Interval
    predicted_tokens: int
    documents: int
    document_loss_sums: tuple[Finite, ...] = field(repr=False)
    document_tokens: tuple[int, ...] = field(repr=False)
    unigram_loss: Finite | None = field(default=None, metadata=OMITTED)  # of the same texts

    def __post_init__(self) -> None:
        if not len(self.document_loss_sums) == len(self.document_tokens) == self.documents:
            raise ValueError("document_loss_sums and document_tokens must have one entry each")

    @staticmethod
    def of(
        texts: TextInfo,
        sums: Float[np.ndarray, "document"],
        tokens: Int[np.ndarray, "document"],
        unigram: float | None = None,
        seed: int = 0,
    ) -> DocumentLosses:
        """From the summed loss and the predicted tokens of every document."""
        loss = mean_interval(sums, tokens, seed=seed)
        return DocumentLosses(
            texts=texts,
            loss=loss,
            perplexity=loss.exp(),
            predicted_tokens=int(tokens.sum()),
            documents=len(sums),
            document_loss_sums=tuple(sums.tolist()),
            document_tokens=tuple(tokens.tolist()),
            unigram_loss=unigram,
        )

    def minus(self, stock: DocumentLosses, seed: int = 0) -> Interval:
        """Mean loss minus that of another condition on the same tokens, paired by document."""
        if self.texts.sha256 != stock.texts.sha256:
            raise ArtefactError(f"the text set {self.texts.name!r} differs between the two sides")
        if self.document_tokens != stock.document_tokens:
            raise ArtefactError(
                f"the two sides read other parts of the text set {self.texts.name!r}: "
                f"{stock.predicted_tokens:,} and {self.predicted_tokens:,} tokens",
                fix="evaluate both with the same --max-length, --whole and --bos",
            )
        difference = np.array(self.document_loss_sums) - np.array(stock.document_loss_sums)
        return paired_interval(difference, np.array(stock.document_tokens), seed=seed)


@dataclass(frozen=True)
class HeadCost:
    """Rise of the mean loss (nats per token) without some heads, with its 95% interval."""

    value: Finite
    low: Finite
    high: Finite
    heads: tuple[str, ...]
    useful: bool | None = field(default=None, metadata=OMITTED)  # at the false discovery rate
    documents: int | None = field(default=None, metadata=OMITTED)  # where not all were needed

    @property
    def interval(self) -> Interval:
        """The cost without the names."""
        return Interval(self.value, self.low, self.high)

    @property
    def is_useful(self) -> bool:
        """Whether losing the heads costs loss; an older file knows the interval alone."""
        return self.low > 0 if self.useful is None else self.useful


@dataclass(frozen=True)
class FirstOrder:
    """The one-backward estimate of all heads, and how well it agrees with the exact costs."""

    map: HeadArray = field(repr=False)
    spearman_with_exact: Finite | None


@dataclass(frozen=True)
class HeadCosts:
    """Ablation costs by head name; sets that were silenced together are `joint:NAME`."""

    documents: int
    ablation_zero: Mapping[str, HeadCost] = field(repr=False)
    ablation_mean: Mapping[str, HeadCost] = field(repr=False)
    first_order: FirstOrder | None = field(default=None, repr=False, metadata=OMITTED)
    decisions: Decisions | None = field(default=None, metadata=OMITTED)


Outcome = Literal[
    "recovered",
    "no more use than in stock",
    "no use shown",
    "not judged",
    "still ill",
    "still sick",  # as older files say it
    "unchanged",
    "harmed",
]


@dataclass(frozen=True)
class HeadRecovery:
    """One operated head: its class now, and whether losing it costs loss (None: not judged)."""

    class_: Annotated[HeadClass, Field(alias="class")]
    sick: bool
    useful: bool | None
    functional: bool
    was_sick: bool | None = field(default=None, metadata=OMITTED)  # in stock
    # whether it has any symptom, now and in stock: a sick head is ill, others may be
    ill: bool | None = field(default=None, metadata=OMITTED)
    was_ill: bool | None = field(default=None, metadata=OMITTED)
    outcome: Outcome | None = field(default=None, metadata=OMITTED)
    # its ablation cost minus that in stock, paired by document; of heads that pass all else
    rise: Interval | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Recovery:
    """How many operated heads work again, head by head."""

    heads: Mapping[str, HeadRecovery] = field(repr=False)
    operated: int
    not_sick: int
    judged: int
    functional: int
    exceptions: tuple[str, ...]
    rule: str
    was_sick: int | None = field(default=None, metadata=OMITTED)  # operated heads, in stock
    was_ill: int | None = field(default=None, metadata=OMITTED)
    harmed: int | None = field(default=None, metadata=OMITTED)
    # the cost of losing all treated heads at once: in stock, now, and the difference (paired)
    joint_stock: Interval | None = field(default=None, metadata=OMITTED)
    joint_now: Interval | None = field(default=None, metadata=OMITTED)
    joint_rise: Interval | None = field(default=None, metadata=OMITTED)

    @property
    def candidates(self) -> list[str]:
        """Heads that were ill, are not, and are of use: what is left is to ask for a rise."""
        return [name for name, row in self.heads.items() if row.outcome == "recovered"]

    def with_rises(self, rises: Mapping[str, Interval], joint: tuple[Interval, ...]) -> Recovery:
        """A head counts as recovered only if losing it costs more than it did in stock."""
        rows = dict(self.heads)
        for name, rise in rises.items():
            outcome: Outcome = "recovered" if rise.low > 0 else "no more use than in stock"
            rows[name] = replace(
                rows[name], rise=rise, outcome=outcome, functional=outcome == "recovered"
            )
        stock, now, rise = joint
        return replace(
            self,
            heads=rows,
            functional=sum(row.functional for row in rows.values()),
            exceptions=tuple(name for name, row in rows.items() if not row.functional),
            joint_stock=stock,
            joint_now=now,
            joint_rise=rise,
        )


@dataclass(frozen=True)
class MlpDormancy:
    """Dormant neurons by weights, which attention training cannot change, and by activations."""

    weights: Dormancy
    activations: Dormancy
    note: str


@dataclass(frozen=True)
class Evaluation:
    """One condition of a model: its losses, its heads and what they are worth."""

    model: ModelInfo  # the base, before patches
    patches: tuple[PatchInfo, ...]
    text_sets: Mapping[str, DocumentLosses]
    diagnosis: Diagnosis = field(repr=False)
    heads: HeadCosts = field(repr=False)
    recovery: Recovery | None
    mlp_dormancy: Annotated[MlpDormancy | None, Empty] = field(repr=False)
    provenance: Provenance = field(repr=False)
    tasks: Mapping[str, Mapping[str, Finite]] | None = field(default=None, metadata=OMITTED)
    # task -> metric -> the score of every item, so that two conditions can be paired
    task_items: Mapping[str, Mapping[str, tuple[Finite, ...]]] | None = field(
        default=None, metadata=OMITTED, repr=False
    )
    # loss with the patches minus that of stock by text set, paired by document
    against_stock: Mapping[str, Interval] | None = field(default=None, metadata=OMITTED)
    alarms: tuple[Alarm, ...] = ()

    def __repr__(self) -> str:
        condition = f"{len(self.patches)} patch{'es' * (len(self.patches) > 1)}"
        sets = (f"{name} {entry.perplexity.value:.4g}" for name, entry in self.text_sets.items())
        told = f"{condition if self.patches else 'stock'}, perplexity {', '.join(sets)}"
        return f"Evaluation({self.model.short_name}, {told})"

    @property
    def identity(self) -> str:
        """A hash of what was evaluated and how: model, patches, texts and settings."""
        patches = [patch.sha256 or "" for patch in self.patches]
        texts = [f"{name} {losses.texts.sha256}" for name, losses in sorted(self.text_sets.items())]
        return content_hash(
            [self.model.fingerprint, *patches, *texts, to_json(to_plain(self.provenance.settings))]
        )

    def to_json(self) -> dict[str, Any]:
        """The body of `evaluation.json`."""
        return plain_fields(self)

    def cost_map(self) -> Float[np.ndarray, "layer head"]:
        """Zero-ablation costs of single heads in nats per token; NaN where none was measured."""
        costs = np.full(self.model.shape, np.nan)
        for name, cost in self.heads.ablation_zero.items():
            if not name.startswith(JOINT):
                head = Head.parse(name)
                row = self.model.layer_numbers.index(head.layer)
                costs[row, head.index] = cost.value
        return costs

    def to_frame(self) -> pd.DataFrame:
        """One row per ablated head or set: its cost with zeros and with means (needs pandas)."""
        costs = self.heads
        return frame(
            [
                {
                    "head": name,
                    **{f"zero_{k}": getattr(cost, k) for k in ("value", "low", "high")},
                    **{
                        f"mean_{k}": getattr(costs.ablation_mean.get(name), k, None)
                        for k in ("value", "low", "high")
                    },
                }
                for name, cost in costs.ablation_zero.items()
            ]
        )

    def _repr_html_(self) -> str:
        from headwise.proof.view import evaluation_tables

        return tables_html(evaluation_tables(self))

    def save(self, path: Path) -> Path:
        """Write `evaluation.json`."""
        return save_artefact(path, "evaluation", self.to_json())

    @staticmethod
    def load(path: Path) -> Evaluation:
        """Read `evaluation.json`."""
        return from_plain(Evaluation, load_artefact(path, "evaluation"), path)


def identity_of(evaluations: Sequence[Evaluation]) -> str:
    """What an artefact that is made from these evaluations is valid for."""
    return content_hash([evaluation.identity for evaluation in evaluations])


RULE = (
    "ill in stock (any symptom), not ill now, zero ablation raises held-out loss with 95% "
    "confidence, at a false discovery rate of 5% over the judged heads, and by more than in stock "
    "with 95% confidence, paired by document"
)


def recovery_of(
    stock: Diagnosis, now: Diagnosis, costs: HeadCosts, targets: list[Head]
) -> Recovery | None:
    """Functional recovery of the operated heads; None if nothing was operated on."""
    if not targets:
        return None
    before, after = (set(side.head_sets()["ill"]) for side in (stock, now))
    rows = {}
    for head in targets:
        cost = costs.ablation_zero.get(str(head))
        # one document has no interval
        useful = cost.is_useful if cost is not None and costs.documents > 1 else None
        outcome = _outcome(head in before, head in after, useful)
        rows[str(head)] = HeadRecovery(
            class_=(label := now.class_of(head)),
            sick=label in SICK,
            useful=useful,
            functional=outcome == "recovered",
            was_sick=stock.class_of(head) in SICK,
            ill=head in after,
            was_ill=head in before,
            outcome=outcome,
        )
    ill = [row for row in rows.values() if row.was_ill]
    return Recovery(
        heads=rows,
        operated=len(rows),
        was_sick=sum(bool(row.was_sick) for row in rows.values()),
        was_ill=len(ill),
        not_sick=sum(not row.sick for row in rows.values()),
        judged=sum(row.useful is not None for row in ill),
        functional=sum(row.functional for row in rows.values()),
        harmed=sum(row.outcome == "harmed" for row in rows.values()),
        exceptions=tuple(name for name, row in rows.items() if not row.functional),
        rule=RULE,
    )


def _outcome(was_ill: bool, ill: bool, useful: bool | None) -> Outcome:
    if not was_ill:
        return "harmed" if ill else "unchanged"
    if ill:
        return "still ill"
    if useful is None:
        return "not judged"
    return "recovered" if useful else "no use shown"


@dataclass(frozen=True)
class PairedLoss:
    """Mean loss on one text set before and after, and their difference paired by document."""

    before: Interval
    after: Interval
    perplexity_before: Interval
    perplexity_after: Interval
    difference: Interval
    verdict: str


@dataclass(frozen=True)
class PlasticityChange:
    """Change of attention plasticity: by head (None where one side has none), and by zone."""

    delta: tuple[tuple[Finite | None, ...], ...] = field(repr=False)
    mean_delta: Mapping[str, Finite]


@dataclass(frozen=True)
class ComparisonProvenance:
    """Versions, settings, and what produced both sides."""

    versions: Mapping[str, str]
    settings: Mapping[str, int]  # `seed`, which decides the intervals
    before: Provenance
    after: Provenance
    identity: str = ""  # of the two evaluations that were compared
    # hash of the last patch on the side after, "" for stock; None: of diagnoses alone, or older
    patch: str | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Comparison:
    """What changed between two conditions of one model."""

    model: ModelInfo
    plan: SurgeryPlan | None = field(repr=False)
    transitions: Transitions = field(repr=False)
    drift: DriftByZone = field(repr=False)
    delta: Mapping[str, HeadArray] = field(repr=False)
    columns: Mapping[str, ColumnTrend] = field(repr=False)
    trajectories: Mapping[str, str] = field(repr=False)
    two_phenomena: Mapping[Phase, PhaseMeans] | None = field(repr=False)
    plasticity: PlasticityChange | None = field(repr=False)
    losses: Mapping[str, PairedLoss]
    recovery: Recovery | None
    provenance: ComparisonProvenance = field(repr=False)
    # head: its role before and after, "" where it has none; of treated heads, of all without a plan
    roles: Mapping[str, tuple[str, str]] | None = field(default=None, metadata=OMITTED, repr=False)
    # lm-eval scores after - before by task and metric, paired by item
    tasks: Mapping[str, Mapping[str, Interval]] | None = field(default=None, metadata=OMITTED)
    alarms: tuple[Alarm, ...] = ()

    def __post_init__(self) -> None:
        if any(value.shape != self.model.shape for value in self.delta.values()):
            raise ValueError(f"delta: maps must have the model's shape {self.model.shape}")

    def __repr__(self) -> str:
        sets = (f"{name} {entry.difference.value:+.4f}" for name, entry in self.losses.items())
        change = ", ".join(sets)
        sick = [counts["sick"] for counts in self._counts]
        heads = f"sick heads {sick[0]} to {sick[1]}"
        return f"Comparison({self.model.short_name}, {heads}{change and f', loss {change}'})"

    @property
    def _counts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return self.transitions.counts_before, self.transitions.counts_after

    def to_json(self) -> dict[str, Any]:
        """The body of `comparison.json`."""
        return plain_fields(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: the change of every measure (needs pandas)."""
        return head_frame(self.delta, {}, self.model.layer_numbers)

    def to_csv(self) -> str:
        """The same as text, in full precision; needs no pandas."""
        buffer, names = io.StringIO(), sorted(self.delta)
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["layer", "head", *(f"delta_{name}" for name in names)])
        for row, head in np.ndindex(*self.model.shape):
            changes = [float(self.delta[name][row, head]) for name in names]
            writer.writerow([self.model.layer_numbers[row], head, *changes])
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        from headwise.proof.view import comparison_tables

        return tables_html(comparison_tables(self))

    def save(self, path: Path) -> Path:
        """Write `comparison.json`."""
        return save_artefact(path, "comparison", self.to_json())

    @staticmethod
    def load(path: Path) -> Comparison:
        """Read `comparison.json`."""
        return from_plain(Comparison, load_artefact(path, "comparison"), path)
