"""Evaluation: perplexities with intervals, what every head is worth, and dormant neurons.

One artefact for one condition (a model, perhaps with patches). It keeps the loss of every document,
so that `compare` can pair two conditions document by document, and the heads' classes and ablation
costs, so that functional recovery can be told: not sick *and* useful with 95% confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from headwise.artefacts import versions
from headwise.bundled import DATA
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.dormancy import activation_dormancy, weight_dormancy
from headwise.diagnosis.mean_outputs import measure_means
from headwise.diagnosis.values import SICK, Diagnosis
from headwise.errors import TextError
from headwise.heads import JOINT, Head, all_heads, select_heads
from headwise.models.architectures import geometry_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.model_info import ModelInfo
from headwise.models.patch import Patch, applied
from headwise.models.patch_info import PatchInfo
from headwise.progress import Progress, silent
from headwise.proof.ablation import Ablation, ablate_heads, first_order_importance
from headwise.proof.evaluation import (
    Evaluation,
    EvaluationProvenance,
    EvaluationSettings,
    FirstOrder,
    HeadCosts,
    HeadRecovery,
    MlpDormancy,
    Recovery,
)
from headwise.proof.perplexity import TextLosses, text_losses
from headwise.surgery.plan import operated_heads
from headwise.texts.batches import DEFAULT_MAX_LENGTH, batches, encode_texts
from headwise.texts.text_sets import TextSet, default_texts, read_texts

_SMALL = 100  # heads; exact ablation of all of them is cheap up to here


PAPER_PROMPTS = DATA / "prompts" / "paper_appendix_a.jsonl"


def paper_prompts() -> TextSet:
    """The 12 prompts of the paper's Appendix A."""
    return TextSet("paper-appendix-a", read_texts([str(PAPER_PROMPTS)]).texts)


