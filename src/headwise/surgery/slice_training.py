"""Train slices of weights and nothing else: float32 masters, and linear layers that feed them.

Each weight matrix with planned slices has one master that holds just these rows or columns. The
forward pass uses the model's own matrix as it is; the backward pass computes weight gradients for
the slices only. The optimizer never sees a whole parameter, so what is outside the patch stays as
it was by construction: no mask to forget, no weight decay or momentum to leak.

Why float32: with AdamW at lr 5e-5 a bfloat16 weight above 2**-6 stands still, because the step is
under half the gap to its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.forward.replaced_forward import Forward, frozen, replaced_forward
from headwise.models.architectures import is_transposed
from headwise.models.offloading import execution_device
from headwise.models.patch import Slice
from headwise.models.slices import Span, write_slices

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Master:
    """The trained part of one parameter, in float32, slice after slice along `axis`."""

    parameter: str
    axis: int
    names: tuple[str, ...]  # slice names, in order
    spans: tuple[Span, ...]
    value: nn.Parameter = field(repr=False)

    def runs(self) -> Runs:
        """The spans as (start, length), neighbours joined: fewer and longer copies."""
        joined: list[tuple[int, int]] = []
        for span in self.spans:
            if joined and sum(joined[-1]) == span.start:
                start, length = joined.pop()
                joined.append((start, length + span.stop - span.start))
            else:
                joined.append((span.start, span.stop - span.start))
        return tuple(joined)


def make_masters(slices: Mapping[str, Slice], model: PreTrainedModel) -> list[Master]:
    """One master a parameter, from the slices' `after` values, where its layer runs."""
    by_parameter: dict[str, list[str]] = {}
    for name in sorted(slices, key=lambda n: slices[n].span):
        by_parameter.setdefault(slices[name].span.parameter, []).append(name)
    masters = []
    for parameter, names in by_parameter.items():
        spans = tuple(slices[name].span for name in names)
        axis = spans[0].axis
        value = torch.cat([slices[name].after.float() for name in names], axis)
        value = value.to(execution_device(model, parameter)).contiguous()
        masters.append(Master(parameter, axis, tuple(names), spans, nn.Parameter(value)))
    return masters


def master_slices(masters: list[Master]) -> dict[str, tuple[Span, Tensor]]:
    """The masters cut back into named slices."""
    found: dict[str, tuple[Span, Tensor]] = {}
    for master in masters:
        sizes = [span.stop - span.start for span in master.spans]
        parts = master.value.detach().split(sizes, master.axis)
        for name, span, part in zip(master.names, master.spans, parts, strict=True):
            found[name] = (span, part)
    return found


def write_masters(model: PreTrainedModel, masters: list[Master]) -> None:
    """Round the masters into the model's own weights."""
    write_slices(model, dict(master_slices(masters).values()))


@contextmanager
def training_slices(model: PreTrainedModel, masters: list[Master]) -> Iterator[None]:
    """While open, the model is frozen and its linears send slice gradients to the masters."""
    parts: dict[nn.Module, dict[str, Master]] = {}
    for master in masters:
        owner, _, kind = master.parameter.rpartition(".")
        parts.setdefault(model.get_submodule(owner), {})[kind] = master

    def feeding(module: nn.Module, previous: Forward) -> Forward:
        return _slice_forward(module, parts[module])

    with frozen(model), replaced_forward(list(parts), feeding):
        yield


def _slice_forward(module: Any, parts: Mapping[str, Master]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        # what a gradient goes to must be an argument; the rest of a master comes with `parts`
        values = (parts[kind].value if kind in parts else None for kind in ("weight", "bias"))
        y: Tensor = _SliceLinear.apply(x, *values, module, parts)
        return y

    return forward


def _columns(x: Float[Tensor, "... wide"], runs: Runs) -> Float[Tensor, "... narrow"]:
    """Runs of the last axis, always a copy: a view would keep all of x alive."""
    return torch.cat([x.narrow(-1, start, length) for start, length in runs], -1)


class _SliceLinear(torch.autograd.Function):
    """y = x W^T + b with the model's weights; gradients for x and for the chosen slices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "... in"],
        weight_master: Tensor | None,
        bias_master: Tensor | None,
        module: Any,
        parts: Mapping[str, Master],
    ) -> Float[Tensor, "... out"]:
        ctx.parts, ctx.transposed, ctx.axis = parts, is_transposed(module), None
        matrix = module.weight.T if ctx.transposed else module.weight  # (out, in), a view
        kept = None
        if (weight := parts.get("weight")) is not None:
            # In (out, in) order a slice of outputs has axis 0, a slice of inputs axis 1.
            ctx.axis = weight.axis ^ ctx.transposed
            kept = x if ctx.axis == 0 else _columns(x, weight.runs())
        ctx.save_for_backward(kept, matrix)
        return F.linear(x, matrix, module.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        kept, matrix = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_x = grad @ matrix if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.axis is not None and ctx.needs_input_grad[1]:
            rows = _columns(flat, ctx.parts["weight"].runs()) if ctx.axis == 0 else flat
            grad_weight = (rows.T @ kept.flatten(0, -2)).float()
            if ctx.transposed:
                grad_weight = grad_weight.T
        if "bias" in ctx.parts and ctx.needs_input_grad[2]:
            grad_bias = _columns(flat, ctx.parts["bias"].runs()).float().sum(0)
        return grad_x, grad_weight, grad_bias, None, None
