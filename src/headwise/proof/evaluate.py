"""Evaluation: perplexities with intervals, what every head is worth, and dormant neurons.

One artefact for one condition (a model, perhaps with patches). It keeps the loss of every document,
so that `compare` can pair two conditions document by document, and the heads' classes and ablation
costs, so that functional recovery can be told: not sick *and* of more use than in stock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.alarms import Alarm, loss_alarms, merge_alarms
from headwise.artefacts import versions
from headwise.bundled import DATA
from headwise.diagnosis.diagnose import diagnosis_measurement
from headwise.diagnosis.dormancy import dormancy_measurement
from headwise.diagnosis.values import Diagnosis, Dormancy
from headwise.errors import SelectionError, TextError
from headwise.forward.first_order import first_order_importance
from headwise.forward.interventions import ZERO, Variant, mean_output
from headwise.forward.mean_outputs import means_measurement
from headwise.forward.measurements import Measurement, run_measurements
from headwise.forward.variant_losses import VariantLosses, variant_losses
from headwise.heads import JOINT, Head, all_heads, select_heads
from headwise.intervals import Interval, mean_interval, mean_intervals
from headwise.models.architectures import attention_layers, geometry_of, is_packed
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.stored_weights import stored_weights
from headwise.models.values import ModelInfo, PatchInfo
from headwise.progress import Budget, Progress, Work, silent, stage, unlimited
from headwise.proof.perplexity import TextLosses, losses_measurement
from headwise.proof.usefulness import judge_heads
from headwise.proof.values import (
    Evaluation,
    EvaluationProvenance,
    EvaluationSettings,
    FirstOrder,
    HeadCost,
    HeadCosts,
    MlpDormancy,
    Recovery,
    recovery_of,
)
from headwise.provenance import MeasureSettings
from headwise.staged import discoveries, student_p
from headwise.surgery.plan import operated_heads
from headwise.texts.batches import DEFAULT_MAX_LENGTH, batches, encode_for
from headwise.texts.text_sets import TextSet, default_texts, document_hash, read_texts
from headwise.texts.unigram import unigram_loss

Means = Float[Tensor, "layer head value"]
Encoded = Mapping[str, list[int]]  # the tokens of each text


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
    max_tokens: int | None = None,
    batch_size: int = 4,
    tasks: Sequence[str] = (),
    adaptive: bool = True,
    paper: bool | None = None,
    force: bool = False,
    bos: bool | None = None,
    stock: Diagnosis | None = None,
    seed: int = 0,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> Evaluation:
    """Evaluate one condition: the model with `patches` on it, which it loses again afterwards.

    Heads are judged on the first text set: `heads` (a selection or a list; default: the operated
    ones, and all in models of at most 100) one by one, and `joint` sets together. `paper` adds the
    paper's 12 prompts as a text set; by default a BLOOM model without `text_sets` reads them.

    With patches the stock model is diagnosed too, unless its diagnosis on the same texts is given
    as `stock`. Of each set the first texts are read that together have at most `max_tokens`.
    `adaptive` takes documents in stages until each head is decided, else every head sees them all.
    `budget` hears how much work it is, before it starts.
    """
    read = [Patch.load(p) if isinstance(p, Path) else p for p in patches]
    told = [
        patch.describe(p if isinstance(p, Path) else None)
        for patch, p in zip(read, patches, strict=True)
    ]
    trained = [(info.bos, "the patch") for info in told]
    loaded = loaded.reading(bos, *trained, progress=progress)
    base = loaded.describe()
    sets = [default_texts(loaded.id)] if text_sets is None else list(text_sets)
    if not sets:
        raise TextError("no text to evaluate on", fix="pass --texts")
    is_bloom = base.model_type == "bloom"
    if (text_sets is None and is_bloom) if paper is None else paper:
        sets.append(paper_prompts())
    encoded = _encoded(loaded, sets, max_length)
    if max_tokens is not None:
        sets = [_capped(texts, encoded, max_tokens) for texts in sets]
    how = _How(loaded.length(max_length), max_texts, batch_size, adaptive, seed, progress)
    wanted = _wanted(loaded, heads, joint, told)
    budget(loaded.model, _work(sets, encoded, wanted, how, diagnoses=1 + bool(read and not stock)))
    unpatched: Mapping[str, TextLosses] = {}
    if read and stock is None:
        unpatched, stock = run_measurements(
            loaded.model,
            [
                _losses_measurement(loaded, sets, encoded, how),
                _diagnosis_measurement(loaded, sets, encoded, how),
            ],
            title="losses and heads of stock",
            progress=progress,
        )
    before = _Before(base, tuple(told), stock, merge_alarms(loaded.alarms, _leaks(read, sets)))
    with applied(loaded.model, read, force=force):
        found = _evaluate_as_it_is(loaded, before, sets, encoded, wanted, how)
        if tasks:
            from headwise.proof.lm_eval import run_tasks

            scores = run_tasks(loaded.model, loaded.tokenizer, tasks, batch_size=batch_size)
            found = replace(found, tasks=scores)
    if unpatched:
        found = replace(found, against_stock=_changes(unpatched, found, seed))
    if found.recovery is not None and f"{JOINT}operated" in found.heads.ablation_zero:
        documents = [encoded[text] for text in _judged(sets, how).texts]
        recovery = _with_rises(loaded, read, found.recovery, documents, how, force)
        found = replace(found, recovery=recovery)
    return found


def _changes(
    stock: Mapping[str, TextLosses], now: Evaluation, seed: int
) -> dict[str, Interval] | None:
    """Loss with the patches minus that of stock, paired by document."""
    return {
        name: mean_interval(
            np.array(now.text_sets[name].document_loss_sums) - before.sums, before.tokens, seed=seed
        )
        for name, before in stock.items()
    }


def _with_rises(
    loaded: LoadedModel,
    patches: Sequence[Patch],
    recovery: Recovery,
    documents: list[list[int]],
    how: _How,
    force: bool,
) -> Recovery:
    """What losing a recovered head costs more than in stock, and all treated heads together.

    Both models read every judged document, so that the difference is paired; only heads that pass
    all other tests are asked, so a sham costs one more ablation.
    """
    names, every = recovery.candidates, tuple(sorted(map(Head.parse, recovery.heads)))
    variants = [Variant((Head.parse(name),), ZERO) for name in names] + [Variant(every, ZERO)]

    def measure() -> VariantLosses:
        title = "treated heads, beside stock"
        return variant_losses(loaded.model, documents, variants, title=title, progress=how.progress)

    stock = measure()
    with applied(loaded.model, patches, force=force):
        now = measure()
    rises = mean_intervals(now.deltas - stock.deltas, now.tokens, seed=how.seed)
    sides = [mean_interval(side.deltas[-1], side.tokens, seed=how.seed) for side in (stock, now)]
    known = dict(zip(names, rises[:-1], strict=True))
    return recovery.with_rises(known, (*sides, rises[-1]))


def _encoded(loaded: LoadedModel, sets: Sequence[TextSet], max_length: int) -> Encoded:
    """The tokens of every text of all sets; every measurement reads these."""
    texts = tuple(dict.fromkeys(text for one in sets for text in one.texts))
    return dict(zip(texts, encode_for(loaded, texts, max_length=max_length), strict=True))


def _work(
    sets: Sequence[TextSet], encoded: Encoded, wanted: _Wanted, how: _How, *, diagnoses: int
) -> Work:
    """Losses of all texts; diagnoses, means, activations, the gradient and ablations of some."""
    tokens = sum(len(encoded[text]) for text in _judged(sets, how).texts)
    every = sum(len(encoded[text]) for texts in sets for text in texts.texts)
    # an ablation re-runs half the layers on average; sets also with means, or heads if not staged
    ablations = (len(wanted.singles) * (1 if how.adaptive else 2) + 2 * len(wanted.joint)) / 2
    return Work(
        tokens=every + tokens * (diagnoses + 2 + 4 + ablations),
        batch=how.batch_size * how.max_length,
        waiting=every + tokens,
        less="--heads, --max-texts, --max-tokens",
    )


def _capped(texts: TextSet, encoded: Encoded, most: int) -> TextSet:
    """The first texts of a set with at most so many tokens together, one at least."""
    lengths = [len(encoded[text]) for text in texts.texts]
    count = int((np.cumsum(lengths) <= most).sum())
    return TextSet(texts.name, texts.texts[: max(1, count)])


@dataclass(frozen=True)
class _How:
    """How everything is measured."""

    max_length: int
    max_texts: int
    batch_size: int
    adaptive: bool
    seed: int
    progress: Progress


@dataclass(frozen=True)
class _Before:
    """What is known before the patches are on: the base, the patches, stock and what is wrong."""

    base: ModelInfo
    patches: tuple[PatchInfo, ...]
    stock: Diagnosis | None = field(repr=False)
    alarms: tuple[Alarm, ...]


def _leaks(patches: Sequence[Patch], text_sets: Sequence[TextSet]) -> list[Alarm]:
    """Evaluation texts that a patch was trained on, by the hash of the document."""
    seen = {document for patch in patches for document in patch.documents}
    found = []
    for texts in text_sets:
        count = sum(document_hash(text) in seen for text in texts.texts)
        if count:
            told = (
                f"{count} of {len(texts.texts)} texts of {texts.name} were in the training corpus"
            )
            found.append(Alarm("evaluated-on-training-text", told))
    return found


@dataclass(frozen=True)
class _Wanted:
    """Heads to ablate one by one, and sets to ablate at once, by their names in the artefact."""

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
    sets = {f"{JOINT}operated": operated} if operated and joint is None else {}
    sets |= {f"{JOINT}{name}": list(some) for name, some in (joint or {}).items() if some}
    if heads is not None and not isinstance(heads, str):
        return _Wanted(list(heads), sets)
    every = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
    if heads is None:
        return _Wanted(every if len(every) <= _SMALL else operated, sets)
    if heads == "none":
        return _Wanted([], sets)
    found = select_heads(
        heads,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        layers=geometry.layers,
    )
    if not found:
        raise SelectionError(f"no head matches {heads[:80]!r}", fix="choose others, or `none`")
    return _Wanted(found, sets)


def _evaluate_as_it_is(
    loaded: LoadedModel,
    before: _Before,
    text_sets: Sequence[TextSet],
    encoded: Encoded,
    wanted: _Wanted,
    how: _How,
) -> Evaluation:
    documents = [encoded[text] for text in _judged(text_sets, how).texts]
    work = list(batches(documents, how.batch_size, model=loaded.model))
    losses, diagnosis, means, active = run_measurements(
        loaded.model,
        [
            _losses_measurement(loaded, text_sets, encoded, how),
            _diagnosis_measurement(loaded, text_sets, encoded, how),
            means_measurement(loaded.model, work),
            dormancy_measurement(
                loaded.model, batches(documents, how.batch_size, model=loaded.model)
            ),
        ],
        title="losses, heads and neurons",
        progress=how.progress,
    )
    costs = _staged_costs if how.adaptive else _fixed_costs
    heads = costs(loaded.model, documents, wanted, means, how)
    targets, stock = operated_heads(before.patches), before.stock
    return Evaluation(
        model=before.base,
        patches=before.patches,
        text_sets={key: value.summary(how.seed) for key, value in losses.items()},
        diagnosis=diagnosis,
        heads=heads,
        recovery=None if stock is None else recovery_of(stock, diagnosis, heads, targets),
        mlp_dormancy=_dormancy(diagnosis.mlp_dormancy, active),
        provenance=EvaluationProvenance(
            versions(), EvaluationSettings(how.max_length, how.max_texts, how.seed, loaded.bos)
        ),
        alarms=merge_alarms(before.alarms, _unusable(losses, loaded.num_embeddings)),
    )


def _judged(text_sets: Sequence[TextSet], how: _How) -> TextSet:
    """The texts on which heads are judged."""
    return TextSet(text_sets[0].name, text_sets[0].texts[: how.max_texts])


def _diagnosis_measurement(
    loaded: LoadedModel, text_sets: Sequence[TextSet], encoded: Encoded, how: _How
) -> Measurement[Diagnosis]:
    judged = _judged(text_sets, how)
    documents = [encoded[text] for text in judged.texts]
    return diagnosis_measurement(
        loaded,
        documents,
        judged.describe(sum(map(len, documents))),
        MeasureSettings(how.max_length, 0, loaded.bos),
        batch_size=how.batch_size,
    )


def _unusable(losses: Mapping[str, TextLosses], vocabulary: int) -> list[Alarm]:
    """Text sets that the model reads worse than a guess."""
    return [
        alarm
        for name, found in losses.items()
        for alarm in loss_alarms(name, found.loss().value, vocabulary, found.unigram)
    ]


def _dormancy(weights: Dormancy | None, activations: Dormancy | None) -> MlpDormancy | None:
    """None for families whose MLP is many experts."""
    if weights is None or activations is None:
        return None
    note = "the weight rule cannot change when only attention is trained"
    return MlpDormancy(weights, activations, note)


def _losses_measurement(
    loaded: LoadedModel, text_sets: Sequence[TextSet], encoded: Encoded, how: _How
) -> Measurement[dict[str, TextLosses]]:
    """Losses of every set; a text that stands in several sets is scored once.

    The texts on which heads are judged stand in the batches of the other measurements.
    """
    every = TextSet("all", tuple(dict.fromkeys(t for texts in text_sets for t in texts.texts)))
    found = yield from losses_measurement(
        loaded,
        every,
        [encoded[text] for text in every.texts],
        max_length=how.max_length,
        batch_size=how.batch_size,
        apart=len(dict.fromkeys(_judged(text_sets, how).texts)),
    )
    place = {text: number for number, text in enumerate(every.texts)}
    rows = {texts.name: [place[text] for text in texts.texts] for texts in text_sets}
    return {
        texts.name: TextLosses(
            texts,
            found.sums[rows[texts.name]],
            found.tokens[rows[texts.name]],
            unigram_loss([encoded[text] for text in texts.texts], loaded.num_embeddings),
        )
        for texts in text_sets
    }


def _fixed_costs(
    model: PreTrainedModel, encoded: list[list[int]], wanted: _Wanted, means: Means, how: _How
) -> HeadCosts:
    """Single, joint and first-order ablation costs on every document, in nats per token."""
    sets = {**{str(head): [head] for head in wanted.singles}, **wanted.joint}
    zero, mean, p_values = _ablation_costs(model, encoded, sets, means, how)
    if len(encoded) > 1:  # one document has no interval
        names = [str(head) for head in wanted.singles]
        clear = discoveries(np.array([p_values[name] for name in names]))
        for name, yes in zip(names, clear, strict=True):
            zero[name] = replace(zero[name], useful=bool(yes) and zero[name].low > 0)
    first_order = _first_order(model, encoded, zero, wanted.singles)
    return HeadCosts(len(encoded), zero, mean, first_order)


def _ablation_costs(
    model: PreTrainedModel,
    encoded: list[list[int]],
    sets: Mapping[str, Sequence[Head]],
    means: Means,
    how: _How,
) -> tuple[dict[str, HeadCost], dict[str, HeadCost], dict[str, float]]:
    """Costs of sets of heads by zero and by mean ablation, and p-values of the former, by name."""
    kinds = (ZERO, mean_output(model, means))
    heads = [tuple(sorted(some)) for some in sets.values()]
    costs = variant_losses(
        model,
        encoded,
        [Variant(some, kind) for kind in kinds for some in heads],
        title="ablating heads",
        progress=how.progress,
    )
    found: list[dict[str, HeadCost]] = []
    for deltas in np.split(costs.deltas, len(kinds)):
        intervals = mean_intervals(deltas, costs.tokens, seed=how.seed)
        found.append(
            {
                name: HeadCost(i.value, i.low, i.high, tuple(map(str, some)))
                for name, i, some in zip(sets, intervals, heads, strict=True)
            }
        )
    rows = costs.deltas if len(encoded) > 1 else ()
    p_values = [student_p(row, costs.tokens) for row in rows]
    return found[0], found[1], dict(zip(sets, p_values, strict=False))


def _staged_costs(
    model: PreTrainedModel, encoded: list[list[int]], wanted: _Wanted, means: Means, how: _How
) -> HeadCosts:
    """The same, with each single head measured on as many documents as decide it."""
    judged = judge_heads(
        model, encoded, wanted.singles, means, seed=how.seed, progress=how.progress
    )
    zero, mean, _ = _ablation_costs(model, encoded, wanted.joint, means, how)
    single = judged.zero()
    stage("first-order estimates of all heads, dormant neurons", how.progress)
    return HeadCosts(
        len(encoded),
        single | zero,
        dict(judged.mean) | mean,
        _first_order(model, encoded, single, wanted.singles),
        judged.staged.decisions(),
    )


def _first_order(
    model: PreTrainedModel,
    encoded: list[list[int]],
    exact: Mapping[str, HeadCost],
    singles: Sequence[Head],
) -> FirstOrder | None:
    if is_packed(model):
        return None  # packed kernels may pass no gradient on, without a word
    if stored_weights(model) is not None:
        return None  # a backward pass would read the model twice for every text
    # one text at a time: the backward pass keeps every activation
    estimate = first_order_importance(model, encoded, batch_size=1)
    costs = np.array([exact[str(head)].value for head in singles])
    rows = attention_layers(model)
    guesses = np.array([estimate[rows.index(head.layer), head.index] for head in singles])
    if len(singles) < 3 or costs.std() == 0 or guesses.std() == 0:
        return FirstOrder(estimate, None)
    from scipy.stats import spearmanr

    return FirstOrder(estimate, float(spearmanr(costs, guesses).statistic))
