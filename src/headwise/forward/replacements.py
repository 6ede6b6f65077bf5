"""Losses of a streamed model with some heads giving something else, layer by layer.

Every variant (some heads, and what is done to them) has hidden states of its own from its lowest
layer on. As many variants as fit into memory go up together, so the model is read once for each
such sweep, from its lowest layer on, and not once for each head and text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.layer_by_layer import (
    embedding_by_rows,
    first_state,
    layer_at_hand,
    require_faithful,
    through,
)
from headwise.forward.losses import shifted_targets, stored_losses
from headwise.forward.partial_run import RecordedCall, after_layers, attention_calls
from headwise.forward.replaced_outputs import TOKENS
from headwise.forward.tap import LayerAttention, Reader
from headwise.heads import Head
from headwise.models.architectures import layers_of
from headwise.models.loading import free_memory
from headwise.progress import Progress, silent

Texts = tuple[Tensor, Tensor]  # ids (text, position) and the texts' lengths
Outs = Mapping[str, Tensor]  # by kind, (text, head, query, value)
Give = Callable[
    [LayerAttention, RecordedCall], Outs
]  # what heads give instead, in one layer of one batch
_SHARE = 0.25  # of free memory that the variants' hidden states may take


@dataclass(frozen=True)
class Variant:
    """Heads, lowest layer first, and the kind of thing that they give instead."""

    heads: tuple[Head, ...]
    kind: str

    def there(self, layer: int) -> list[Head]:
        """Those of one layer."""
        return [head for head in self.heads if head.layer == layer]


@dataclass(frozen=True)
class _Start:
    """The undisturbed model's hidden states where a sweep begins."""

    layer: int
    states: list[Tensor] = field(repr=False)


@dataclass(frozen=True)
class VariantLosses:
    """Summed losses of all texts in the order of the batches: undisturbed, and of each variant."""

    base: Float[np.ndarray, "document"] = field(repr=False)
    changed: Float[np.ndarray, "variant document"] = field(repr=False)
    sweeps: int


@torch.inference_mode()
def variant_losses(
    model: PreTrainedModel,
    work: Sequence[Texts],
    variants: Sequence[Variant],
    give: Give,
    *,
    room: int | None = None,
    title: str = "",
    progress: Progress = silent,
) -> VariantLosses:
    """Losses with each variant; their hidden states take at most `room` bytes at a time."""
    order = sorted(range(len(variants)), key=lambda v: variants[v].heads[0].layer)
    with embedding_by_rows(model):
        start = _Start(0, [first_state(model, ids) for ids, _ in work])
        most = _together(start.states, room)
        groups = [order[at : at + most] for at in range(0, len(order), most)] or [[]]
        found = np.zeros((len(variants), sum(len(lengths) for _, lengths in work)))
        base = found[:0].sum(0)
        for number, group in enumerate(groups):
            after = groups[number + 1][:1] if number + 1 < len(groups) else []
            keep = variants[after[0]].heads[0].layer if after else None
            name = title if len(groups) == 1 else f"{title}, reading {number + 1} of {len(groups)}"
            sweep = _Sweep(model, work, [variants[v] for v in group], give)
            start, losses = sweep.run(start, keep, name, progress)
            base, found[group] = losses[0], losses[1:]
    return VariantLosses(base, found, len(groups))


def _together(states: Sequence[Tensor], room: int | None) -> int:
    """How many variants go up at once."""
    each = sum(one.numel() * one.element_size() for one in states)
    return max(1, int((_SHARE * free_memory() if room is None else room) // max(each, 1)))


@dataclass(frozen=True)
class _Sweep:
    """Some variants on their way up, beside the undisturbed model."""

    model: PreTrainedModel
    work: Sequence[Texts]
    variants: list[Variant]
    give: Give
    states: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def run(
        self, start: _Start, keep: int | None, title: str, progress: Progress
    ) -> tuple[_Start, Float[np.ndarray, "row document"]]:
        """Where the next sweep begins, and losses: the undisturbed model's, then the variants'."""
        base, following = list(start.states), start
        count = len(layers_of(self.model))
        progress(title, start.layer, count, "layers")
        for layer in range(start.layer, count):
            if layer == keep:
                following = _Start(layer, list(base))
            with layer_at_hand(self.model, layer):
                require_faithful(self.model, layer, self.work[0][0], base[0])
                for number in range(len(self.work)):
                    base[number] = self._layer(layer, number, base[number])
            progress(title, layer + 1, count, "layers")
        return following, self._losses(base)

    def _layer(self, layer: int, number: int, base: Tensor) -> Tensor:
        """One layer of one batch: undisturbed, then every variant that has begun."""
        ids = self.work[number][0]
        begun = [v for v, one in enumerate(self.variants) if one.heads[0].layer <= layer]
        before = {v: self.states.get((v, number), base) for v in begun}
        wanted = any(self.variants[v].there(layer) for v in begun)
        after, outs = self._undisturbed(layer, ids, base, wanted)
        for some in _stacks(begun, max(1, TOKENS // ids.numel())):
            stacked = torch.cat([before[v] for v in some], -3)  # gemma3n: streams come before
            reader = _replacing([self.variants[v] for v in some], layer, outs)
            found = through(self.model, ids.repeat(len(some), 1), layer, stacked, reader)
            for v, one in zip(some, found.chunk(len(some), -3), strict=True):
                self.states[v, number] = one
        return after

    def _undisturbed(
        self, layer: int, ids: Tensor, hidden: Tensor, wanted: bool
    ) -> tuple[Tensor, Outs]:
        seen: list[LayerAttention] = []
        with attention_calls(self.model) as calls:
            after = through(self.model, ids, layer, hidden, seen.append)
        return after, self.give(seen[0], calls[layer]) if wanted else {}

    def _losses(self, base: list[Tensor]) -> Float[np.ndarray, "row document"]:
        rows = [base, *(self._states_of(v) for v in range(len(self.variants)))]
        lasts, targets = [], []
        for row in rows:
            for (ids, lengths), state in zip(self.work, row, strict=True):
                lasts.append(after_layers(self.model, ids, state))
                targets.append(shifted_targets(ids, lengths))
        self.states.clear()
        sums = [one.double().sum(1) for one in stored_losses(self.model, lasts, targets)]
        found: np.ndarray = torch.cat(sums).view(len(rows), -1).numpy()
        return found

    def _states_of(self, variant: int) -> list[Tensor]:
        return [self.states[variant, number] for number in range(len(self.work))]


def _stacks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))


def _replacing(variants: Sequence[Variant], layer: int, outs: Outs) -> Reader:
    """A reader that puts variant i's outputs into the i-th copy of the texts."""

    def read(attention: LayerAttention) -> Tensor | None:
        here = [(copy, one) for copy, one in enumerate(variants) if one.there(layer)]
        if not here:
            return None
        out = attention.out.clone()
        texts = len(out) // len(variants)
        for copy, one in here:
            for head in one.there(layer):
                rows = slice(copy * texts, (copy + 1) * texts)
                out[rows, head.index] = outs[one.kind][:, head.index].to(out)
        return out

    return read
