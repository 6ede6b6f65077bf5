"""How far a model's predictions moved: KL to what the same output head said of other states."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.losses import logits_of

_ROWS = 256  # positions whose logits exist at once


def divergence(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    stock: Float[Tensor, "text position hidden"],
    lengths: Int[Tensor, "text"],
) -> Float[Tensor, ""]:
    """Mean KL(stock || model) in nats per token over the real positions."""
    real = torch.arange(hidden.shape[1])[None] < lengths[:, None]
    now, then = hidden[real.to(hidden.device)], stock[real.to(stock.device)]
    total = torch.zeros((), device=hidden.device)
    for some, kept in zip(now.split(_ROWS), then.split(_ROWS), strict=True):
        wanted = logits_of(model, kept).float().log_softmax(-1)
        found = logits_of(model, some).float().log_softmax(-1)
        total = total + (wanted.exp() * (wanted - found)).sum()
    return total / len(now)
