"""The slow truth: every measure from transformers' own T x T attention, in float64, text by text.

Nothing here uses the tap. Attention comes from `output_attentions=True`, head outputs from the
input of the output projection, values from the output of the value projection.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch

from headwise.heads import Head
from headwise.models.architectures import geometry_of, is_transposed, projection_of
from headwise.models.slices import head_spans


@contextmanager
def watched(model):
    """What goes into each output projection and comes out of each value projection, by layer."""
    seen: dict[str, dict[int, torch.Tensor]] = {"out": {}, "value": {}}
    handles = []
    for layer in range(geometry_of(model).num_layers):

        def before(_, inputs, layer=layer):
            seen["out"][layer] = inputs[0].detach().double()

        def after(_, inputs, output, layer=layer):
            seen["value"][layer] = output.detach().double()

        handles.append(projection_of(model, layer, "o").register_forward_pre_hook(before))
        handles.append(projection_of(model, layer, "v").register_forward_hook(after))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def split_heads(model, out):
    """(batch, query, head * dim) -> (batch, head, query, dim)."""
    geometry = geometry_of(model)
    return out.unflatten(-1, (geometry.num_heads, geometry.head_dim)).transpose(1, 2)


def head_values(model, layer, projected):
    """The value vectors each query head reads, cut out of the projection by the table's spans."""
    clip = getattr(model.config, "clip_qkv", None)
    clip = clip or getattr(getattr(model.config, "attn_config", None), "clip_qkv", None)
    if clip:
        projected = projected.clamp(-clip, clip)
    spans = [
        next(iter(head_spans(model, Head(layer, index), "v").values()))
        for index in range(geometry_of(model).num_heads)
    ]
    return torch.stack([projected[..., span.start : span.stop] for span in spans], 1)


def window_of(model, layer):
    """How many keys a query of this layer sees at most."""
    window = getattr(model.config, "sliding_window", None)
    types = getattr(model.config, "layer_types", None)
    return window if window and (types is None or types[layer] == "sliding_attention") else 10**9


@torch.inference_mode()
def eager_measures(model, ids, *, skip=0):
    """name -> (layer, head) of one text, and the first-token mass of each query."""
    with watched(model) as seen:
        output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    layers = []
    for layer, attention in enumerate(output.attentions):
        out = split_heads(model, seen["out"][layer])[0]
        value = head_values(model, layer, seen["value"][layer])[0]
        weight = projection_of(model, layer, "o").weight.detach().double()
        weight = weight if is_transposed(projection_of(model, layer, "o")) else weight.T
        weight = weight.unflatten(0, (len(out), -1))  # (head, dim, hidden)
        layers.append(
            layer_measures(attention[0].double(), out, value, weight, window_of(model, layer), skip)
        )
    measures = {name: np.array([layer[name].tolist() for layer in layers]) for name in layers[0]}
    mass = np.array([attention[0, :, :, 0].tolist() for attention in output.attentions])
    return measures, mass  # mass: (layer, head, query)


def layer_measures(p, out, value, weight, window, skip):
    """Every measure by its definition; p is (head, query, key)."""
    length = p.shape[-1]
    query = torch.arange(length)
    entropy = torch.special.entr(p).sum(-1)
    visible = (query + 1).clamp(max=window).double()
    later = slice(max(1, skip), None)
    distance = query[:, None] - query[None, :]
    power = out.square().sum(-1)
    norm = power.sqrt()[:, skip:].mean(-1)
    along = (out * value[:, :1]).sum(-1)
    value_norm = value.norm(dim=-1)
    local = torch.where((distance >= 0) & (distance <= 2), p, 0).sum(-1)
    return {
        "first_token_mass": p[:, skip:, 0].mean(-1),
        "entropy": entropy[:, skip:].mean(-1),
        "normalized_entropy": (entropy / visible.log())[:, later].mean(-1),
        "local_mass": local[:, skip:].mean(-1),
        "previous_token_mass": p.diagonal(-1, 1, 2)[:, max(0, skip - 1) :].mean(-1),
        "mean_distance": (p * distance).sum(-1)[:, skip:].mean(-1),
        "output_norm": norm,
        "output_norm_ratio": norm / norm.mean(),
        "projected_norm": torch.einsum("htd,hdm->htm", out, weight)[:, skip:].norm(dim=-1).mean(-1),
        "constant_share": out[:, skip:].mean(1).square().sum(-1) / power[:, skip:].mean(-1),
        "first_token_contribution": (p[..., 0] * along / power)[:, skip:].mean(-1),
        "value_norm_ratio": value_norm[:, 0] / value_norm[:, later].mean(-1),
    }
