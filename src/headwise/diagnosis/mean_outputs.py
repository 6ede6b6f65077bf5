"""The mean output of every head, for mean ablation and mean compensation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.tap import Sight, tapped
from headwise.models.architectures import device_of, geometry_of
from headwise.texts.batches import Batch


def measure_means(
    model: PreTrainedModel, batches: Iterable[Batch]
) -> Float[Tensor, "layer head value"]:
    """The mean output of every head over all real tokens, in float32."""
    geometry = geometry_of(model)
    sums = torch.zeros(
        geometry.num_layers, geometry.num_heads, geometry.head_dim, dtype=torch.float64
    )
    count = 0
    device = device_of(model)
    for batch in batches:
        real = torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]
        real = real.to(device)

        def read(sight: Sight, real: Tensor = real) -> None:
            out = torch.where(real[:, None, :, None], sight.out.float(), 0.0)
            sums[sight.layer] += out.sum((0, 2)).double().cpu()

        with torch.inference_mode(), tapped(model, read):
            model.base_model(input_ids=batch.ids.to(device), use_cache=False)
        count += int(batch.lengths.sum())
    return (sums / max(count, 1)).float()
