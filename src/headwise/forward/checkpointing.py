"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headwise.models.architectures import blocks_of


def checkpointed(model: PreTrainedModel, first: int) -> Any:
    """Recompute the activations of layers from `first` on in the backward pass."""
    return _checkpointing(blocks_of(model)[first:])


@contextmanager
def _checkpointing(blocks: list[nn.Module]) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    def wrap(block: nn.Module) -> Callable[..., Any]:
        inner = block.forward
        return lambda *args, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)

    try:
        for block in blocks:
            block.__dict__["forward"] = wrap(block)
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
