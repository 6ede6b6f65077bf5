"""Rows for families that have none: read off the names and sizes of a model's own modules.

A proposal is a guess, and is used only after `separability.prove_row` has tried it on the model
itself: what the shape does not show (norms across heads, gates, another attention) shows there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headwise.models.families.layout import Architecture, Positions

_QUERY = re.compile(r"(to_|w)?q(uery)?(_?(proj|lin|linear|layer))?$", re.I)
_KEY = re.compile(r"(to_|w)?k(ey)?(_?(proj|lin|linear|layer))?$", re.I)
_VALUE = re.compile(r"(to_|w)?v(alue)?(_?(proj|lin|linear|layer))?$", re.I)
_OUTPUT = re.compile(r"((to_|w)?o(ut|utput)?(_?(proj|lin|linear|layer))?|dense|c_proj)$", re.I)
_FUSED = re.compile(r"w?qkv(_?proj)?|query_key_value|c_attn$", re.I)

_CROSS = re.compile(r"cross|encoder", re.I)  # what a language model of a BART never runs

# What a family may do to its logits, by the names that configs use
_LOGITS = (
    ("logits_times", "logit_scale"),
    ("logits_times", "lm_head_multiplier"),
    ("logits_over", "logits_scaling"),
    ("logits_times", "logits_scaling"),
    ("logits_cap", "final_logit_softcapping"),
    ("logits_cap", "logits_soft_cap"),
)


def propose_rows(model: PreTrainedModel) -> list[Architecture]:
    """Rows that fit the names and sizes of the model's modules, the plainest first."""
    path, layers = _layers(model) or ("", [])
    for attention, module in _modules(layers):
        shape = _projections(module)
        if shape is not None:
            row = Architecture(
                layers=path,
                attention=attention,
                positions=_positions(model),
                mlp_in=_LLAMA.mlp_in if _has_plain_mlp(layers) else (),
                output=shape[-1],
                projections=shape[:-1],
            )
            return _variants(model, row)
    return []


_LLAMA = Architecture()


def _layers(model: PreTrainedModel) -> tuple[str, list[nn.Module]] | None:
    """The outermost list with as many modules as the config has layers."""
    config = model.config.get_text_config()
    # a decoder that was one half of a model has a number of its own; the other is the encoder's
    count = int(getattr(config, "decoder_layers", 0) or getattr(config, "num_hidden_layers", 0))
    lists = (
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count > 0
    )
    return min(lists, key=lambda named: named[0].count("."), default=None)


def _modules(layers: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer by path, those that most layers have first, then the outermost."""
    counts: Counter[str] = Counter()
    modules: dict[str, nn.Module] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if name and not _CROSS.search(name):
                counts[name] += 1
                modules.setdefault(name, module)
    for name in sorted(modules, key=lambda n: (-counts[n], n.count("."), n)):
        yield name, modules[name]


def _projections(module: nn.Module) -> tuple[str, ...] | None:
    """Names of q, k, v (or the fused one) and of the output, if the module has them."""
    names = [
        n for n, child in module.named_children() if getattr(child, "weight", None) is not None
    ]
    output = _one(_OUTPUT, names)
    split = tuple(_one(pattern, names) for pattern in (_QUERY, _KEY, _VALUE))
    fused = _one(_FUSED, names)
    if output is None:
        return None
    if all(split):
        return (*(name for name in split if name), output)
    return None if fused is None else (fused, output)


def _one(pattern: re.Pattern[str], names: list[str]) -> str | None:
    matching = [name for name in names if pattern.fullmatch(name)]
    return matching[0] if len(matching) == 1 else None


def _has_plain_mlp(layers: list[nn.Module]) -> bool:
    parts = {*_LLAMA.mlp_in, _LLAMA.mlp_out}
    return all(parts <= {name for name, _ in layer.named_modules()} for layer in layers)


def _positions(model: PreTrainedModel) -> Positions:
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    if any("rotary" in name or "rope" in name for name in names):
        return "rope"
    return "learned" if any(name in ("wpe", "embed_positions") for name in names) else "none"


def _variants(model: PreTrainedModel, row: Architecture) -> list[Architecture]:
    """What the shape leaves open: the order of a fused projection, the logits' scale, a gate."""
    rows = [row]
    if len(row.projections) == 1:
        rows = [replace(row, order="concat"), replace(row, order="grouped")]
    config = model.config.get_text_config()
    scales: list[dict[str, Any]] = [{}]
    scales += [{field: name} for field, name in _LOGITS if getattr(config, name, None)]
    scaled = [replace(row, **scale) for row, scale in product(rows, scales)]
    return scaled + [replace(row, gated=True) for row in scaled]


def row_text(family: str, row: Architecture) -> str:
    """A row as it would stand in `known_families.py`: only what differs from Llama's."""
    differing = [
        f"{field.name}={getattr(row, field.name)!r}"
        for field in fields(row)
        if getattr(row, field.name) != getattr(_LLAMA, field.name)
    ]
    return f'"{family}": Architecture({", ".join(differing)}),'
