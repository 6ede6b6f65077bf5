"""Evaluation: perplexities with intervals, what every head is worth, and dormant neurons.

One artefact for one condition (a model, perhaps with patches). It keeps the loss of every document,
so that `compare` can pair two conditions document by document, and the heads' classes and ablation
costs, so that functional recovery can be told: not sick *and* of more use than in stock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

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
from headwise.forward.variant_losses import variant_losses
from headwise.heads import JOINT, Head, all_heads, select_heads
from headwise.intervals import mean_interval, mean_intervals, paired_intervals
from headwise.models.architectures import attention_layers, geometry_of, is_packed
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.stored_weights import stored_weights
from headwise.progress import Budget, Progress, Work, silent, stage, unlimited
from headwise.proof.perplexity import losses_measurement
from headwise.proof.usefulness import judge_heads
from headwise.proof.values import (
    DocumentLosses,
    Evaluation,
    FirstOrder,
    HeadCost,
    HeadCosts,
    MlpDormancy,
    Recovery,
    recovery_of,
)
from headwise.provenance import MeasureSettings, Provenance
from headwise.staged import discoveries, student_p
from headwise.surgery.plan import operated_heads
from headwise.texts.batches import DEFAULT_MAX_LENGTH, batches, encode_for
from headwise.texts.text_sets import TextSet, default_texts, document_hash, read_texts
from headwise.texts.unigram import unigram_loss

Means = Float[Tensor, "layer head value"]
Encoded = Mapping[str, list[int]]  # the tokens of each text
Ablated = Mapping[str, tuple[Head, ...]]  # by name; of sets that are ablated at once `joint:NAME`

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
    whole: bool = False,
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
    as `stock`. Texts are cut at `max_length`; with `whole` their losses, but not the judgement of
    heads, are of all tokens, in windows of that size. Of each set the first texts are read that
    together have at most `max_tokens`.
    `adaptive` takes documents in stages until each head is decided, else every head sees them all.
    `budget` hears how much work it is, before it starts.
    """
    read = [Patch.load(p) if isinstance(p, Path) else p for p in patches]
    infos = tuple(
        patch.describe(p if isinstance(p, Path) else None)
        for patch, p in zip(read, patches, strict=True)
    )
    trained = [(info.bos, "the patch") for info in infos]
    loaded = loaded.reading(bos, *trained, progress=progress)
    base, operated = loaded.describe(), operated_heads(infos)
    sets = [default_texts(loaded.id)] if text_sets is None else list(text_sets)
    if not sets:
        raise TextError("no text to evaluate on", fix="pass --texts")
    is_bloom = base.model_type == "bloom"
    if (text_sets is None and is_bloom) if paper is None else paper:
        sets.append(paper_prompts())
    encoded = _encoded(loaded, sets, None if whole else max_length)
    if max_tokens is not None:
        sets = [_capped(texts, encoded, max_tokens) for texts in sets]
    how = MeasureSettings(loaded.length(max_length), 0, loaded.bos, max_texts, seed, whole)
    reading = _Reading(loaded, sets, encoded, how, batch_size, progress)
    ablated = ablated_sets(loaded, heads, joint, operated)
    budget(loaded.model, _work(reading, ablated, adaptive, 1 + bool(read and not stock)))
    unpatched: Mapping[str, DocumentLosses] = {}
    if read and stock is None:
        unpatched, stock = run_measurements(
            loaded.model,
            [_losses_measurement(reading), _diagnosis_measurement(reading)],
            title="losses and heads of stock",
            progress=progress,
        )
    with applied(loaded.model, read, force=force):
        work = list(batches(reading.documents, batch_size, model=loaded.model))
        losses, diagnosis, means, active = run_measurements(
            loaded.model,
            [
                _losses_measurement(reading),
                _diagnosis_measurement(reading),
                means_measurement(loaded.model, work),
                dormancy_measurement(loaded.model, work),
            ],
            title="losses, heads and neurons",
            progress=progress,
        )
        costs = (_staged_costs if adaptive else _fixed_costs)(reading, ablated, means)
        scores, items = None, None
        if tasks:
            from headwise.proof.lm_eval import run_tasks

            scores, items = run_tasks(loaded.model, loaded.tokenizer, tasks, batch_size=batch_size)
    recovery = None if stock is None else recovery_of(stock, diagnosis, costs, operated)
    if recovery is not None and f"{JOINT}operated" in costs.ablation_zero:
        recovery = _with_rises(reading, recovery, read, force)
    changes = {name: losses[name].minus(before, seed) for name, before in unpatched.items()}
    return Evaluation(
        model=base,
        patches=infos,
        text_sets=losses,
        diagnosis=diagnosis,
        heads=costs,
        recovery=recovery,
        mlp_dormancy=_dormancy(diagnosis.mlp_dormancy, active),
        provenance=Provenance(settings=how, versions=versions()),
        tasks=scores,
        task_items=items,
        against_stock=changes or None,
        alarms=merge_alarms(
            loaded.alarms, _leaks(read, sets), _unusable(losses, loaded.num_embeddings)
        ),
    )


