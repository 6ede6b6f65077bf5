"""What a head is worth: how held-out loss changes when its output is removed.

Exact: the model runs once and what every attention module gave is kept; an ablation corrects that
by the head's own share and re-runs only what comes after it, several ablations in one batch. Zero
ablation removes the output, mean ablation replaces it by its mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.diagnosis.mean_outputs import head_mean
from headwise.forward.partial_run import RecordedCall
from headwise.forward.replaced_outputs import (
    BasePass,
    Losses,
    Replaced,
    base_pass,
    correctable,
    corrected_attention,
    losses_from,
    stack_size,
)
from headwise.forward.replacements import Variant, variant_losses
from headwise.forward.tap import LayerAttention, Reader, tapped
from headwise.heads import Head
from headwise.intervals import Interval, mean_intervals
from headwise.models.architectures import attention_layers
from headwise.models.stored_weights import stored_weights
from headwise.progress import Progress, silent, told
from headwise.proof.evaluation import HeadCost
from headwise.ranks import shared_out
from headwise.texts.batches import Batch, batches

Replacement = Literal["zero", "mean"]


@dataclass(frozen=True)
class Ablation:
    """Change of summed loss of every document for every ablated set of heads."""

    sets: tuple[tuple[Head, ...], ...]
    replacement: Replacement
    base: Losses = field(repr=False)
    deltas: Float[np.ndarray, "set document"] = field(repr=False)
    tokens: Int[np.ndarray, "document"] = field(repr=False)

    def intervals(self, seed: int = 0) -> list[Interval]:
        """Mean change of loss per token, one interval per set; positive: the heads were useful."""
        return mean_intervals(self.deltas, self.tokens, seed=seed)

    def costs(self, labels: Sequence[str], seed: int = 0) -> dict[str, HeadCost]:
        """The intervals by name, as `evaluation.json` holds them."""
        found = zip(labels, self.intervals(seed), self.sets, strict=True)
        return {
            label: HeadCost(i.value, i.low, i.high, tuple(str(head) for head in heads))
            for label, i, heads in found
        }


def ablate_heads(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    sets: Sequence[Sequence[Head]],
    *,
    replacement: Replacement = "zero",
    means: Float[Tensor, "layer head value"] | None = None,
    batch_size: int = 1,
    stack: int | None = None,
    progress: Progress = silent,
) -> Ablation:
    """Exact change of loss for each set of heads; `means` is needed for mean ablation.

    `stack` ablations of `batch_size` texts run as one batch; by default one text (nothing is
    padding then) and as many ablations as fill `replaced_outputs.TOKENS` tokens.
    """
    chosen = tuple(tuple(sorted(s)) for s in sets)
    if chosen and stored_weights(model) is not None:
        value = _replacements(model, replacement, means)
        return _streamed_ablation(model, encoded, chosen, replacement, value, batch_size, progress)
    base = np.zeros(len(encoded))
    deltas = np.zeros((len(chosen), len(encoded)))
    tokens = np.array([len(ids) - 1 for ids in encoded])
    value = _replacements(model, replacement, means)
    work = list(batches(encoded, batch_size)) if chosen else []

    def ablated(batch: Batch) -> tuple[Losses, Float[np.ndarray, "set document"]]:
        with torch.inference_mode():
            passed = base_pass(model, batch.ids, batch.lengths)
            changes = np.zeros((len(chosen), len(passed.losses)))
            for group in _groups(chosen, stack or stack_size(passed)):
                found = _ablated_losses(model, passed, [chosen[i] for i in group], value)
                changes[group] = found - passed.losses
        return passed.losses, changes

    passes = told(shared_out(ablated, work), len(work), "ablating heads", progress)
    for batch, (losses, changes) in passes:
        base[list(batch.index)] = losses
        deltas[:, list(batch.index)] = changes
    return Ablation(chosen, replacement, base, deltas, tokens)


def _streamed_ablation(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    sets: tuple[tuple[Head, ...], ...],
    replacement: Replacement,
    value: Callable[[Head], Tensor | None],
    batch_size: int,
    progress: Progress,
) -> Ablation:
    """The same of a model on disk: all sets and texts go through one layer before the next."""
    work = list(batches(encoded, batch_size))

    def give(attention: LayerAttention, _: RecordedCall) -> dict[str, Tensor]:
        out = torch.zeros_like(attention.out)
        for index in range(out.shape[1]):
            replaced = value(Head(attention.layer, index))
            if replaced is not None:
                out[:, index] = replaced.to(out)
        return {replacement: out}

    found = variant_losses(
        model,
        [(batch.ids, batch.lengths) for batch in work],
        [Variant(heads, replacement) for heads in sets],
        give,
        title="ablating heads",
        progress=progress,
    )
    texts = np.argsort([text for batch in work for text in batch.index])
    deltas = (found.changed - found.base)[:, texts]
    tokens = np.array([len(ids) - 1 for ids in encoded])
    return Ablation(sets, replacement, found.base[texts], deltas, tokens)


def _groups(sets: tuple[tuple[Head, ...], ...], stack: int) -> list[list[int]]:
    """Sets with the same lowest layer, one head there or several; at most `stack` in a batch."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for index, heads in enumerate(sets):
        alike.setdefault((heads[0].layer, _one_lowest(heads)), []).append(index)
    return [
        found[start : start + stack]
        for _, found in sorted(alike.items())
        for start in range(0, len(found), stack)
    ]


