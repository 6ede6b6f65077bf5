"""Queries and keys before RoPE turns them: what the projections give, after the norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ArtefactError
from headwise.models.architectures import (
    architecture_of,
    attention_of,
    geometry_of,
    projection_of,
)


@contextmanager
def before_rotation(
    model: PreTrainedModel, layers: Sequence[int], tell: Callable[[int, Tensor, Tensor], object]
) -> Iterator[None]:
    """While open `tell` hears of queries and keys after projection and norm, before RoPE."""
    parts: dict[int, dict[str, Tensor]] = {}

    def keep(layer: int, role: str, _: nn.Module, __: Any, output: Tensor) -> None:
        outputs = parts.setdefault(layer, {})
        outputs[role] = output.detach()
        if {"q", "k"} <= set(outputs) or "qkv" in outputs:
            tell(layer, *_split(model, layer, parts.pop(layer)))

    fused = len(architecture_of(model).projections) == 1
    with ExitStack() as hooks:
        for layer, role in product(layers, ("qkv",) if fused else ("q", "k")):
            source = _pre_rotation_module(model, layer, role)
            hooks.enter_context(source.register_forward_hook(partial(keep, layer, role)))
        yield


def _pre_rotation_module(model: PreTrainedModel, layer: int, role: str) -> nn.Module:
    """The last module before rotation: the norm where a family has one, else the projection."""
    if role == "qkv":
        return projection_of(model, layer, "q")
    for name in (f"{role}_norm", f"{role}_layernorm"):
        norm = getattr(attention_of(model, layer), name, None)
        if isinstance(norm, nn.Module):
            return norm
    return projection_of(model, layer, "q" if role == "q" else "k")


def require_unrotated(model: PreTrainedModel) -> None:
    """Refuse a family whose queries and keys are never to be seen before they are rotated."""
    row = architecture_of(model)
    if row.order == "latent" or row.gate_in_query:
        raise ArtefactError(
            "queries and keys before RoPE do not come out of one projection in this family",
            where=f"model_type={model.config.model_type!r}",
            fix="capture them as scored: without --pre-rope",
        )


def _split(model: PreTrainedModel, layer: int, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    geometry = geometry_of(model, layer)
    name = architecture_of(model).clip
    clip = getattr(model.config.get_text_config(), name, None) if name else None
    if clip is not None:
        parts = {role: value.clamp(-clip, clip) for role, value in parts.items()}
    heads, kv, dim = geometry.num_heads, geometry.num_kv_heads, geometry.key_dim
    if "qkv" not in parts:
        return _by_head(parts["q"], heads, dim), _by_head(parts["k"], kv, dim)
    fused = parts["qkv"]
    if architecture_of(model).order == "concat":
        q, k = fused[..., : heads * dim], fused[..., heads * dim : (heads + kv) * dim]
        return _by_head(q, heads, dim), _by_head(k, kv, dim)
    grouped = fused.unflatten(-1, (kv, geometry.group + 2, dim))
    return (
        grouped[..., : geometry.group, :].flatten(2, 3).transpose(1, 2),
        grouped[..., geometry.group, :].transpose(1, 2),
    )


def _by_head(value: Tensor, heads: int, dim: int) -> Float[Tensor, "text head position dim"]:
    """A projection is (text, position, head * dim); a norm may run before or after the turn."""
    if value.dim() == 3:
        value = value.unflatten(-1, (heads, dim))  # a plain projection
    return value.transpose(1, 2) if value.shape[2] == heads else value
