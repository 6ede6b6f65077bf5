"""Which places a patch may touch: slices of heads and of their projections, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from transformers import PreTrainedModel

from headwise.errors import ArtefactError
from headwise.heads import Head
from headwise.models.architectures import (
    attention_layers,
    geometry_of,
    is_plain,
    is_transposed,
    projection_name,
    projection_of,
    widths,
)
from headwise.models.family import Role
from headwise.models.slices import Span, head_spans, output_bias_span

_HEAD = re.compile(r"L(\d{1,6})(H|KV)(\d{1,6})\.([qkvo])(?:_bias)?")
_BIAS = re.compile(r"L(\d{1,6})\.o_bias")
_ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


def require_plain(model: PreTrainedModel, layers: Iterable[int] | None = None) -> None:
    """Refuse packed numbers: a quantised projection has no slices that could be written."""
    for layer in sorted(attention_layers(model) if layers is None else layers):
        for role in _ROLES:
            module = projection_of(model, layer, role)
            if not is_plain(module):
                raise ArtefactError(
                    f"the {role} weights of layer {layer} are quantised, and slices of them "
                    "cannot be written",
                    where=f"{projection_name(model, layer, role)}: {type(module).__name__}",
                    fix="operate on the model before it is quantised (a float16 or bfloat16 "
                    "checkpoint), and\nquantise the result; diagnose, evaluate and capture work",
                )


def is_packed(model: PreTrainedModel) -> bool:
    """Whether some attention weights are quantised."""
    layers = attention_layers(model)
    return not all(is_plain(projection_of(model, n, role)) for n in layers for role in _ROLES)


def require_heads_only(model: PreTrainedModel, spans: Mapping[str, Span], verb: str) -> None:
    """Refuse a span that is not where the architecture has what its name says."""
    layers = set(attention_layers(model))
    require_plain(model)
    for name, span in spans.items():
        expected = _named(model, name, layers)
        if expected is None or span != expected:
            told = "nothing of that name" if expected is None else str(expected)
            raise ArtefactError(
                f"cannot {verb} the patch: {name} is no slice of a head of this model "
                f"({span}, the model has {told})",
                where=model.config.model_type,
                fix="use the model the patch was made from, and a patch that headwise wrote",
            )


def _named(model: PreTrainedModel, name: str, layers: set[int]) -> Span | None:
    """Where a slice of this name is; of a whole projection (lora) any stretch of it."""
    head, bias = _HEAD.fullmatch(name), _BIAS.fullmatch(name)
    if head is not None and int(head[1]) in layers:
        geometry = geometry_of(model, int(head[1]))
        grouped = head[2] == "KV"
        index = int(head[3]) * (geometry.group if grouped else 1)
        if index < geometry.num_heads:
            role: Role = head[4]  # type: ignore[assignment]
            return head_spans(model, Head(int(head[1]), index), role).get(name)
    if bias is not None and int(bias[1]) in layers:
        return output_bias_span(model, int(bias[1])).get(name)
    module = re.sub(r"\.lora\d{1,6}$", "", name)
    if module != name and module in _projections(model, layers):
        reads, writes = widths(model.get_submodule(module))
        rows = reads if is_transposed(model.get_submodule(module)) else writes
        return Span(f"{module}.weight", 0, 0, rows)
    return None


def _projections(model: PreTrainedModel, layers: set[int]) -> set[str]:
    return {projection_name(model, layer, role) for layer in layers for role in _ROLES}


def require_apart(spans: Mapping[str, Span], where: object) -> None:
    """Refuse slices that overlap: undoing them in any order would not give the weights back."""
    named = sorted((span.parameter, span.axis, span.start, span.stop) for span in spans.values())
    axes: dict[str, int] = {}
    for parameter, axis, _, _ in named:
        if axes.setdefault(parameter, axis) != axis:
            raise ArtefactError(f"slices of {parameter} cross each other", where=where)
    for (parameter, _, _, stop), (other, _, start, _) in pairwise(named):
        if parameter == other and start < stop:
            raise ArtefactError(f"slices of {parameter} overlap at {start}", where=where)
