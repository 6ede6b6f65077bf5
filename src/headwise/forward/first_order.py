"""First-order estimates: the slope of the loss by what a head gives, from one backward pass a text.

The slope times the change of a head's output, summed over tokens, estimates what that change costs
(Michel et al. 2019 for taking a head away; attribution patching for any other change).
Estimates only order the work: what is decided about a head rests on exact costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import HeadOutputs, Intervention
from headwise.forward.losses import shifted_targets, summed_loss
from headwise.forward.replaced_forward import checkpointed, frozen
from headwise.forward.tap import LayerAttention, tapped
from headwise.forward.variant_losses import base_pass
from headwise.heads import Head
from headwise.models.architectures import attention_layers, backbone_of, device_of, geometry_of
from headwise.progress import Progress, silent, track
from headwise.ranks import shared_out
from headwise.texts.batches import Batch, batches


def first_order_importance(
    model: PreTrainedModel, encoded: Sequence[Sequence[int]], *, batch_size: int = 4
) -> Float[np.ndarray, "layer head"]:
    """Estimated change of mean loss without a head: -E[o . dL/do]."""
    geometry = geometry_of(model)
    estimate = torch.zeros(geometry.num_layers, geometry.num_heads, dtype=torch.float64)
    tokens = sum(len(ids) - 1 for ids in encoded)
    numbers = attention_layers(model)
    with frozen(model):
        work = list(batches(encoded, batch_size, model=model))
        for _, slopes in shared_out(partial(head_slopes, model), work):
            for layer, (out, slope) in slopes.items():
                products = out.double() * slope.double()
                estimate[numbers.index(layer)] -= products.sum((0, 2, 3)).cpu()
    return (estimate / tokens).numpy()


def head_slopes(model: PreTrainedModel, batch: Batch) -> dict[int, tuple[HeadOutputs, HeadOutputs]]:
    """What each layer's heads gave, and the slope of the batch's summed loss by it.

    Activations are recomputed layer by layer: kept, they would be the peak of an evaluation.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def lean(attention: LayerAttention) -> Tensor:
        if attention.layer not in seen:  # a recomputed layer must meet its first leaf again
            leaf = torch.zeros_like(attention.out, requires_grad=True)
            seen[attention.layer] = (attention.out.detach(), leaf)
        return attention.out + seen[attention.layer][1]

    ids = batch.ids.to(device_of(model))
    with tapped(model, lean), checkpointed(model, 0):
        last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        loss = summed_loss(model, last, shifted_targets(ids, batch.lengths))
        layers = sorted(seen)
        slopes = torch.autograd.grad(loss, [seen[layer][1] for layer in layers])
    return {layer: (seen[layer][0], slope) for layer, slope in zip(layers, slopes, strict=True)}


def first_order_costs(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    interventions: Sequence[Intervention],
    *,
    progress: Progress = silent,
) -> Float[np.ndarray, "head kind document"]:
    """Estimated change of every document's summed loss, in the order of the heads.

    About three forward passes a text for all heads and interventions, instead of half a pass each.
    """
    work, layers = list(batches(encoded, 1)), {head.layer for head in heads}
    costs = np.zeros((len(heads), len(interventions), len(encoded)))

    def estimate(batch: Batch) -> Float[np.ndarray, "head kind document"]:
        with torch.inference_mode():
            base = base_pass(model, batch, layers)
            given = {
                layer: [kind.outputs(attention, base.calls[layer]) for kind in interventions]
                for layer, attention in base.attention.items()
            }
        slopes = head_slopes(model, batch)
        with torch.inference_mode():
            return np.array(
                [
                    [_product(head, slopes[head.layer], outputs) for outputs in given[head.layer]]
                    for head in heads
                ]
            )

    with frozen(model):
        shared = shared_out(estimate, work)
        for batch, rows in track(shared, "first-order estimates", progress, count=len(work)):
            costs[:, :, list(batch.index)] = rows
    return costs


def _product(
    head: Head, at: tuple[HeadOutputs, HeadOutputs], outputs: HeadOutputs
) -> Float[np.ndarray, "document"]:
    """What the change of one head's output costs to first order."""
    out, slope = (part[:, head.index] for part in at)
    products = (outputs[:, head.index] - out).double() * slope.double()
    total: Float[np.ndarray, "document"] = products.sum((1, 2)).cpu().numpy()
    return total
