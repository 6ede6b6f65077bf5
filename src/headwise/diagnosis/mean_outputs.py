"""The mean output of every head, for mean ablation and mean compensation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.tap import Sight, tapped
from headwise.heads import Head
from headwise.models.architectures import backbone_of, device_of, geometry_of
from headwise.texts.batches import Batch


def measure_means(
    model: PreTrainedModel, batches: Iterable[Batch]
) -> Float[Tensor, "layer head value"]:
    """The mean output of every head over all real tokens, in float32.

    Rows are the layers with attention; where layers differ in width the rest is 0.
    """
    geometry = geometry_of(model)
    widest = max(geometry_of(model, layer).head_dim for layer in geometry.layers)
    sums = torch.zeros(geometry.num_layers, geometry.num_heads, widest, dtype=torch.float64)
    count = 0
    device = device_of(model)
    for batch in batches:
        real = torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]
        real = real.to(device)

        def read(sight: Sight, real: Tensor = real) -> None:
            out = torch.where(real[:, None, :, None], sight.out.float(), 0.0)
            row = geometry.layers.index(sight.layer)
            sums[row, :, : out.shape[-1]] += out.sum((0, 2)).double().cpu()

        with torch.inference_mode(), tapped(model, read):
            backbone_of(model)(input_ids=batch.ids.to(device), use_cache=False)
        count += int(batch.lengths.sum())
    return (sums / max(count, 1)).float()


def head_mean(
    model: PreTrainedModel, means: Float[Tensor, "layer head value"], head: Head
) -> Float[Tensor, "value"]:
    """One head's mean output, in its own width."""
    geometry = geometry_of(model, head.layer)
    return means[geometry.layers.index(head.layer), head.index, : geometry.head_dim]
