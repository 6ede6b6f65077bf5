"""Evaluation: perplexities with intervals, what every head is worth, and dormant neurons.

One artefact for one condition (a model, perhaps with patches). It keeps the loss of every document,
so that `compare` can pair two conditions document by document, and the heads' classes and ablation
costs, so that functional recovery can be told: not sick *and* useful with 95% confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.artefacts import versions
from headwise.bundled import DATA
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.dormancy import activation_dormancy, weight_dormancy
from headwise.diagnosis.mean_outputs import measure_means
from headwise.diagnosis.values import SICK, Diagnosis
from headwise.errors import TextError
from headwise.heads import Head, all_heads, select_heads
from headwise.models.architectures import geometry_of
from headwise.models.description import describe_model
from headwise.models.model_info import ModelInfo
from headwise.models.patch_info import PatchInfo
from headwise.progress import Progress, silent
from headwise.proof.ablation import Ablation, ablate_heads, first_order_importance
from headwise.proof.evaluation import (
    JOINT,
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
from headwise.texts.text_sets import TextSet, read_texts

_SMALL = 100  # heads; exact ablation of all of them is cheap up to here


PAPER_PROMPTS = DATA / "prompts" / "paper_appendix_a.jsonl"


def paper_prompts() -> TextSet:
    """The 12 prompts of the paper's Appendix A."""
    return TextSet("paper-appendix-a", read_texts([str(PAPER_PROMPTS)]).texts)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_sets: Sequence[TextSet],
    *,
    name: str | None = None,
    patches: Sequence[PatchInfo] = (),
    base: ModelInfo | None = None,
    ablated: Sequence[Head] | None = None,
    joint: Mapping[str, Sequence[Head]] | None = None,
    max_length: int = DEFAULT_MAX_LENGTH,
    max_texts: int = 64,
    batch_size: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> Evaluation:
    """Evaluate one condition; heads are judged on the first text set.

    `patches` and `base` describe what was applied to which model; `ablated` heads are ablated one
    by one (default: all), `joint` sets together; `seed` is the bootstrap's.
    """
    if not text_sets:
        raise TextError("no text to evaluate on", fix="pass --texts")
    judged = TextSet(text_sets[0].name, text_sets[0].texts[:max_texts])
    encoded = encode_texts(tokenizer, judged.texts, max_length=max_length)
    losses = _losses(model, tokenizer, text_sets, max_length, batch_size, progress)
    diagnosis = diagnose(
        model,
        tokenizer,
        judged,
        name=name,
        max_length=max_length,
        batch_size=batch_size,
        progress=progress,
    )
    heads = _head_costs(model, encoded, ablated, joint or {}, batch_size, progress, seed)
    return Evaluation(
        model=base or describe_model(model, name),
        patches=tuple(patches),
        text_sets={key: value.summary(seed) for key, value in losses.items()},
        diagnosis=diagnosis,
        heads=heads,
        recovery=_recovery(diagnosis, heads, operated_heads(patches)),
        mlp_dormancy=MlpDormancy(
            weight_dormancy(model),
            activation_dormancy(model, batches(encoded, batch_size)),
            "the weight rule cannot change when only attention is trained",
        ),
        provenance=EvaluationProvenance(
            versions(), EvaluationSettings(max_length, max_texts, seed)
        ),
    )


def _losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_sets: Sequence[TextSet],
    max_length: int,
    batch_size: int,
    progress: Progress,
) -> dict[str, TextLosses]:
    """Losses of every set; a text that stands in several sets is scored once."""
    every = TextSet("all", tuple(dict.fromkeys(t for texts in text_sets for t in texts.texts)))
    found = text_losses(
        model, tokenizer, every, max_length=max_length, batch_size=batch_size, progress=progress
    )
    place = {text: number for number, text in enumerate(every.texts)}
    rows = {texts.name: [place[text] for text in texts.texts] for texts in text_sets}
    return {
        texts.name: TextLosses(texts, found.sums[rows[texts.name]], found.tokens[rows[texts.name]])
        for texts in text_sets
    }


def chosen_heads(
    model: PreTrainedModel, selection: str | None, patches: Sequence[PatchInfo]
) -> tuple[list[Head], dict[str, list[Head]]]:
    """Heads to ablate one by one, and sets to ablate together.

    By default: the operated heads and, in models of at most 100 heads, all others too.
    """
    geometry = geometry_of(model)
    layers, heads = geometry.num_layers, geometry.num_heads
    operated = operated_heads(patches)
    joint = {"operated": operated} if operated else {}
    if selection == "none":
        return [], joint
    if selection is not None:
        return select_heads(selection, num_layers=layers, num_heads=heads), joint
    every = all_heads(layers, heads)
    return (every if len(every) <= _SMALL else operated), joint


def _head_costs(
    model: PreTrainedModel,
    encoded: list[list[int]],
    ablated: Sequence[Head] | None,
    joint: Mapping[str, Sequence[Head]],
    batch_size: int,
    progress: Progress,
    seed: int,
) -> HeadCosts:
    """Single, joint and first-order ablation costs in nats per token."""
    geometry = geometry_of(model)
    every = all_heads(geometry.num_layers, geometry.num_heads)
    singles = list(every if ablated is None else ablated)
    named = {key: list(heads) for key, heads in joint.items() if heads}
    sets = [[head] for head in singles] + list(named.values())
    labels = [str(head) for head in singles] + [f"{JOINT}{key}" for key in named]
    means = measure_means(model, batches(encoded, batch_size))
    zero = ablate_heads(model, encoded, sets, means=means, progress=progress)
    mean = ablate_heads(model, encoded, sets, replacement="mean", means=means, progress=progress)
    return HeadCosts(
        len(encoded),
        zero.costs(labels, seed),
        mean.costs(labels, seed),
        _first_order(model, encoded, zero, singles, batch_size),
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
