"""Losses of variants of a model on disk: all texts and variants pass one layer before the next.

Every variant has hidden states of its own from its lowest layer on. As many variants as fit into
memory go up together, so the model is read once for each such sweep, from its lowest layer on, and
not once for each head and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import HeadOutputs, Intervention, Variant, substitute
from headwise.forward.layer_by_layer import (
    embedding_by_rows,
    first_state,
    layer_at_hand,
    require_faithful,
    through,
)
from headwise.forward.losses import shifted_targets, stored_losses
from headwise.forward.partial_run import RecordedCall, after_layers, attention_calls
from headwise.forward.tap import LayerAttention
from headwise.models.architectures import layers_of
from headwise.models.loading import free_memory
from headwise.progress import Progress, silent
from headwise.texts.batches import Batch

TOKENS = 2048  # of variants that run as one batch: enough for the GEMMs, few enough for the caches
_SHARE = 0.25  # of free memory that the variants' hidden states may take


@dataclass(frozen=True)
class _Start:
    """The hidden states of the model as it is where a sweep begins."""

    layer: int
    states: list[Tensor] = field(repr=False)


@torch.inference_mode()
def sweep_variants(
    model: PreTrainedModel,
    work: Sequence[Batch],
    variants: Sequence[Variant],
    *,
    room: int | None = None,
    title: str = "",
    progress: Progress = silent,
) -> Float[np.ndarray, "row document"]:
    """Summed losses in the order of the batches: of the model as it is, then of each variant."""
    order = sorted(range(len(variants)), key=lambda v: variants[v].lowest)
    with embedding_by_rows(model):
        start = _Start(0, [first_state(model, batch.ids) for batch in work])
        each = sum(state.numel() * state.element_size() for state in start.states)
        most = max(1, int((_SHARE * free_memory() if room is None else room) // max(each, 1)))
        groups = [order[at : at + most] for at in range(0, len(order), most)]
        losses = np.zeros((1 + len(variants), sum(len(batch.lengths) for batch in work)))
        for number, group in enumerate(groups):
            following = groups[number + 1][0] if number + 1 < len(groups) else None
            keep = None if following is None else variants[following].lowest
            name = title if len(groups) == 1 else f"{title}, reading {number + 1} of {len(groups)}"
            sweep = _Sweep(model, work, [variants[v] for v in group])
            start, rows = sweep.run(start, keep, name, progress)
            losses[[0, *(1 + v for v in group)]] = rows
    return losses


@dataclass(frozen=True)
class _Sweep:
    """Some variants on their way up, beside the model as it is."""

    model: PreTrainedModel
    work: Sequence[Batch]
    variants: list[Variant]
    states: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def run(
        self, start: _Start, keep: int | None, title: str, progress: Progress
    ) -> tuple[_Start, Float[np.ndarray, "row document"]]:
        """Where the next sweep begins, and losses: of the model as it is, then of the variants."""
        base, following = list(start.states), start
        count = len(layers_of(self.model))
        progress(title, start.layer, count, "layers")
        for layer in range(start.layer, count):
            if layer == keep:
                following = _Start(layer, list(base))
            with layer_at_hand(self.model, layer):
                require_faithful(self.model, layer, self.work[0].ids, base[0])
                for number in range(len(self.work)):
                    base[number] = self._layer(layer, number, base[number])
            progress(title, layer + 1, count, "layers")
        return following, self._losses(base)

    def _layer(self, layer: int, number: int, base: Tensor) -> Tensor:
        """One layer of one batch: the model as it is, then every variant that has begun."""
        ids = self.work[number].ids
        begun = [v for v, one in enumerate(self.variants) if one.lowest <= layer]
        before = {v: self.states.get((v, number), base) for v in begun}
        after, known = self._base(layer, ids, base)
        size = max(1, TOKENS // ids.numel())
        for some in (begun[at : at + size] for at in range(0, len(begun), size)):
            stacked = torch.cat([before[v] for v in some], -3)  # gemma3n: streams come before
            variants = [self.variants[v] for v in some]
            with attention_calls(self.model, (layer,)) as calls:

                def read(
                    attention: LayerAttention,
                    variants: list[Variant] = variants,
                    calls: dict[int, RecordedCall] = calls,
                ) -> Tensor | None:
                    return substitute(variants, attention, calls[layer], known)

                state = through(self.model, ids.repeat(len(some), 1), layer, stacked, read)
            for v, one in zip(some, state.chunk(len(some), -3), strict=True):
                self.states[v, number] = one
        return after

    def _base(
        self, layer: int, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, dict[Intervention, HeadOutputs]]:
        """The layer of the model as it is, and what heads of variants that begin here give."""
        seen: list[LayerAttention] = []
        with attention_calls(self.model, (layer,)) as calls:
            after = through(self.model, ids, layer, hidden, seen.append)
        kinds = {one.intervention: None for one in self.variants if one.lowest == layer}
        return after, {kind: kind.outputs(seen[0], calls[layer]) for kind in kinds}

    def _losses(self, base: list[Tensor]) -> Float[np.ndarray, "row document"]:
        numbers = range(len(self.work))
        changed = [[self.states[v, n] for n in numbers] for v in range(len(self.variants))]
        rows = [base, *changed]
        lasts, targets = [], []
        for row in rows:
            for batch, state in zip(self.work, row, strict=True):
                lasts.append(after_layers(self.model, batch.ids, state))
                targets.append(shifted_targets(batch.ids, batch.lengths))
        self.states.clear()
        sums = [one.double().sum(1) for one in stored_losses(self.model, lasts, targets)]
        losses: np.ndarray = torch.cat(sums).view(len(rows), -1).numpy()
        return losses
