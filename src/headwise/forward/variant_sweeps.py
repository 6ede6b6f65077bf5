"""Losses of variants of a model on disk: all texts and variants pass one layer before the next.

Every variant has hidden states of its own from its lowest layer on. As many variants as fit into
memory go up together, so the model is read once for each such sweep, from its lowest layer on, and
not once for each head and text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import Variant, substitute
from headwise.forward.layer_by_layer import (
    embedding_by_rows,
    first_state,
    layer_at_hand,
    require_faithful,
    through,
)
from headwise.forward.losses import shifted_targets, stored_losses
from headwise.forward.partial_run import Rerun, after_layers, attention_calls
from headwise.forward.tap import LayerAttention
from headwise.models.architectures import layers_of
from headwise.models.loading import free_memory
from headwise.progress import Progress, silent
from headwise.texts.batches import Batch

TOKENS = 2048  # of variants that run as one batch: enough for the GEMMs, few enough for the caches
_SHARE = 0.25  # of free memory that the variants' hidden states may take
_Start = tuple[int, list[Tensor]]  # a layer, and what enters it of each batch of the model as it is


@torch.inference_mode()
def sweep_variants(
    model: PreTrainedModel,
    work: Sequence[Batch],
    variants: Sequence[Variant],
    *,
    title: str = "",
    progress: Progress = silent,
) -> Float[np.ndarray, "row document"]:
    """Summed losses in the order of the batches: of the model as it is, then of each variant."""
    order = sorted(range(len(variants)), key=lambda v: variants[v].lowest)
    count = len(layers_of(model))
    losses = np.zeros((1 + len(variants), sum(len(batch.lengths) for batch in work)))
    with embedding_by_rows(model):
        start: _Start = 0, [first_state(model, batch.ids) for batch in work]
        each = sum(state.numel() * state.element_size() for state in start[1])
        most = max(1, int(_SHARE * free_memory() // max(each, 1)))
        groups = [order[at : at + most] for at in range(0, len(order), most)]
        for number, group in enumerate(groups):
            following = groups[number + 1][0] if number + 1 < len(groups) else None
            keep = None if following is None else variants[following].lowest
            name = title if len(groups) == 1 else f"{title}, reading {number + 1} of {len(groups)}"

            def report(layer: int, name: str = name) -> None:
                progress(name, layer, count, "layers")

            chosen = [variants[v] for v in group]
            start, losses[[0, *(1 + v for v in group)]] = _sweep(
                model, work, chosen, start, keep, report
            )
    return losses


def _sweep(
    model: PreTrainedModel,
    work: Sequence[Batch],
    variants: Sequence[Variant],
    start: _Start,
    keep: int | None,
    report: Callable[[int], None],
) -> tuple[_Start, Float[np.ndarray, "row document"]]:
    """Take some variants up beside the model as it is.

    Returns where the next sweep begins (the layer `keep`), and losses: of the model as it is, then
    of the variants.
    """
    first, base = start[0], list(start[1])
    states: list[dict[int, Tensor]] = [{} for _ in work]  # by variant, once it has begun
    report(first)
    for layer in range(first, len(layers_of(model))):
        if layer == keep:
            start = layer, list(base)
        with layer_at_hand(model, layer):
            require_faithful(model, layer, work[0].ids, base[0])
            for number, batch in enumerate(work):
                base[number] = _one_layer(
                    model, layer, batch.ids, variants, base[number], states[number]
                )
        report(layer + 1)
    rows = [base, *([state.pop(v) for state in states] for v in range(len(variants)))]
    return start, _losses(model, work, rows)


def _one_layer(
    model: PreTrainedModel,
    layer: int,
    ids: Tensor,
    variants: Sequence[Variant],
    base: Tensor,
    states: dict[int, Tensor],
) -> Tensor:
    """One layer of one batch: of the model as it is, then of every variant that has begun."""
    seen: list[LayerAttention] = []
    with attention_calls(model, (layer,)) as calls:
        after = through(model, ids, layer, base, seen.append)
    kinds = {one.intervention: None for one in variants if one.lowest == layer}
    known = {kind: kind.outputs(seen[0], calls[layer]) for kind in kinds}
    begun = [v for v, one in enumerate(variants) if one.lowest <= layer]
    size = max(1, TOKENS // ids.numel())
    for some in (begun[at : at + size] for at in range(0, len(begun), size)):
        stacked = torch.cat([states.get(v, base) for v in some], -3)  # gemma3n: streams come first
        chosen = [variants[v] for v in some]
        with attention_calls(model, (layer,)) as calls:

            def read(
                attention: LayerAttention,
                chosen: list[Variant] = chosen,
                calls: dict[int, Rerun] = calls,
            ) -> Tensor | None:
                return substitute(chosen, attention, calls[layer], known)

            state = through(model, ids.repeat(len(some), 1), layer, stacked, read)
        states.update(zip(some, state.chunk(len(some), -3), strict=True))
    return after


def _losses(
    model: PreTrainedModel, work: Sequence[Batch], rows: Sequence[list[Tensor]]
) -> Float[np.ndarray, "row document"]:
    lasts, targets = [], []
    for row in rows:
        for batch, state in zip(work, row, strict=True):
            lasts.append(after_layers(model, batch.ids, state))
            targets.append(shifted_targets(batch.ids, batch.lengths))
        row.clear()  # frees the memory of the hidden states
    sums = [one.double().sum(1) for one in stored_losses(model, lasts, targets)]
    losses: np.ndarray = torch.cat(sums).view(len(rows), -1).numpy()
    return losses
