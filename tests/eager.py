"""The slow truth: every measure from transformers' own T x T attention, in float64, text by text.

Nothing here uses the tap. Attention comes from `output_attentions=True`, head outputs from the
input of the output projection, values from the output of the value projection.
"""

from __future__ import annotations

import re
from contextlib import contextmanager

import numpy as np
import torch

from headwise.heads import Head
from headwise.models.architectures import (
    alibi_slopes,
    attention_of,
    geometry_of,
    is_transposed,
    projection_of,
)
from headwise.models.slices import head_spans


@contextmanager
def watched(model):
    """What goes into each output projection and comes out of each value projection, by layer."""
    seen: dict[str, dict[int, torch.Tensor]] = {"out": {}, "value": {}}
    handles = []
    for layer in geometry_of(model).layers:

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
    return out.unflatten(-1, (geometry_of(model).num_heads, -1)).transpose(1, 2)


def head_values(model, layer, projected):
    """The value vectors each query head reads, cut out of the projection by the table's spans."""
    if projected.dim() == 4:  # latent attention expands as if there were one head
        projected = projected.squeeze(1)
    projected = projected * (getattr(model.config, "attention_value_scale", None) or 1.0)
    clip = getattr(model.config, "clip_qkv", None)
    clip = clip or getattr(getattr(model.config, "attn_config", None), "clip_qkv", None)
    if clip:
        projected = projected.clamp(-clip, clip)
    norm = getattr(attention_of(model, layer), "v_norm", None)
    if norm is not None:  # head by head, without weights
        width = geometry_of(model, layer).head_dim
        projected = norm(projected.unflatten(-1, (-1, width)).float()).double().flatten(-2)
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


def keys_seen(p, logits):
    """How many keys each query may look at, by the mask that the model's own code applied."""
    seen = p > 0 if logits is None else logits > -1e20
    return seen.any(0).sum(-1).double()


@contextmanager
def softmax_inputs():
    """Every (head, query, key) tensor of logits that the model's own code gives to softmax."""
    seen, own = [], torch.nn.functional.softmax

    def softmax(logits, *args, **kwargs):
        if logits.dim() == 4 and logits.shape[-1] == logits.shape[-2]:
            seen.append(logits[0].double())
        return own(logits, *args, **kwargs)

    torch.nn.functional.softmax = softmax
    try:
        yield seen
    finally:
        torch.nn.functional.softmax = own


@torch.inference_mode()
def eager_measures(model, ids, *, skip=0):
    """name -> (layer, head) of one text, and the first-token mass of each query."""
    with watched(model) as seen, softmax_inputs() as logits:
        output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    shown = [p for p in output.attentions if p is not None and p.shape[-1] == len(ids)]
    numbers = geometry_of(model).layers
    layers, masses = [], []
    for place, (layer, attention) in enumerate(zip(numbers, shown, strict=True)):
        out = split_heads(model, seen["out"][layer])[0]
        value = head_values(model, layer, seen["value"][layer])[0]
        weight = projection_of(model, layer, "o").weight.detach().double()
        weight = weight if is_transposed(projection_of(model, layer, "o")) else weight.T
        weight = weight.unflatten(0, (len(out), -1))  # (head, dim, hidden)
        p = without_sink(attention_of(model, layer), attention[0].double(), out, value)
        given = logits[place] if len(logits) == len(shown) else None
        found = layer_measures(p, out, value, weight, skip, given)
        if given is not None and alibi_slopes(model) is None:
            found["max_logit"] = found["max_logit_upper"] = given[:, skip:].amax((1, 2))
        layers.append(found)
        masses.append(p[:, :, 0].tolist())
    measures = {name: np.array([layer[name].tolist() for layer in layers]) for name in layers[0]}
    return measures, np.array(masses)  # mass: (layer, head, query)


def without_sink(module, p, out, value):
    """Attention on keys alone: some families show it before a learned sink takes its share."""
    if getattr(module, "sinks", None) is None or (p.sum(-1) < 1 - 1e-6).any():
        return p
    whole = p @ value
    return p * ((out * whole).sum(-1) / whole.square().sum(-1))[..., None]


