"""Exact losses with one head's output replaced by another, re-running only what comes after it.

The model runs once and what every layer got, and what its attention gave, is kept. A replacement
changes one head's share of that attention's output, behind the output projection; from there on
the model runs again, several replacements stacked in one batch. Ablation and triage stand on this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.gelu import fused_gelu
from headwise.forward.losses import shifted_targets, token_losses
from headwise.forward.partial_run import layer_inputs, replaced_attention, run_from
from headwise.forward.tap import LayerAttention, Reader, tapped
from headwise.heads import Head
from headwise.models.architectures import (
    attention_layers,
    device_of,
    is_packed,
    is_transposed,
    projection_name,
    projection_of,
)
from headwise.models.offloading import held_tensor

TOKENS = 2048  # a batch of replacements: enough for the GEMMs, little enough for the caches


Losses = Float[np.ndarray, "document"]


@dataclass(frozen=True)
class BasePass:
    """The undisturbed model on one batch: what each layer got, and what its attention gave."""

    ids: Int[Tensor, "text position"]
    lengths: Int[Tensor, "text"]
    inputs: list[Tensor]
    attended: dict[int, Any]  # outputs of the attention modules as they return them, by layer
    heads: dict[int, Tensor]  # the heads' outputs before the output projection
    losses: Losses


@dataclass(frozen=True)
class Replaced:
    """One head, and what it gives instead of its own output."""

    head: Head
    out: Float[Tensor, "text query value"]


def base_pass(
    model: PreTrainedModel,
    ids: Int[Tensor, "text position"],
    lengths: Int[Tensor, "text"],
    reader: Reader | None = None,
) -> BasePass:
    """Run a batch and keep what replacements start from; `reader` sees every layer too."""
    ids = ids.to(device_of(model))
    heads: dict[int, Tensor] = {}

    def read(attention: LayerAttention) -> Tensor | None:
        heads[attention.layer] = attention.out
        return None if reader is None else reader(attention)

    with fused_gelu(model), tapped(model, read):
        inputs, attended, last = layer_inputs(model, ids)
    losses = _losses(model, last, ids, lengths)
    return BasePass(ids, lengths, inputs, attended, heads, losses)


def _losses(model: PreTrainedModel, last: Tensor, ids: Tensor, lengths: Tensor) -> Losses:
    losses: Losses = (
        token_losses(model, last, shifted_targets(ids, lengths)).double().sum(1).cpu().numpy()
    )
    return losses


def stack_size(passed: BasePass) -> int:
    """How many replacements of this batch run at once by default."""
    return max(1, TOKENS // passed.ids.numel())


def losses_from(
    model: PreTrainedModel, passed: BasePass, layer: int, copies: int
) -> Float[np.ndarray, "copy document"]:
    """Losses of `copies` copies of the batch from `layer` on, as the open contexts change them."""
    ids = passed.ids.repeat(copies, 1)
    with fused_gelu(model):
        start = torch.cat([passed.inputs[layer]] * copies, -3)  # gemma3n: streams come before
        last = run_from(model, ids, layer, start)
    lengths = passed.lengths.repeat(copies)
    return _losses(model, last, ids, lengths).reshape(copies, -1)


def replaced_losses(
    model: PreTrainedModel, passed: BasePass, replaced: Sequence[Replaced]
) -> Float[np.ndarray, "replaced document"]:
    """Losses of every document with each replacement alone; all are heads of one layer."""
    layer = replaced[0].head.layer
    with ExitStack() as stack:
        if correctable(model):
            if layer < attention_layers(model)[-1]:  # else the tap would see nothing
                stack.enter_context(tapped(model))
            stack.enter_context(corrected_attention(model, passed, replaced))
        else:
            stack.enter_context(tapped(model, _replacing(replaced)))
        return losses_from(model, passed, layer, len(replaced))


def correctable(model: PreTrainedModel) -> bool:
    """Whether a head's share may be subtracted: in half precision the difference is too rough.

    A quantised output projection shows no share of a head.
    """
    return torch.finfo(model.dtype).bits >= 32 and not is_packed(model)


@contextmanager
def corrected_attention(
    model: PreTrainedModel, passed: BasePass, replaced: Sequence[Replaced]
) -> Iterator[None]:
    """One layer's attention does not run: it gives its base output but for one head a copy."""
    layer = replaced[0].head.layer
    whole = passed.attended[layer]
    out: Tensor = whole[0] if isinstance(whole, tuple) else whole
    stacked = (out + _changes(model, passed, replaced)).flatten(0, 1)
    output = (stacked, *whole[1:]) if isinstance(whole, tuple) else stacked
    with replaced_attention(model, layer, output):
        yield


def _changes(
    model: PreTrainedModel, passed: BasePass, replaced: Sequence[Replaced]
) -> Float[Tensor, "replaced text query hidden"]:
    """What each replacement changes behind the output projection of their layer."""
    own = passed.heads[replaced[0].head.layer]
    weight = _output_weights(model, replaced[0].head.layer, own.shape[1])
    change = torch.stack([one.out.to(own) - own[:, one.head.index] for one in replaced])
    return change @ weight[[one.head.index for one in replaced]][:, None]


def _output_weights(
    model: PreTrainedModel, layer: int, heads: int
) -> Float[Tensor, "head value hidden"]:
    """The output projection of a layer, head by head; the values of one stand together."""
    weight = held_tensor(model, f"{projection_name(model, layer, 'o')}.weight")
    rows = weight if is_transposed(projection_of(model, layer, "o")) else weight.T
    by_head: Tensor = rows.unflatten(0, (heads, -1))
    return by_head


def _replacing(replaced: Sequence[Replaced]) -> Reader:
    """A reader that puts replacement i into the i-th copy of the texts."""

    def read(attention: LayerAttention) -> Tensor | None:
        if attention.layer != replaced[0].head.layer:
            return None
        out = attention.out.clone()
        texts = len(out) // len(replaced)
        for copy, one in enumerate(replaced):
            out[copy * texts : (copy + 1) * texts, one.head.index] = one.out.to(out)
        return out

    return read
