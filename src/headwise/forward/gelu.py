"""A faster tanh GELU for families that spell their own out, forward and backward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.forward.replaced_forward import replaced_forward
from headwise.models.architectures import architecture_of


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
