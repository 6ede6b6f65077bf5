"""Slices of a model's weights: where a head's numbers are, reading them and writing them.

A `Span` is a range of rows or columns of one parameter; `Span.of` is a view of it, or a copy where
accelerate has offloaded the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import content_hash
from headwise.heads import Head
from headwise.models.architectures import (
    architecture_of,
    geometry_of,
    is_transposed,
    projection_name,
    projection_of,
)
from headwise.models.families.layout import Role
from headwise.models.offloading import held_tensor, writable_tensor
from headwise.models.stored_weights import stored_weights


@dataclass(frozen=True, order=True)
class Span:
    """Rows (axis 0) or columns (axis 1) [start, stop) of one parameter."""

    parameter: str
    axis: int
    start: int
    stop: int

    def of(self, model: PreTrainedModel) -> Tensor:
        """The slice itself: a view of the model's tensor, a copy of an offloaded one."""
        return self.within(held_tensor(model, self.parameter))

    def within(self, tensor: Tensor) -> Tensor:
        """The same slice of any tensor of the parameter's shape."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


def head_spans(model: PreTrainedModel, head: Head, role: Role) -> dict[str, Span]:
    """The named slices of one role of one head: the weight, and the bias where there is one.

    With grouped-query attention k and v belong to the head's group and are named after it.
    """
    owner = slice_owner(model, head, role)
    start, size = _place(model, head, role)
    stop = start + size
    module = projection_of(model, head.layer, role)
    prefix = projection_name(model, head.layer, role)
    transposed = is_transposed(module)
    if role == "o":
        return {f"{owner}.o": Span(f"{prefix}.weight", 0 if transposed else 1, start, stop)}
    spans = {f"{owner}.{role}": Span(f"{prefix}.weight", 1 if transposed else 0, start, stop)}
    if getattr(module, "bias", None) is not None:
        spans[f"{owner}.{role}_bias"] = Span(f"{prefix}.bias", 0, start, stop)
    return spans


def slice_owner(model: PreTrainedModel, head: Head, role: Role) -> str:
    """Who a slice belongs to: `L5H14`, or `L5KV3` for keys and values that a group shares."""
    group = geometry_of(model, head.layer).group
    if role in ("k", "v") and group > 1:
        return f"L{head.layer}KV{head.index // group}"
    return str(head)


def output_bias_span(model: PreTrainedModel, layer: int) -> dict[str, Span]:
    """The whole output bias of a layer, or nothing where the family has none."""
    module = projection_of(model, layer, "o")
    bias = getattr(module, "bias", None)
    if bias is None:
        return {}
    name = f"{projection_name(model, layer, 'o')}.bias"
    return {f"L{layer}.o_bias": Span(name, 0, 0, int(bias.shape[0]))}


def _place(model: PreTrainedModel, head: Head, role: Role) -> tuple[int, int]:
    """Where a head's rows (of o: columns) begin in the projection, and how many they are."""
    geometry = geometry_of(model, head.layer)
    row = architecture_of(model)
    group, dim = geometry.group, geometry.head_dim
    kv = head.index // group
    if role == "o":
        return head.index * dim, dim
    if row.order == "latent":
        key, both = geometry.own_key_dim, geometry.own_key_dim + dim
        query = head.index * geometry.key_dim, geometry.key_dim
        return {"q": query, "k": (kv * both, key), "v": (kv * both + key, dim)}[role]
    if row.order == "split":
        key = geometry.key_dim
        query = head.index * key * (2 if row.gate_in_query else 1), key
        return {"q": query, "k": (kv * key, key), "v": (kv * dim, dim)}[role]
    if row.order == "concat":
        before = {"q": 0, "k": geometry.num_heads, "v": geometry.num_heads + geometry.num_kv_heads}
        return (before[role] + (head.index if role == "q" else kv)) * dim, dim
    inside = {"q": head.index % group, "k": group, "v": group + 1}[role]
    return (kv * (group + 2) + inside) * dim, dim


def write_slices(model: PreTrainedModel, values: Mapping[Span, Tensor]) -> None:
    """Copy values into the model's own tensors, rounding to their type."""
    stored = stored_weights(model)
    with torch.no_grad():
        for span, value in values.items():
            if stored is not None:
                stored.change(span.parameter, (span.axis, span.start, span.stop), value)
                continue
            span.within(writable_tensor(model, span.parameter)).copy_(value)


def read_slices(model: PreTrainedModel, spans: Mapping[str, Span]) -> dict[str, Tensor]:
    """Copies of named slices as they are now."""
    return {name: span.of(model).detach().clone() for name, span in spans.items()}


def spans_of(model: PreTrainedModel, heads: Iterable[Head], roles: str = "qkvo") -> dict[str, Span]:
    """The named slices of several heads; shared slices appear once."""
    spans: dict[str, Span] = {}
    for head in heads:
        for role in roles:
            spans |= head_spans(model, head, role)  # type: ignore[arg-type]
    return spans


def slices_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of named tensors: names, types, shapes and bits."""
    parts: list[bytes | str] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        parts += [name, f"{tensor.dtype}{tuple(tensor.shape)}", _bytes(tensor)]
    return content_hash(parts)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