@dataclass(frozen=True)
class _Reading:
    """What every measurement of an evaluation reads, and how."""

    loaded: LoadedModel
    sets: list[TextSet]
    encoded: Encoded
    how: MeasureSettings
    batch_size: int
    progress: Progress

    @property
    def judged(self) -> TextSet:
        """The texts on which heads are judged."""
        return TextSet(self.sets[0].name, self.sets[0].texts[: self.how.max_texts])

    @property
    def documents(self) -> list[list[int]]:
        """Their tokens: heads are always judged on the first `max_length`."""
        return [self.encoded[text][: self.how.max_length] for text in self.judged.texts]

    @property
    def seed(self) -> int:
        """Of bootstraps and of the order in which documents are taken."""
        return self.how.seed or 0


def _with_rises(
    reading: _Reading, recovery: Recovery, patches: Sequence[Patch], force: bool
) -> Recovery:
    """What losing a recovered head costs more than in stock, and all treated heads together.

    Both models read every judged document, so that the difference is paired; only heads that pass
    all other tests are asked, so a sham costs one more ablation.
    """
    model = reading.loaded.model
    names, every = recovery.candidates, tuple(sorted(map(Head.parse, recovery.heads)))
    variants = [Variant((Head.parse(name),), ZERO) for name in names] + [Variant(every, ZERO)]
    measure = partial(
        variant_losses,
        model,
        reading.documents,
        variants,
        title="treated heads, beside stock",
        progress=reading.progress,
    )
    stock = measure()
    with applied(model, patches, force=force):
        now = measure()
    rises = paired_intervals(now.deltas - stock.deltas, now.tokens, seed=reading.seed)
    sides = [
        mean_interval(side.deltas[-1], side.tokens, seed=reading.seed) for side in (stock, now)
    ]
    return recovery.with_rises(dict(zip(names, rises[:-1], strict=True)), (*sides, rises[-1]))


def _encoded(loaded: LoadedModel, sets: Sequence[TextSet], max_length: int | None) -> Encoded:
    """The tokens of every text of all sets, cut at `max_length`; every measurement reads these."""
    texts = tuple(dict.fromkeys(text for one in sets for text in one.texts))
    return dict(zip(texts, encode_for(loaded, texts, max_length=max_length), strict=True))


def _work(reading: _Reading, ablated: Ablated, adaptive: bool, diagnoses: int) -> Work:
    tokens = sum(map(len, reading.documents))
    lengths = [len(reading.encoded[text]) for texts in reading.sets for text in texts.texts]
    # windows overlap by half: every token behind the first window is read twice
    every = sum(length + max(0, length - reading.how.max_length) for length in lengths)
    joint = sum(name.startswith(JOINT) for name in ablated)
    alone = (len(ablated) - joint) * (1 if adaptive else 2)
    return Work(
        tokens=every + tokens * judging_passes(alone, joint, diagnoses),
        batch=reading.batch_size * reading.how.max_length,
        waiting=every + tokens,
        less="--heads, --max-texts, --max-tokens",
    )


