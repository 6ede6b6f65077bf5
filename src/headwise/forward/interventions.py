"""Interventions: what a head can give instead of its own output.

An `Intervention` is one row: a name, and what it puts in the place of a layer's head outputs. It
sees the layer's attention as it ran (queries, keys, values, outputs) and may run the attention
module again. A `Variant` is the model in which some heads give that instead; `variant_losses` tells
what each variant costs, in memory or layer by layer from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from headwise.errors import SettingsError
from headwise.forward.attention import attend, attend_ends
from headwise.forward.mean_outputs import head_mean
from headwise.forward.partial_run import Rerun
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head
from headwise.models.architectures import projection_of
from headwise.models.patch import Patch, Slice

HeadOutputs = Float[Tensor, "text head query value"]  # before the output projection


@dataclass(frozen=True)
class Intervention:
    """A name, and what each head of a layer gives instead of its own output."""

    name: str
    outputs: Callable[[LayerAttention, Rerun], HeadOutputs] = field(repr=False)


def _zeros(attention: LayerAttention, _: Rerun) -> HeadOutputs:
    return attention.out.new_zeros(()).expand_as(attention.out)


def without_key(attention: LayerAttention, key: int) -> HeadOutputs:
    """The heads' outputs without one key; the queries up to it keep what they have."""
    scores = attention.scores
    visible = scores.visible
    if visible is None:
        visible = torch.ones(len(scores.q), scores.length, dtype=torch.bool, device=scores.q.device)
    visible = visible.clone()
    visible[:, key] = False
    out, _lse = attend(replace(scores, visible=visible), attention.v)
    return torch.cat([attention.out[:, :, : key + 1], _gated(attention, out)[:, :, key + 1 :]], 2)


def _gated(attention: LayerAttention, out: HeadOutputs) -> HeadOutputs:
    """What is left of an output behind the gate, which does not depend on where the head looks."""
    own = attention.before_gate
    return out if own is None else out * torch.where(own == 0, 0.0, attention.out / own)


def hidden_sink(sinks: Mapping[Head, int]) -> Intervention:
    """Each head loses the key of its own sink: the first, unless `sinks` names another."""

    def outputs(attention: LayerAttention, _: Rerun) -> HeadOutputs:
        out = without_key(attention, 0)
        last = attention.scores.length - 1
        for head, key in sinks.items():
            if head.layer == attention.layer and 0 < key <= last:
                out[:, head.index] = without_key(attention, key)[:, head.index]
        return out

    return Intervention("unsink", outputs)


ZERO = Intervention("zero", _zeros)
UNSINK = hidden_sink({})


def first_and_recent(first: int, recent: int) -> Intervention:
    """The heads see the `first` keys and the `recent` last ones only, as with a shortened cache."""

    def outputs(attention: LayerAttention, _: Rerun) -> HeadOutputs:
        out, _lse = attend_ends(attention.scores, attention.v, first, recent)
        return _gated(attention, out)

    return Intervention("first-and-recent", outputs)


def mean_output(model: PreTrainedModel, means: Float[Tensor, "layer head value"]) -> Intervention:
    """Every token gets the head's mean output; `means` are those of `measure_means`."""

    def outputs(attention: LayerAttention, _: Rerun) -> HeadOutputs:
        heads = [Head(attention.layer, index) for index in range(attention.out.shape[1])]
        rows = torch.stack([head_mean(model, means, head) for head in heads])
        return rows[None, :, None].to(attention.out).expand_as(attention.out)

    return Intervention("mean", outputs)


def patched_queries(model: PreTrainedModel, name: str, patch: Patch) -> Intervention:
    """The heads look with the queries of a patch, computed by the family's own code."""
    _require_queries_only(name, patch)

    def outputs(attention: LayerAttention, call: Rerun) -> HeadOutputs:
        layer = attention.layer
        queries = {part: one for part, one in patch.slices.items() if _is_query(part)}
        slices = [one for part, one in queries.items() if _layer(part) == layer]
        seen: list[Tensor] = []
        with (
            _changed_queries(projection_of(model, layer, "q"), slices),
            tapped(model, lambda again: seen.append(again.out)),
        ):
            call()
        return seen[0]

    return Intervention(name, outputs)


def _is_query(part: str) -> bool:
    return part.rsplit(".", 1)[1] in ("q", "q_bias")


def _layer(part: str) -> int:
    return Head.parse(part.rsplit(".", 1)[0]).layer


def _changed_queries(projection: nn.Module, slices: Sequence[Slice]) -> RemovableHandle:
    """While open the query projection gives what it would with other slices; its weights stay."""

    def change(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        changed = output.clone()
        for one in slices:
            span, delta = one.span, (one.after - one.before).to(output)
            if span.parameter.endswith("bias"):
                changed[..., span.start : span.stop] += delta
            else:
                changed[..., span.start : span.stop] += args[0] @ (delta if span.axis else delta.T)
        return changed

    return projection.register_forward_hook(change)


def _require_queries_only(name: str, patch: Patch) -> None:
    """Raise if the patch writes keys or values: other heads of the group would change too."""
    others = [
        part
        for part, one in patch.slices.items()
        if not _is_query(part) and not torch.equal(one.before, one.after)
    ]
    if others:
        raise SettingsError(
            f"the cost of {name!r} cannot be measured head by head: it changes {others[0]}",
            fix="measure treatments that write queries only, such as release and centre",
        )


@dataclass(frozen=True)
class Variant:
    """The model in which these heads give what the intervention puts in place."""

    heads: tuple[Head, ...]
    intervention: Intervention

    @property
    def lowest(self) -> int:
        """The first layer that differs from the model as it is."""
        return min(head.layer for head in self.heads)

    def in_layer(self, layer: int) -> list[Head]:
        """The heads of one layer."""
        return [head for head in self.heads if head.layer == layer]


def substitute(
    variants: Sequence[Variant],
    attention: LayerAttention,
    call: Rerun | None,
    base_outputs: Mapping[Intervention, HeadOutputs],
) -> Float[Tensor, "variant_text head query value"] | None:
    """The outputs of a layer that runs one copy of the texts per variant: i's in the i-th copy.

    In its lowest layer a variant meets what the model as it is meets there, so all variants share
    `base_outputs`. Above, an intervention answers to what the variant itself has become.
    """
    here = [(copy, v) for copy, v in enumerate(variants) if v.in_layer(attention.layer)]
    if not here:
        return None
    out = attention.out.clone()
    texts = len(out) // len(variants)
    own: dict[Intervention, Tensor] = {}
    for copy, variant in here:
        rows, given = slice(copy * texts, (copy + 1) * texts), variant.intervention
        if variant.lowest == attention.layer:
            outputs = base_outputs[given]
        else:
            if given not in own:
                assert call is not None
                own[given] = given.outputs(attention, call)
            outputs = own[given][rows]
        for head in variant.in_layer(attention.layer):
            out[rows, head.index] = outputs[:, head.index].to(out)
    return out