def _one_lowest(heads: tuple[Head, ...]) -> bool:
    """Whether one head's share can be subtracted: of several heads too little might remain."""
    return len(heads) == 1 or heads[1].layer > heads[0].layer


def _ablated_losses(
    model: PreTrainedModel,
    passed: BasePass,
    sets: list[tuple[Head, ...]],
    value: Callable[[Head], Tensor | None],
) -> Float[np.ndarray, "set document"]:
    """Several ablations with one lowest layer at once, stacked along the batch.

    With one head in the lowest layer the attention there is not run again: it is the same in all
    copies but for that head's share.
    """
    lowest, texts = sets[0][0].layer, len(passed.lengths)
    one = _one_lowest(sets[0]) and correctable(model)
    with ExitStack() as stack:
        if not one or lowest < attention_layers(model)[-1]:  # else the tap would see nothing
            stack.enter_context(tapped(model, _ablating(sets, texts, value)))
        if one:
            replaced = [Replaced(head, _gives(passed, head, value(head))) for head, *_ in sets]
            stack.enter_context(corrected_attention(model, passed, replaced))
        return losses_from(model, passed, lowest, len(sets))


def _gives(passed: BasePass, head: Head, replaced: Tensor | None) -> Tensor:
    """What an ablated head gives for every token."""
    own = passed.heads[head.layer][:, head.index]
    return torch.zeros_like(own) if replaced is None else replaced.to(own).expand_as(own)


def _ablating(
    sets: list[tuple[Head, ...]], texts: int, value: Callable[[Head], Tensor | None]
) -> Reader:
    """A reader that removes set i's heads from the i-th copy of the texts."""

    def read(attention: LayerAttention) -> Tensor | None:
        here = [
            (copy, head)
            for copy, heads in enumerate(sets)
            for head in heads
            if head.layer == attention.layer
        ]
        if not here:
            return None
        out = attention.out.clone()
        for copy, head in here:
            replaced = value(head)
            rows = slice(copy * texts, (copy + 1) * texts)
            out[rows, head.index] = 0 if replaced is None else replaced.to(out)
        return out

    return read


def _replacements(
    model: PreTrainedModel, replacement: Replacement, means: Tensor | None
) -> Callable[[Head], Tensor | None]:
    if replacement == "zero":
        return lambda head: None
    if means is None:
        raise ValueError("mean ablation needs the heads' mean outputs: measure_means()")
    return lambda head: head_mean(model, means, head)
