"""What a run looks at while it trains: the head map and the loss on validation blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.attention import mass_at
from headwise.forward.hooked_pass import HookedPass
from headwise.forward.losses import shifted_targets
from headwise.forward.measurements import run_passes
from headwise.forward.tap import LayerAttention
from headwise.models.architectures import geometry_of
from headwise.surgery.run_state import MassMap
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus

_PROBE_BLOCKS = 4


def first_token_map(model: PreTrainedModel, corpus: Corpus) -> MassMap:
    """First-token mass of every head on the probe: the first validation blocks of the corpus."""
    geometry = geometry_of(model)
    sums = torch.zeros(geometry.num_layers, geometry.num_heads, dtype=torch.float64)
    blocks = (corpus.validation or corpus.train)[:_PROBE_BLOCKS]

    def observe(number: int, attention: LayerAttention) -> Float[Tensor, "head"]:
        return _row_masses(blocks[number].lengths, attention)

    def take(_: int, layer: int | None, masses: Tensor) -> None:
        assert layer is not None
        sums[geometry.layers.index(layer)] += masses

    run_passes(model, [HookedPass([block.ids for block in blocks], take, observe=observe)])
    means: MassMap = (sums / sum(len(block.lengths) for block in blocks)).tolist()
    return means


def _row_masses(lengths: Int[Tensor, "row"], attention: LayerAttention) -> Float[Tensor, "head"]:
    """The sum over rows of each row's own mean over its real queries."""
    mass = mass_at(attention.scores, attention.lse, None)
    real = torch.arange(mass.shape[2], device=mass.device)[None] < lengths[:, None].to(mass.device)
    means = (mass * real[:, None]).sum(2) / real.sum(1)[:, None]
    return means.sum(0).double().cpu()


def mean_loss(model: PreTrainedModel, blocks: Sequence[Batch]) -> float:
    """Mean loss in nats over the predicted tokens of blocks."""
    sums: list[float] = []

    def take(_: int, __: int | None, losses: Float[Tensor, "text position"]) -> None:
        sums.append(float(losses.double().sum()))

    targets = [shifted_targets(block.ids, block.lengths) for block in blocks]
    run_passes(model, [HookedPass([block.ids for block in blocks], take, targets=targets)])
    return sum(sums) / max(sum(int((block.lengths - 1).sum()) for block in blocks), 1)
