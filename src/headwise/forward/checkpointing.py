"""Recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.models.architectures import layers_of


def checkpointed(
    model: PreTrainedModel, first: int, stop: int | None = None
) -> AbstractContextManager[None]:
    """Recompute the activations of layers `first` to `stop` (not included) in the backward pass.

    Around accelerate's hooks: the second run of a layer needs its weights as the first did.
    """
    return replaced_forward(layers_of(model)[first:stop], _recomputing, around_hooks=True)


def _recomputing(layer: nn.Module, previous: Forward) -> Forward:
    from torch.utils.checkpoint import checkpoint

    # stopping a second run early would leave its last weights loaded
    hooked = any("_hf_hook" in vars(module) for module in layer.modules())
    return partial(checkpoint, previous, use_reentrant=False, early_stop=not hooked)
