"""Evaluation: perplexities with intervals, what every head is worth, and dormant neurons.

One artefact for one condition (a model, perhaps with patches). It keeps the loss of every document,
so that `compare` can pair two conditions document by document, and the heads' classes and ablation
costs, so that functional recovery can be told: not sick *and* useful with 95% confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.artefacts import versions
from headwise.bundled import DATA
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.dormancy import activation_dormancy, weight_dormancy
from headwise.diagnosis.mean_outputs import measure_means
from headwise.diagnosis.values import Diagnosis
from headwise.errors import TextError
from headwise.heads import Head, all_heads, select_heads
from headwise.models.architectures import geometry_of
from headwise.models.description import describe_model
from headwise.progress import Progress, silent
from headwise.proof.ablation import Ablation, ablate_heads, ablation_json, first_order_importance
from headwise.proof.evaluation import Evaluation
from headwise.proof.perplexity import TextLosses, text_losses
from headwise.surgery.plan import plans_of
from headwise.texts.batches import batches, encode_texts
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
    patches: Sequence[Mapping[str, Any]] = (),
    base: Mapping[str, Any] | None = None,
    ablated: Sequence[Head] | None = None,
    joint: Mapping[str, Sequence[Head]] | None = None,
    window: int = 512,
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
    encoded = encode_texts(tokenizer, judged.texts, max_length=window)
    losses = _losses(model, tokenizer, text_sets, window, batch_size, progress)
    settings = {"window": window, "max_texts": max_texts, "seed": seed}
    diagnosis = diagnose(
        model,
        tokenizer,
        judged,
        name=name,
        max_length=window,
        batch_size=batch_size,
        progress=progress,
    )
    heads = _heads_body(model, encoded, ablated, joint or {}, batch_size, progress, seed)
    return Evaluation(
        {
            "model": dict(base or describe_model(model, name)),
            "patches": [dict(patch) for patch in patches],
            "text_sets": {key: value.to_json(seed) for key, value in losses.items()},
            "diagnosis": diagnosis.to_json(),
            "heads": heads,
            "recovery": _recovery(diagnosis, heads, patches),
            "mlp_dormancy": {
                "weights": weight_dormancy(model),
                "activations": activation_dormancy(model, batches(encoded, batch_size)),
                "note": "the weight rule cannot change when only attention is trained",
            },
            "provenance": {"versions": versions(), "settings": settings},
        }
    )


def _losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_sets: Sequence[TextSet],
    window: int,
    batch_size: int,
    progress: Progress,
) -> dict[str, TextLosses]:
    """Losses of every set; a text that stands in several sets is scored once."""
    every = TextSet("all", tuple(dict.fromkeys(t for texts in text_sets for t in texts.texts)))
    found = text_losses(
        model, tokenizer, every, window=window, batch_size=batch_size, progress=progress
    )
    place = {text: number for number, text in enumerate(every.texts)}
    rows = {texts.name: [place[text] for text in texts.texts] for texts in text_sets}
    return {
        texts.name: TextLosses(texts, found.sums[rows[texts.name]], found.tokens[rows[texts.name]])
        for texts in text_sets
    }


def chosen_heads(
    model: PreTrainedModel, selection: str | None, patches: Sequence[Mapping[str, Any]]
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


def operated_heads(patches: Sequence[Mapping[str, Any]]) -> list[Head]:
    """The targets of all plans in a list of patch descriptions."""
    return sorted({head for plan in plans_of(patches) for head in plan.target_heads})


def _heads_body(
    model: PreTrainedModel,
    encoded: list[list[int]],
    ablated: Sequence[Head] | None,
    joint: Mapping[str, Sequence[Head]],
    batch_size: int,
    progress: Progress,
    seed: int,
) -> dict[str, Any]:
    """Single, joint and first-order ablation costs; mean loss in nats per token."""
    geometry = geometry_of(model)
    every = all_heads(geometry.num_layers, geometry.num_heads)
    singles = list(every if ablated is None else ablated)
    named = {key: list(heads) for key, heads in joint.items() if heads}
    sets = [[head] for head in singles] + list(named.values())
    labels = [str(head) for head in singles] + [f"joint:{key}" for key in named]
    means = measure_means(model, batches(encoded, batch_size))
    body: dict[str, Any] = {"documents": len(encoded)}
    for replacement in ("zero", "mean"):
        found = ablate_heads(
            model, encoded, sets, replacement=replacement, means=means, progress=progress
        )
        body[f"ablation_{replacement}"] = ablation_json(found, labels, seed)
        if replacement == "zero":
            body["first_order"] = _first_order(model, encoded, found, singles, batch_size)
    return body


def _first_order(
    model: PreTrainedModel,
    encoded: list[list[int]],
    exact: Ablation,
    singles: Sequence[Head],
    batch_size: int,
) -> dict[str, Any]:
    """The one-backward estimate of all heads, and how well it agrees with the exact costs."""
    estimate = first_order_importance(model, encoded, batch_size=batch_size)
    body: dict[str, Any] = {"map": estimate.tolist(), "spearman_with_exact": None}
    if len(singles) >= 3:
        from scipy.stats import spearmanr

        costs = exact.deltas[: len(singles)].sum(1) / exact.tokens.sum()
        guesses = np.array([estimate[head.layer, head.index] for head in singles])
        if costs.std() > 0 and guesses.std() > 0:
            body["spearman_with_exact"] = float(spearmanr(costs, guesses).statistic)
    return body


def _recovery(
    diagnosis: Diagnosis, heads: Mapping[str, Any], patches: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Functional recovery of the operated heads: not sick, and its zero ablation costs > 0."""
    targets = operated_heads(patches)
    if not targets:
        return None
    rows = {}
    for head in targets:
        label = diagnosis.classes[head.layer][head.index]
        cost = heads["ablation_zero"].get(str(head))
        judged = cost is not None and heads["documents"] > 1  # one document has no interval
        useful = bool(cost["low"] > 0) if judged else None
        rows[str(head)] = {
            "class": label,
            "sick": label in ("dead", "sink"),
            "useful": useful,
            "functional": bool(useful) and label not in ("dead", "sink"),
        }
    return {
        "heads": rows,
        "operated": len(rows),
        "not_sick": sum(not row["sick"] for row in rows.values()),
        "judged": sum(row["useful"] is not None for row in rows.values()),
        "functional": sum(row["functional"] for row in rows.values()),
        "exceptions": [name for name, row in rows.items() if not row["functional"]],
        "rule": "not sick, and zero ablation raises held-out loss with 95% confidence",
    }