def judging_passes(alone: int, joint: int, diagnoses: int = 1) -> float:
    """Forward passes of the judged texts: diagnoses, means, activations, gradient, ablations.

    An ablation re-runs half the layers on average; sets of heads also with means.
    """
    return diagnoses + 2 + 4 + (alone + 2 * joint) / 2


def _capped(texts: TextSet, encoded: Encoded, most: int) -> TextSet:
    """The first texts of a set with at most so many tokens together, one at least."""
    lengths = [len(encoded[text]) for text in texts.texts]
    count = int((np.cumsum(lengths) <= most).sum())
    return TextSet(texts.name, texts.texts[: max(1, count)])


def _leaks(patches: Sequence[Patch], text_sets: Sequence[TextSet]) -> list[Alarm]:
    """Evaluation texts that a patch was trained on, by the hash of the document."""
    seen = {document for patch in patches for document in patch.documents}
    counts = {
        texts.name: (sum(document_hash(text) in seen for text in texts.texts), len(texts.texts))
        for texts in text_sets
    }
    return [
        Alarm(
            "evaluated-on-training-text",
            f"{count} of {total} texts of {name} were in the training corpus",
        )
        for name, (count, total) in counts.items()
        if count
    ]


def ablated_sets(
    loaded: LoadedModel,
    heads: str | Sequence[Head] | None,
    joint: Mapping[str, Sequence[Head]] | None,
    operated: Sequence[Head],
) -> Ablated:
    """What is ablated, by its name in the artefact: heads one by one, then sets at once."""
    geometry = geometry_of(loaded.model)
    if joint is None:
        joint = {"operated": operated}
    sets = {f"{JOINT}{name}": tuple(some) for name, some in joint.items() if some}
    if heads is None:
        every = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
        heads = every if len(every) <= _SMALL else operated
    elif heads == "none":
        heads = []
    elif isinstance(heads, str):
        chosen = select_heads(
            heads,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            layers=geometry.layers,
        )
        if not chosen:
            raise SelectionError(f"no head matches {heads[:80]!r}", fix="choose others, or `none`")
        heads = chosen
    return {str(head): (head,) for head in heads} | sets


def _diagnosis_measurement(reading: _Reading) -> Measurement[Diagnosis]:
    how, documents = reading.how, reading.documents
    return diagnosis_measurement(
        reading.loaded,
        documents,
        reading.judged.describe(sum(map(len, documents))),
        MeasureSettings(how.max_length, how.skip_queries, how.bos),
        batch_size=reading.batch_size,
    )


def _unusable(losses: Mapping[str, DocumentLosses], vocabulary: int) -> list[Alarm]:
    """Text sets that the model reads worse than a guess."""
    return [
        alarm
        for name, entry in losses.items()
        for alarm in loss_alarms(name, entry.loss.value, vocabulary, entry.unigram_loss)
    ]


def _dormancy(weights: Dormancy | None, activations: Dormancy | None) -> MlpDormancy | None:
    """None for families whose MLP is many experts."""
    if weights is None or activations is None:
        return None
    note = "the weight rule cannot change when only attention is trained"
    return MlpDormancy(weights, activations, note)


def _losses_measurement(reading: _Reading) -> Measurement[dict[str, DocumentLosses]]:
    """Losses of every set; a text that stands in several sets is scored once.

    The texts on which heads are judged stand in the batches of the other measurements.
    """
    encoded, loaded = reading.encoded, reading.loaded
    every = TextSet("all", tuple(dict.fromkeys(t for texts in reading.sets for t in texts.texts)))
    sums, tokens = yield from losses_measurement(
        loaded,
        every,
        [encoded[text] for text in every.texts],
        max_length=reading.how.max_length,
        batch_size=reading.batch_size,
        apart=len(dict.fromkeys(reading.judged.texts)),
    )
    place = {text: number for number, text in enumerate(every.texts)}
    losses = {}
    for texts in reading.sets:
        rows = [place[text] for text in texts.texts]
        unigram = unigram_loss([encoded[text] for text in texts.texts], loaded.num_embeddings)
        losses[texts.name] = DocumentLosses.of(
            texts.describe(), sums[rows], tokens[rows], unigram, reading.seed
        )
    return losses


