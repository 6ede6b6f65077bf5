"""Next-token losses of any family without the T x vocabulary logits existing at once.

One definition for training, perplexity and ablation: the backbone's last hidden states, then the
model's own output head a chunk of positions at a time. The gradient of the hidden states is taken
chunk by chunk in the forward pass, so logits are never kept for the backward one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

IGNORED = -100
_CHUNK_LOGITS = 2**23  # numbers alive at once: 32 MiB in float32


def shifted_targets(
    ids: Int[Tensor, "text position"], lengths: Int[Tensor, "text"]
) -> Int[Tensor, "text position"]:
    """What each position must predict; the last real token and padding predict nothing."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    position = torch.arange(ids.shape[1], device=ids.device)
    return targets.masked_fill(position[None] >= (lengths.to(ids.device) - 1)[:, None], IGNORED)


def logits_of(model: PreTrainedModel, hidden: Float[Tensor, "... hidden"]) -> Tensor:
    """The model's own output head: projection, then the scaling or cap of its family."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    scaling = getattr(config, "logits_scaling", None)  # granite
    if scaling:
        logits = logits / scaling
    cap = getattr(config, "final_logit_softcapping", None)  # gemma 2
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits


def token_losses(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    targets: Int[Tensor, "text position"],
) -> Float[Tensor, "text position"]:
    """Loss in nats at every predicting position, 0 elsewhere; no gradient."""
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    losses = torch.zeros(wanted.shape, dtype=torch.float32, device=hidden.device)
    chosen = torch.nonzero(wanted != IGNORED).squeeze(1)
    for rows in chosen.split(_rows_a_chunk(model)):
        logits = logits_of(model, flat[rows]).float()
        losses[rows] = F.cross_entropy(logits, wanted[rows], reduction="none")
    return losses.view(targets.shape)


def summed_loss(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    targets: Int[Tensor, "text position"],
) -> Float[Tensor, ""]:
    """Sum of the losses, differentiable in `hidden`."""
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    chosen = wanted != IGNORED
    total: Tensor = _ChunkedLoss.apply(flat[chosen], wanted[chosen], lambda h: logits_of(model, h),
                                       _rows_a_chunk(model))  # fmt: skip
    return total


def _rows_a_chunk(model: PreTrainedModel) -> int:
    vocabulary = int(model.config.get_text_config().vocab_size)
    return max(1, _CHUNK_LOGITS // vocabulary)


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of head(hidden), with d loss / d hidden computed alongside."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Callable[[Tensor], Tensor],
        rows: int,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradients = []
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_(True)
                loss = F.cross_entropy(head(leaf).float(), wanted, reduction="sum")
            if ctx.needs_input_grad[0]:
                gradients.append(torch.autograd.grad(loss, leaf)[0])
            total = total + loss.detach()
        ctx.save_for_backward(*([torch.cat(gradients)] if gradients else []))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].to(ctx.saved_tensors[0]) * ctx.saved_tensors[0], None, None, None