@takes_model
def evaluate(
    loaded: LoadedModel,
    text_sets: Sequence[TextSet] | None = None,
    *,
    patches: Sequence[Patch | Path] = (),
    heads: str | Sequence[Head] | None = None,
    joint: Mapping[str, Sequence[Head]] | None = None,
    max_length: int = DEFAULT_MAX_LENGTH,
    max_texts: int = 64,
    batch_size: int = 4,
    tasks: Sequence[str] = (),
    force: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> Evaluation:
    """Evaluate one condition: the model with `patches` on it, which it loses again afterwards.

    Heads are judged on the first text set: `heads` (a selection or a list; default: the operated
    ones, and all in models of at most 100) one by one, and `joint` sets together.
    """
    read = [Patch.load(p) if isinstance(p, Path) else p for p in patches]
    told = [
        patch.describe(p if isinstance(p, Path) else None)
        for patch, p in zip(read, patches, strict=True)
    ]
    base = loaded.describe()
    sets = [default_texts(loaded.id)] if text_sets is None else list(text_sets)
    if not sets:
        raise TextError("no text to evaluate on", fix="pass --texts")
    how = _How(max_length, max_texts, batch_size, seed, progress)
    with applied(loaded.model, read, force=force):
        found = _evaluate_as_it_is(
            loaded, base, told, sets, _wanted(loaded, heads, joint, told), how
        )
        if tasks:
            from headwise.proof.lm_eval import run_tasks

            scores = run_tasks(loaded.model, loaded.tokenizer, tasks, batch_size=batch_size)
            found = replace(found, tasks=scores)
    return found


@dataclass(frozen=True)
class _How:
    """How everything is measured."""

    max_length: int
    max_texts: int
    batch_size: int
    seed: int
    progress: Progress


@dataclass(frozen=True)
class _Wanted:
    """Heads to ablate one by one, and sets to ablate together."""

    singles: list[Head]
    joint: dict[str, list[Head]]


def _wanted(
    loaded: LoadedModel,
    heads: str | Sequence[Head] | None,
    joint: Mapping[str, Sequence[Head]] | None,
    patches: Sequence[PatchInfo],
) -> _Wanted:
    geometry = geometry_of(loaded.model)
    operated = operated_heads(patches)
    sets = {"operated": operated} if operated and joint is None else {}
    sets |= {name: list(found) for name, found in (joint or {}).items() if found}
    if heads is not None and not isinstance(heads, str):
        return _Wanted(list(heads), sets)
    every = all_heads(geometry.num_layers, geometry.num_heads)
    if heads is None:
        return _Wanted(every if len(every) <= _SMALL else operated, sets)
    if heads == "none":
        return _Wanted([], sets)
    found = select_heads(heads, num_layers=geometry.num_layers, num_heads=geometry.num_heads)
    return _Wanted(found, sets)


def _evaluate_as_it_is(
    loaded: LoadedModel,
    base: ModelInfo,
    patches: Sequence[PatchInfo],
    text_sets: Sequence[TextSet],
    wanted: _Wanted,
    how: _How,
) -> Evaluation:
    judged = TextSet(text_sets[0].name, text_sets[0].texts[: how.max_texts])
    encoded = encode_texts(loaded.tokenizer, judged.texts, max_length=how.max_length)
    losses = _losses(loaded, text_sets, how)
    diagnosis = diagnose(
        loaded,
        judged,
        max_length=how.max_length,
        batch_size=how.batch_size,
        progress=how.progress,
    )
    heads = _head_costs(loaded.model, encoded, wanted, how)
    return Evaluation(
        model=base,
        patches=tuple(patches),
        text_sets={key: value.summary(how.seed) for key, value in losses.items()},
        diagnosis=diagnosis,
        heads=heads,
        recovery=_recovery(diagnosis, heads, operated_heads(patches)),
        mlp_dormancy=MlpDormancy(
            weight_dormancy(loaded.model),
            activation_dormancy(loaded.model, batches(encoded, how.batch_size)),
            "the weight rule cannot change when only attention is trained",
        ),
        provenance=EvaluationProvenance(
            versions(), EvaluationSettings(how.max_length, how.max_texts, how.seed)
        ),
    )


def _losses(loaded: LoadedModel, text_sets: Sequence[TextSet], how: _How) -> dict[str, TextLosses]:
    """Losses of every set; a text that stands in several sets is scored once."""
    every = TextSet("all", tuple(dict.fromkeys(t for texts in text_sets for t in texts.texts)))
    found = text_losses(
        loaded,
        every,
        max_length=how.max_length,
        batch_size=how.batch_size,
        progress=how.progress,
    )
    place = {text: number for number, text in enumerate(every.texts)}
    rows = {texts.name: [place[text] for text in texts.texts] for texts in text_sets}
    return {
        texts.name: TextLosses(texts, found.sums[rows[texts.name]], found.tokens[rows[texts.name]])
        for texts in text_sets
    }


def _head_costs(
    model: PreTrainedModel, encoded: list[list[int]], wanted: _Wanted, how: _How
) -> HeadCosts:
    """Single, joint and first-order ablation costs in nats per token."""
    sets = [[head] for head in wanted.singles] + list(wanted.joint.values())
    labels = [str(head) for head in wanted.singles] + [f"{JOINT}{key}" for key in wanted.joint]
    means = measure_means(model, batches(encoded, how.batch_size))
    zero = ablate_heads(model, encoded, sets, means=means, progress=how.progress)
    mean = ablate_heads(
        model, encoded, sets, replacement="mean", means=means, progress=how.progress
    )
    return HeadCosts(
        len(encoded),
        zero.costs(labels, how.seed),
        mean.costs(labels, how.seed),
        _first_order(model, encoded, zero, wanted.singles, how.batch_size),
    )


def _first_order(
    model: PreTrainedModel,
    encoded: list[list[int]],
    exact: Ablation,
    singles: Sequence[Head],
    batch_size: int,
) -> FirstOrder:
    estimate = first_order_importance(model, encoded, batch_size=batch_size)
    costs = exact.deltas[: len(singles)].sum(1) / exact.tokens.sum()
    guesses = np.array([estimate[head.layer, head.index] for head in singles])
    if len(singles) < 3 or costs.std() == 0 or guesses.std() == 0:
        return FirstOrder(estimate, None)
    from scipy.stats import spearmanr

    return FirstOrder(estimate, float(spearmanr(costs, guesses).statistic))


def _recovery(diagnosis: Diagnosis, costs: HeadCosts, targets: list[Head]) -> Recovery | None:
    """Functional recovery of the operated heads: not sick, and its zero ablation costs > 0."""
    if not targets:
        return None
    rows = {str(head): _head_recovery(diagnosis, costs, head) for head in targets}
    return Recovery(
        heads=rows,
        operated=len(rows),
        not_sick=sum(not row.sick for row in rows.values()),
        judged=sum(row.useful is not None for row in rows.values()),
        functional=sum(row.functional for row in rows.values()),
        exceptions=tuple(name for name, row in rows.items() if not row.functional),
        rule="not sick, and zero ablation raises held-out loss with 95% confidence",
    )


def _head_recovery(diagnosis: Diagnosis, costs: HeadCosts, head: Head) -> HeadRecovery:
    label = diagnosis.class_of(head)
    cost = costs.ablation_zero.get(str(head))
    # one document has no interval
    useful = cost.low > 0 if cost is not None and costs.documents > 1 else None
    sick = label in SICK
    return HeadRecovery(label, sick, useful, bool(useful) and not sick)
