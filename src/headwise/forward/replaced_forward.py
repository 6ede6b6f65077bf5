"""A model that runs another way for a while, and is afterwards as it was found.

`replaced_forward` puts another forward on modules: recomputed activations, a faster GELU, a layer
that passes its input on. accelerate keeps its hook on the instance too: `module.forward` becomes a
wrapper that brings weights and arguments to their device and then calls `module._old_forward`. What
computes with a module's weights is therefore put under the hook, in place of `_old_forward`; what
runs the whole module later, or not at all, is put around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headwise.models.architectures import architecture_of, layers_of

Forward = Callable[..., Any]

# (module, the forward found there) -> another
Replacement = Callable[[nn.Module, Forward], Forward]

_NOTHING = object()


@contextmanager
def replaced_forward(
    modules: Sequence[nn.Module], replacement: Replacement, *, around_hooks: bool = False
) -> Iterator[None]:
    """Give each module `replacement(module, previous)`; afterwards its instance is as before."""
    places = [(module, _place(module, around_hooks)) for module in modules]
    before = [vars(module).get(name, _NOTHING) for module, name in places]
    try:
        for module, name in places:
            vars(module)[name] = replacement(module, getattr(module, name))
        yield
    finally:
        for (module, name), own in zip(places, before, strict=True):
            if own is _NOTHING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own


def _place(module: nn.Module, around_hooks: bool) -> str:
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    return "_old_forward" if hooked and not around_hooks else "forward"


def checkpointed(
    model: PreTrainedModel, first: int, stop: int | None = None
) -> AbstractContextManager[None]:
    """Recompute the activations of layers `first` to `stop` (not included) in the backward pass.

    Around accelerate's hooks: the second run of a layer needs its weights as the first did.
    """
    return replaced_forward(layers_of(model)[first:stop], _recomputing, around_hooks=True)


def _recomputing(layer: nn.Module, previous: Forward) -> Forward:
    # stopping a second run early would leave its last weights loaded
    hooked = any("_hf_hook" in vars(module) for module in layer.modules())
    return partial(checkpoint, previous, use_reentrant=False, early_stop=not hooked)


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter asks for a gradient; afterwards each asks as before.

    By name: accelerate makes a new parameter each time it loads or offloads one.
    """
    asked = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for name in asked:
            model.get_parameter(name).requires_grad_(True)


def fused_gelu(model: PreTrainedModel) -> AbstractContextManager[None]:
    """One pass over memory where the family's own tanh GELU takes several (BLOOM: seven)."""
    slow = architecture_of(model).slow_gelu
    modules = [module for module in model.modules() if type(module).__name__ == slow]
    return replaced_forward(modules, lambda module, previous: _gelu)


def _gelu(x: Tensor) -> Tensor:
    if torch.finfo(x.dtype).bits >= 32:
        return cast(Tensor, _Gelu.apply(x))
    return nn.functional.gelu(x, approximate="tanh")  # x^3 overflows in float16


_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


class _Gelu(torch.autograd.Function):
    """Tanh GELU as x s with s = sigmoid(2 u): half the time of torch's own on a CPU (no tanh)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gate(x).mul_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """d/dx (x s) = s (1 + (1 - s) x d(2u)/dx)"""
        (x,) = ctx.saved_tensors
        gate = _gate(x)
        slope = (x * x).mul_(3 * _GELU_CUBIC).add_(_GELU_LINEAR).mul_(x)
        slope = slope.mul_(1 - gate).add_(1).mul_(gate).mul_(grads[0])
        return cast(Tensor, slope)


def _gate(x: Tensor) -> Tensor:
    return (x * x).mul_(_GELU_CUBIC).add_(_GELU_LINEAR).mul_(x).sigmoid_()
