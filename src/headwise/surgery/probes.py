"""What a run looks at while it trains: the head map and the loss on validation blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.attention import mass_at
from headwise.forward.losses import shifted_targets, token_losses
from headwise.forward.tap import Sight, tapped
from headwise.models.architectures import backbone_of, device_of, geometry_of
from headwise.surgery.run_state import MassMap
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus

_PROBE_BLOCKS = 4


def first_token_map(model: PreTrainedModel, corpus: Corpus) -> MassMap:
    """First-token mass of every head on the probe: the first validation blocks of the corpus."""
    geometry = geometry_of(model)
    sums = torch.zeros(geometry.num_layers, geometry.num_heads, dtype=torch.float64)
    blocks = (corpus.validation or corpus.train)[:_PROBE_BLOCKS]
    with torch.inference_mode():
        for block in blocks:
            with tapped(model, partial(_add_mass, geometry.layers, sums, block.lengths)):
                backbone_of(model)(input_ids=block.ids.to(device_of(model)), use_cache=False)
    means: MassMap = (sums / sum(len(block.lengths) for block in blocks)).tolist()
    return means


def _add_mass(layers: tuple[int, ...], sums: Tensor, lengths: Tensor, sight: Sight) -> None:
    """Add each row's own mean over its real queries."""
    mass = mass_at(sight.scores, sight.lse, None)
    real = torch.arange(mass.shape[2], device=mass.device)[None] < lengths[:, None].to(mass.device)
    means = (mass * real[:, None]).sum(2) / real.sum(1)[:, None]
    sums[layers.index(sight.layer)] += means.sum(0).double().cpu()


def mean_loss(model: PreTrainedModel, blocks: Sequence[Batch]) -> float:
    """Mean loss in nats over the predicted tokens of blocks."""
    total, tokens = 0.0, 0
    with torch.inference_mode(), tapped(model):
        for block in blocks:
            ids = block.ids.to(device_of(model))
            hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            losses = token_losses(model, hidden, shifted_targets(ids, block.lengths))
            total += float(losses.double().sum())
            tokens += int((block.lengths - 1).sum())
    return total / max(tokens, 1)