def _fixed_costs(reading: _Reading, ablated: Ablated, means: Means) -> HeadCosts:
    """Single, joint and first-order ablation costs on every document, in nats per token."""
    zero, mean, p_values = _ablation_costs(reading, ablated, means)
    singles = [name for name in ablated if not name.startswith(JOINT)]
    if p_values:  # one document has no interval
        clear = discoveries(np.array([p_values[name] for name in singles]))
        for name, yes in zip(singles, clear, strict=True):
            zero[name] = replace(zero[name], useful=bool(yes) and zero[name].low > 0)
    return HeadCosts(len(reading.documents), zero, mean, _first_order(reading, zero))


def _staged_costs(reading: _Reading, ablated: Ablated, means: Means) -> HeadCosts:
    """The same, with each single head measured on as many documents as decide it."""
    singles = [some[0] for name, some in ablated.items() if not name.startswith(JOINT)]
    judged = judge_heads(
        reading.loaded.model,
        reading.documents,
        singles,
        means,
        seed=reading.seed,
        progress=reading.progress,
    )
    joint = {name: some for name, some in ablated.items() if name.startswith(JOINT)}
    zero, mean, _ = _ablation_costs(reading, joint, means)
    stage("first-order estimates of all heads", reading.progress)
    return replace(
        judged,
        ablation_zero={**judged.ablation_zero, **zero},
        ablation_mean={**judged.ablation_mean, **mean},
        first_order=_first_order(reading, judged.ablation_zero),
    )


def _ablation_costs(
    reading: _Reading, ablated: Ablated, means: Means
) -> tuple[dict[str, HeadCost], dict[str, HeadCost], dict[str, float]]:
    """Costs of sets of heads by zero and by mean ablation, and p-values of the former, by name."""
    model, documents = reading.loaded.model, reading.documents
    kinds = (ZERO, mean_output(model, means))
    heads = [tuple(sorted(some)) for some in ablated.values()]
    losses = variant_losses(
        model,
        documents,
        [Variant(some, kind) for kind in kinds for some in heads],
        title="ablating heads",
        progress=reading.progress,
    )
    costs: list[dict[str, HeadCost]] = []
    for deltas in np.split(losses.deltas, len(kinds)):
        intervals = mean_intervals(deltas, losses.tokens, seed=reading.seed)
        costs.append(
            {
                name: HeadCost(i.value, i.low, i.high, tuple(map(str, some)))
                for name, i, some in zip(ablated, intervals, heads, strict=True)
            }
        )
    rows = losses.deltas if len(documents) > 1 else ()
    p_values = [student_p(row, losses.tokens) for row in rows]
    return costs[0], costs[1], dict(zip(ablated, p_values, strict=False))


def _first_order(reading: _Reading, exact: Mapping[str, HeadCost]) -> FirstOrder | None:
    """The one-backward estimate, and its rank correlation with the exact costs of single heads."""
    model = reading.loaded.model
    if is_packed(model):
        return None  # packed kernels may pass no gradient on, without a word
    if stored_weights(model) is not None:
        return None  # a backward pass would read the model twice for every text
    # one text at a time: the backward pass keeps every activation
    estimate = first_order_importance(model, reading.documents, batch_size=1)
    singles = [Head.parse(name) for name in exact if not name.startswith(JOINT)]
    costs = np.array([exact[str(head)].value for head in singles])
    rows = attention_layers(model)
    guesses = np.array([estimate[rows.index(head.layer), head.index] for head in singles])
    if len(singles) < 3 or costs.std() == 0 or guesses.std() == 0:
        return FirstOrder(estimate, None)
    from scipy.stats import spearmanr

    return FirstOrder(estimate, float(spearmanr(costs, guesses).statistic))
