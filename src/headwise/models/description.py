"""What an artefact says about its model: its shape, its family and a hash of its weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.heads import Head
from headwise.models.architectures import (
    ROLES,
    alibi_slopes,
    geometry_of,
    is_packed,
    layer_window,
    positions_of,
    projection_of,
    widths,
)
from headwise.models.offloading import held_pieces, parameter_shapes, plain_parts
from headwise.models.slices import head_spans
from headwise.models.stored_weights import stored_weights
from headwise.models.values import ModelInfo

_FINGERPRINT = "fingerprint"
_KEPT = "_headwise_fingerprint"  # on the model itself


def weight_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the names, types, shapes and bits of all weights.

    Of a streamed model it is kept until a weight is changed: to know it the model is read once.
    Of a quantised one for good: its kernels may lay its numbers out anew when they first run.
    """
    stored = stored_weights(model)
    if stored is None:
        kept: str | None = vars(model).get(_KEPT)
        return kept or _fingerprint(model)
    if _FINGERPRINT not in stored.known:
        stored.known[_FINGERPRINT] = _fingerprint(model)
    return stored.known[_FINGERPRINT]


def _fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, shape in sorted(parameter_shapes(model).items()):
        digest.update(f"{name}{model.get_parameter(name).dtype}{tuple(shape)}".encode())
        for value in held_pieces(model, name):
            digest.update(_raw(value))
    if is_packed(model):  # some keep their numbers in buffers
        for name, value in sorted(model.named_buffers()):
            digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            digest.update(_raw(value))
    return digest.hexdigest()


def keep_fingerprint(model: PreTrainedModel) -> None:
    """Take the fingerprint of a quantised model before it runs."""
    if is_packed(model):
        vars(model)[_KEPT] = weight_fingerprint(model)


def _raw(value: Tensor) -> bytes | memoryview:
    parts = [p.detach().cpu().contiguous().reshape(-1) for p in plain_parts(value)]
    bits = [part.view(torch.uint8).numpy().data for part in parts]
    return bits[0] if len(bits) == 1 else b"".join(bits)


def describe_model(model: PreTrainedModel, name: str | None = None) -> ModelInfo:
    """What an artefact says about its model."""
    geometry = geometry_of(model)
    slopes, first = alibi_slopes(model), geometry.layers[0]
    return ModelInfo(
        id=name or model.config._name_or_path or str(model.config.model_type),
        model_type=str(model.config.model_type),
        fingerprint=weight_fingerprint(model),
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=int(model.config.get_text_config().hidden_size),
        qkv_bias=getattr(projection_of(model, first, "q"), "bias", None) is not None,
        output_bias=getattr(projection_of(model, first, "o"), "bias", None) is not None,
        positions=positions_of(model),
        num_parameters=sum(shape.numel() for shape in parameter_shapes(model).values()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        layers=geometry.layers if geometry.is_hybrid else None,
        sliding=tuple(n for n in geometry.layers if layer_window(model, n)) or None,
        slice_weights=_slice_weights(model),
        slopes=None if slopes is None else tuple(float(s) for s in slopes),
    )


def _slice_weights(model: PreTrainedModel) -> tuple[int, ...] | None:
    """Weights of one head's slices by role, where they are not all head_dim x hidden."""
    geometry, hidden = geometry_of(model), int(model.config.get_text_config().hidden_size)
    head, counts, plain = Head(geometry.layers[0], 0), [], []
    for role in ROLES:
        module = projection_of(model, head.layer, role)
        spans = head_spans(model, head, role)
        rows = next(iter(spans.values()))
        width = widths(module)[1 if role == "o" else 0]
        size = rows.stop - rows.start
        counts.append(size * (width + len(spans) - 1))
        plain.append(geometry.head_dim * (hidden + len(spans) - 1))
    return None if counts == plain else tuple(counts)
