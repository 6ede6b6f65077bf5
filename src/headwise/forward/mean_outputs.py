"""The mean output of every head, for mean ablation and mean compensation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.hooked_pass import HookedPass
from headwise.forward.measurements import Measurement, run_measurement
from headwise.forward.tap import LayerAttention
from headwise.heads import Head
from headwise.models.architectures import geometry_of
from headwise.texts.batches import Batch


def measure_means(
    model: PreTrainedModel, batches: Iterable[Batch]
) -> Float[Tensor, "layer head value"]:
    """The mean output of every head over all real tokens, in float32.

    Rows are the layers with attention; where layers differ in width the rest is 0.
    """
    return run_measurement(model, means_measurement(model, batches))


def means_measurement(
    model: PreTrainedModel, batches: Iterable[Batch]
) -> Measurement[Float[Tensor, "layer head value"]]:
    """The same as a measurement that may share its passes with others."""
    geometry = geometry_of(model)
    widest = max(geometry_of(model, layer).head_dim for layer in geometry.layers)
    sums = torch.zeros(geometry.num_layers, geometry.num_heads, widest, dtype=torch.float64)
    work = list(batches)

    def add_up(number: int, attention: LayerAttention) -> Float[Tensor, "head value"]:
        ids, lengths = work[number].ids, work[number].lengths
        real = (torch.arange(ids.shape[1])[None] < lengths[:, None]).to(attention.out.device)
        out = torch.where(real[:, None, :, None], attention.out.float(), 0.0)
        return out.sum((0, 2)).double().cpu()

    def take(_: int, layer: int | None, outputs: Tensor) -> None:
        assert layer is not None
        sums[geometry.layers.index(layer), :, : outputs.shape[-1]] += outputs

    yield HookedPass([batch.ids for batch in work], take, observe=add_up)
    count = sum(int(batch.lengths.sum()) for batch in work)
    return (sums / max(count, 1)).float()


def head_mean(
    model: PreTrainedModel, means: Float[Tensor, "layer head value"], head: Head
) -> Float[Tensor, "value"]:
    """One head's mean output, in its own width."""
    geometry = geometry_of(model, head.layer)
    return means[geometry.layers.index(head.layer), head.index, : geometry.head_dim]
