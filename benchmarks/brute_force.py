"""The plain way to the cost of a head: hook it, run the whole model again, subtract losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headwise.heads import Head
from headwise.models.architectures import geometry_of, projection_of
from headwise.texts.batches import batches

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def text_losses(model: PreTrainedModel, encoded: list[list[int]]) -> np.ndarray:
    """Summed loss of every text, by transformers' own forward pass."""
    losses = np.zeros(len(encoded))
    with torch.inference_mode():
        for batch in batches(encoded, 4):
            logits = model(batch.ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(
                logits, batch.ids[:, 1:].flatten(), reduction="none"
            ).view(len(batch.ids), -1)
            real = torch.arange(1, batch.ids.shape[1]) < batch.lengths[:, None]
            losses[list(batch.index)] = (loss.double() * real).sum(1)
    return losses


@contextmanager
def head_output(model: PreTrainedModel, head: Head, value: Tensor) -> Iterator[None]:
    """The model whose head gives this value for every token."""
    dim = geometry_of(model).head_dim

    def replace(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        out = inputs[0].clone()
        out[..., head.index * dim : (head.index + 1) * dim] = value.to(out)
        return (out, *inputs[1:])

    handle = projection_of(model, head.layer, "o").register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
