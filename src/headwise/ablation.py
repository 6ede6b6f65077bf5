"""What a head is worth: how held-out loss changes when its output is removed.

Exact: the model runs once and the input of every layer is kept; an ablation re-runs only its own
layer and those above, several ablations stacked in one batch. Zero ablation removes the output,
mean ablation replaces it by its mean over tokens. First-order: one backward pass estimates all
heads at once (Michel et al. 2019). Functional recovery is decided by the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.architectures import geometry_of
from headwise.heads import Head
from headwise.losses import shifted_targets, summed_loss, token_losses
from headwise.resampling import Interval, mean_interval, mean_intervals
from headwise.suffix import device_of, layer_inputs, run_from
from headwise.tap import Reader, Sight, tapped
from headwise.terminal import track
from headwise.texts import Batch, batches

Replacement = Literal["zero", "mean"]
Losses = Float[np.ndarray, "document"]


@dataclass(frozen=True)
class Ablation:
    """Change of summed loss of every document for every ablated set of heads."""

    sets: tuple[tuple[Head, ...], ...]
    replacement: Replacement
    base: Losses = field(repr=False)
    deltas: Float[np.ndarray, "set document"] = field(repr=False)
    tokens: Int[np.ndarray, "document"] = field(repr=False)

    def intervals(self, seed: int = 0) -> list[Interval]:
        """Mean change of loss a token, one interval a set; positive: the heads were useful."""
        return mean_intervals(self.deltas, self.tokens, seed=seed)

    def interval(self, index: int, seed: int = 0) -> Interval:
        """The interval of one set."""
        return mean_interval(self.deltas[index], self.tokens, seed=seed)


def ablate_heads(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    sets: Sequence[Sequence[Head]],
    *,
    replacement: Replacement = "zero",
    means: Float[Tensor, "layer head value"] | None = None,
    batch_size: int = 4,
    stack: int = 8,
    quiet: bool = True,
) -> Ablation:
    """Exact change of loss for each set of heads; `means` is needed for mean ablation."""
    chosen = tuple(tuple(sorted(s)) for s in sets)
    base = np.zeros(len(encoded))
    deltas = np.zeros((len(chosen), len(encoded)))
    tokens = np.array([len(ids) - 1 for ids in encoded])
    value = _replacements(replacement, means)
    for batch in track(list(batches(encoded, batch_size)), "ablating heads", quiet=quiet):
        rows = list(batch.index)
        with torch.inference_mode():
            inputs, losses = _base_pass(model, batch)
            base[rows] = losses
            for group in _groups(chosen, stack):
                lowest = chosen[group[0]][0].layer
                found = _ablated_losses(
                    model, batch, inputs[lowest], lowest, [chosen[i] for i in group], value
                )
                deltas[np.ix_(group, rows)] = found - losses
    return Ablation(chosen, replacement, base, deltas, tokens)


def _groups(sets: tuple[tuple[Head, ...], ...], stack: int) -> list[list[int]]:
    """Sets with the same lowest layer, at most `stack` in a batch."""
    by_layer: dict[int, list[int]] = {}
    for index, heads in enumerate(sets):
        by_layer.setdefault(heads[0].layer, []).append(index)
    return [
        found[start : start + stack]
        for _, found in sorted(by_layer.items())
        for start in range(0, len(found), stack)
    ]


def _base_pass(model: PreTrainedModel, batch: Batch) -> tuple[list[Tensor], Losses]:
    ids = batch.ids.to(device_of(model))
    with tapped(model):
        inputs, last = layer_inputs(model, ids)
    return inputs, _document_losses(model, last, ids, batch)


def _document_losses(model: PreTrainedModel, last: Tensor, ids: Tensor, batch: Batch) -> Losses:
    targets = shifted_targets(ids, batch.lengths)
    losses: Losses = token_losses(model, last, targets).double().sum(1).cpu().numpy()
    return losses


def _ablated_losses(
    model: PreTrainedModel,
    batch: Batch,
    start: Tensor,
    lowest: int,
    sets: list[tuple[Head, ...]],
    value: Callable[[Head], Tensor | None],
) -> Float[np.ndarray, "set document"]:
    """Run the layers from `lowest` on for several ablations at once, stacked along the batch."""
    copies, texts = len(sets), len(batch.lengths)
    ids = batch.ids.to(device_of(model)).repeat(copies, 1)
    stacked = Batch(ids, batch.lengths.repeat(copies), batch.index * copies)
    with tapped(model, _ablating(sets, texts, value)):
        last = run_from(model, ids, lowest, start.repeat(copies, 1, 1))
    return _document_losses(model, last, ids, stacked).reshape(copies, texts)


def _ablating(
    sets: list[tuple[Head, ...]], texts: int, value: Callable[[Head], Tensor | None]
) -> Reader:
    """A reader that removes set i's heads from the i-th copy of the texts."""

    def read(sight: Sight) -> Tensor | None:
        here = [
            (copy, head) for copy, heads in enumerate(sets) for head in heads
            if head.layer == sight.layer
        ]  # fmt: skip
        if not here:
            return None
        out = sight.out.clone()
        for copy, head in here:
            replaced = value(head)
            rows = slice(copy * texts, (copy + 1) * texts)
            out[rows, head.index] = 0 if replaced is None else replaced.to(out)
        return out

    return read


def _replacements(
    replacement: Replacement, means: Tensor | None
) -> Callable[[Head], Tensor | None]:
    if replacement == "zero":
        return lambda head: None
    if means is None:
        raise ValueError("mean ablation needs the heads' mean outputs: measure_means()")
    return lambda head: means[head.layer, head.index]


def first_order_importance(
    model: PreTrainedModel, encoded: Sequence[Sequence[int]], *, batch_size: int = 4
) -> Float[np.ndarray, "layer head"]:
    """Estimated change of mean loss without a head: -E[o . dL/do], from one backward pass."""
    geometry = geometry_of(model)
    estimate = torch.zeros(geometry.num_layers, geometry.num_heads, dtype=torch.float64)
    tokens = sum(len(ids) - 1 for ids in encoded)
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    try:
        for batch in batches(encoded, batch_size):
            _add_first_order(model, batch, estimate)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return (estimate / tokens).numpy()


def _add_first_order(model: PreTrainedModel, batch: Batch, estimate: Tensor) -> None:
    gates: dict[int, Tensor] = {}

    def gate(sight: Sight) -> Tensor:
        gates[sight.layer] = torch.ones(
            1, sight.out.shape[1], 1, 1, device=sight.out.device, requires_grad=True
        )
        return sight.out * gates[sight.layer]

    ids = batch.ids.to(device_of(model))
    with tapped(model, gate):
        last = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        loss = summed_loss(model, last, shifted_targets(ids, batch.lengths))
        layers = sorted(gates)
        found = torch.autograd.grad(loss, [gates[layer] for layer in layers])
    for layer, gradient in zip(layers, found, strict=True):
        estimate[layer] -= gradient.flatten().double().cpu()


def ablation_json(ablation: Ablation, labels: Sequence[str]) -> dict[str, Any]:
    """Named rows for `evaluation.json`."""
    return {
        label: {**interval.to_json(), "heads": [str(head) for head in heads]}
        for label, interval, heads in zip(labels, ablation.intervals(), ablation.sets, strict=True)
    }