def layer_measures(p, out, value, weight, skip, logits):
    """Every measure by its definition; p is (head, query, key)."""
    length = p.shape[-1]
    query = torch.arange(length)
    learned = (1 - p.sum(-1)).clamp_min(0)
    learned = torch.where(learned < 1e-5, 0, learned)
    entropy = torch.special.entr(p).sum(-1) + torch.special.entr(learned)
    uniform = keys_seen(p, logits).log()
    later = slice(max(1, skip), None)
    distance = query[:, None] - query[None, :]
    power = out.square().sum(-1)
    norm = power.sqrt()[:, skip:].mean(-1)
    whole = p @ value  # before a gate, if there is one
    gate = torch.where(whole == 0, 0, out / whole)
    along = (out * gate * value[:, :1]).sum(-1)
    value_norm = value.norm(dim=-1)
    local = torch.where((distance >= 0) & (distance <= 2), p, 0).sum(-1)
    normalized = torch.where(uniform > 0, entropy / uniform, 0)
    mean_key = (p * query).sum(-1) / p.sum(-1)
    columns = []
    for key in range(min(8, length)):
        rows = p[:, max(skip, key + 1) :, key]
        enough = 2 * rows.shape[1] >= length - skip
        columns.append(rows.mean(-1) if enough else torch.zeros(len(p)).double())
    strongest = torch.stack(columns).max(0)
    return {
        "strongest_mass": strongest.values,
        "strongest_position": strongest.indices.double(),
        "first_token_mass": p[:, skip:, 0].mean(-1),
        "entropy": entropy[:, skip:].mean(-1),
        "normalized_entropy": normalized[:, later].mean(-1),
        "local_mass": local[:, skip:].mean(-1),
        "previous_token_mass": p.diagonal(-1, 1, 2)[:, max(0, skip - 1) :].mean(-1),
        "mean_distance": (query - mean_key)[:, skip:].mean(-1),
        "first_4_token_mass": p[:, skip:, :4].sum(-1).mean(-1),
        "learned_sink_share": learned[:, skip:].mean(-1),
        "output_norm": norm,
        "output_norm_ratio": norm / norm.mean(),
        "projected_norm": torch.einsum("htd,hdm->htm", out, weight)[:, skip:].norm(dim=-1).mean(-1),
        "constant_share": out[:, skip:].mean(1).square().sum(-1) / power[:, skip:].mean(-1),
        "first_token_contribution": (p[..., 0] * along / power)[:, skip:].mean(-1),
        "value_norm_ratio": value_norm[:, 0] / value_norm[:, later].mean(-1),
    }


@torch.inference_mode()
def eager_roles(model, ids, words):
    """name -> (layer, head) of one text by definition, query by query; `words` are its tokens."""
    output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    roles = {}
    for layer, attention in enumerate(output.attentions):
        p = attention[0].double()
        window = window_of(model, layer)
        for name, keys in role_keys(ids, words).items():
            excess = []
            for query in range(len(ids)):
                seen = [key for key in range(query + 1) if query - key < window]
                chosen = [key for key in seen if key in keys(query)]
                if 0 < len(chosen) < len(seen):
                    excess.append(p[:, query, chosen].sum(-1) - len(chosen) / len(seen))
            if excess:
                roles.setdefault(name, {})[layer] = torch.stack(excess).mean(0).numpy()
    return roles


def role_keys(ids, words):
    """For every role the set of keys of a query, as a function of the query."""
    length = len(ids)
    marks = [bool(re.fullmatch(r"\s*[^\w\s]+\s*|\s*\n\s*", word)) for word in words]
    pairs = zip(marks, words, strict=True)
    ends = [mark and bool(re.search(r"[.!?\n]", word)) for mark, word in pairs]
    starts, after_end = set(), False
    for place, word in enumerate(words):
        if ends[place]:
            after_end = True
        elif after_end and word.strip() and not marks[place]:
            starts.add(place)
            after_end = False

    def copies(query, after):
        earlier = [j + after for j in range(query) if ids[j] == ids[query]]
        return set([j for j in earlier if 0 < j <= query - 3][-8:])

    fixed = {f"fixed_position {j}": (lambda _, j=j: {j}) for j in range(1, min(16, length))}
    return {
        "previous_token": lambda query: {query - 1},
        "local": lambda query: {query, query - 1, query - 2},
        "first_token": lambda _: {0},
        "delimiter": lambda _: {j for j in range(1, length) if marks[j]},
        "sentence_start": lambda _: starts - {0},
        "duplicate_token": lambda query: copies(query, 0),
        "induction": lambda query: copies(query, 1),
        **fixed,
    }
