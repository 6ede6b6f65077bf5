"""The operation: reinitialise a head's Q/K/V, silence its output, say exactly what was changed.

`operate` changes nothing itself; it returns the `Patch`. Every slice draws from its own generator,
seeded by the plan's seed and the slice's name, so a head gets the same numbers whichever heads are
operated on with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import ArtefactError, SelectionError
from headwise.heads import Head
from headwise.models.architectures import (
    dense_weight,
    geometry_of,
    projection_of,
    require_plain,
)
from headwise.models.description import weight_fingerprint
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span, head_spans, output_bias_span, read_slices, spans_of
from headwise.models.values import PatchInfo
from headwise.surgery.plan import SurgeryPlan


def plan_spans(model: PreTrainedModel, plan: SurgeryPlan) -> dict[str, Span]:
    """The named slices that a plan operates on and trains."""
    geometry = geometry_of(model)
    spans = spans_of(model, plan.target_heads, "qo")
    for layer, kv in plan.kv_groups():
        head = Head(layer, kv * geometry.group)
        spans |= {**head_spans(model, head, "k"), **head_spans(model, head, "v")}
    return spans


def require_planned_model(model: PreTrainedModel, plan: SurgeryPlan, *, force: bool) -> str:
    """Refuse a plan that was made for another model; returns the fingerprint of the weights."""
    geometry = geometry_of(model)
    shape = (plan.model.num_layers, plan.model.num_heads, plan.model.num_kv_heads)
    actual = (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads)
    if shape != actual:
        raise ArtefactError(
            f"the plan is for (layers, heads, kv heads) = {shape}, this model has {actual}",
            where=f"plan made for {plan.model.id}",
            fix="make a plan from this model's own diagnosis",
        )
    _require_equal_layers(model)  # after the shape: a foreign plan names layers that are not here
    require_plain(model, {head.layer for head in plan.target_heads})
    fingerprint = weight_fingerprint(model)
    if not force and fingerprint != plan.model.fingerprint:
        raise ArtefactError(
            "the plan was made for other weights than these",
            where=f"plan made for {plan.model.id}",
            fix="diagnose this model and plan again, or use --force",
        )
    return fingerprint


def _require_equal_layers(model: PreTrainedModel) -> None:
    """A plan counts key groups and weights once for all layers."""
    shapes = {geometry_of(model, layer) for layer in geometry_of(model).layers}
    if len(shapes) > 1:
        raise ArtefactError(
            "the layers of this model differ in their heads' widths or key groups",
            where=f"model_type={model.config.model_type!r}",
            fix="diagnose, evaluate and capture work; surgery needs layers that are alike",
        )


def operate(
    model: PreTrainedModel, plan: SurgeryPlan, *, mean_outputs: Tensor | None = None
) -> Patch:
    """The patch that reinitialises and silences the plan's heads; the model is not changed.

    `mean_outputs` (layer, head, value), needed for `compensate: mean`, is from `measure_means`.
    """
    spans = plan_spans(model, plan)
    before = read_slices(model, spans)
    after = {name: _fresh(model, plan, name, span) for name, span in spans.items()}
    if plan.compensate == "mean":
        extra_spans, extra = _compensation(model, plan, mean_outputs)
        spans |= extra_spans
        before |= read_slices(model, extra_spans)
        after |= extra
    slices = {
        name: Slice(span, before[name], after[name].to(before[name].dtype))
        for name, span in spans.items()
    }
    return Patch(slices, _info(plan))


def silence(model: PreTrainedModel, plan: SurgeryPlan) -> Patch:
    """The patch that zeroes the output columns of the plan's heads and nothing else."""
    spans = spans_of(model, plan.target_heads, "o")
    before = read_slices(model, spans)
    slices = {n: Slice(span, before[n], torch.zeros_like(before[n])) for n, span in spans.items()}
    return Patch(slices, _info(plan))


def unchanged(model: PreTrainedModel, plan: SurgeryPlan) -> Patch:
    """The patch that holds the plan's slices as they are: the start of gradient-only training."""
    spans = plan_spans(model, plan)
    before = read_slices(model, spans)
    slices = {name: Slice(span, before[name], before[name]) for name, span in spans.items()}
    return Patch(slices, _info(plan))


def _info(plan: SurgeryPlan) -> PatchInfo:
    return PatchInfo(plan.model.id, plan.model_dump(mode="json"))


def _fresh(model: PreTrainedModel, plan: SurgeryPlan, name: str, span: Span) -> Tensor:
    """The float32 start of one slice: zeros for biases and outputs, noise for q, k and v."""
    role = name.rsplit(".", 1)[1]
    shape = span.of(model).shape
    if role == "o" or role.endswith("_bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{plan.seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    if plan.init == "xavier_uniform":
        bound = math.sqrt(3) * _xavier_std(model)
        return (torch.rand(shape, generator=generator) * 2 - 1) * bound
    owner = name.rsplit(".", 1)[0]
    layer = int(owner.split("H")[0].split("KV")[0].removeprefix("L"))
    fixed = plan.init == "xavier_normal"
    std = _xavier_std(model) if fixed else healthy_std(model, plan, layer, role)
    return torch.randn(shape, generator=generator) * std


def _xavier_std(model: PreTrainedModel) -> float:
    """Glorot's scale for the head's joint (3 head_dim, hidden) slice, as in the paper's code."""
    geometry = geometry_of(model)
    hidden = int(model.config.get_text_config().hidden_size)
    return math.sqrt(2 / (hidden + 3 * geometry.head_dim))


def healthy_std(model: PreTrainedModel, plan: SurgeryPlan, layer: int, role: str) -> float:
    """The scale of a role in the layer's healthy heads; if none, in those left alone."""
    heads = [Head(layer, index) for index in range(geometry_of(model).num_heads)]
    healthy = [head for head in plan.healthy_heads if head.layer == layer]
    others = [head for head in heads if head not in set(plan.target_heads)]
    spans = spans_of(model, healthy or others or heads, role)
    values = [s.of(model).detach().float().flatten() for n, s in spans.items() if n.endswith(role)]
    return float(torch.cat(values).std())


def _compensation(
    model: PreTrainedModel, plan: SurgeryPlan, means: Tensor | None
) -> tuple[dict[str, Span], dict[str, Tensor]]:
    """New output biases that carry what the silenced heads added on average."""
    if means is None:
        raise SelectionError("compensate: mean needs the heads' mean outputs: pass mean_outputs")
    spans: dict[str, Span] = {}
    values: dict[str, Tensor] = {}
    for layer in sorted({head.layer for head in plan.target_heads}):
        found = output_bias_span(model, layer)
        if not found:
            raise SelectionError(
                "compensate: mean needs an output bias, and this family has none",
                where=f"model_type={model.config.model_type!r}",
                fix="set compensate: none in the plan",
            )
        heads = [head.index for head in plan.target_heads if head.layer == layer]
        row = geometry_of(model).layers.index(layer)
        name, span = next(iter(found.items()))
        spans[name] = span
        values[name] = span.of(model).detach().float() + _added(model, layer, heads, means[row])
    return spans, values


def _added(
    model: PreTrainedModel, layer: int, heads: list[int], means: Mapping[int, Tensor] | Tensor
) -> Float[Tensor, "hidden"]:
    weight = dense_weight(projection_of(model, layer, "o"))
    columns = weight.T.unflatten(0, (geometry_of(model).num_heads, -1))
    return torch.stack([means[h].to(columns) @ columns[h] for h in heads]).sum(0)
