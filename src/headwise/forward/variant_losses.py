"""What variants of a model cost: exact losses of every document, re-running only what changed.

In memory the model runs once on a batch and what every layer got, and what its attention gave, is
kept. A variant differs from its lowest layer on: from there the model runs again, several variants
stacked in one batch. Where one head of that layer changes, its attention does not run again: the
head's share is corrected behind the output projection. A model on disk goes up layer by layer
instead (`variant_sweeps`). Ablation, triage, the dose search and first-order estimates call this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import HeadOutputs, Intervention, Variant, substitute
from headwise.forward.losses import shifted_targets, token_losses
from headwise.forward.partial_run import (
    Rerun,
    attention_calls,
    layer_inputs,
    replaced_attention,
    run_from,
)
from headwise.forward.replaced_forward import fused_gelu
from headwise.forward.tap import LayerAttention, tapped
from headwise.forward.variant_sweeps import TOKENS, sweep_variants
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
from headwise.models.stored_weights import stored_weights
from headwise.progress import Progress, silent, track
from headwise.ranks import shared_out
from headwise.texts.batches import Batch, batches

Losses = Float[np.ndarray, "document"]


@dataclass(frozen=True)
class VariantLosses:
    """Summed loss of every document in nats: of the model as it is, and of each variant."""

    base: Losses = field(repr=False)
    losses: Float[np.ndarray, "variant document"] = field(repr=False)
    tokens: Int[np.ndarray, "document"] = field(repr=False)  # predicted ones

    @property
    def deltas(self) -> Float[np.ndarray, "variant document"]:
        """Change of every document's summed loss; positive where the heads were useful."""
        deltas: Float[np.ndarray, "variant document"] = self.losses - self.base
        return deltas


def variant_losses(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    variants: Sequence[Variant],
    *,
    batch_size: int = 1,
    stack: int | None = None,
    title: str = "costs of heads",
    progress: Progress = silent,
) -> VariantLosses:
    """Exact losses of every document under every variant.

    In memory `stack` variants of `batch_size` texts run as one batch; by default one text (nothing
    is padding then) and as many variants as fill `TOKENS` tokens. From disk as many variants go up
    at once as their hidden states fit into memory.
    """
    work = list(batches(encoded, batch_size, model=model)) if variants else []
    base, losses = np.zeros(len(encoded)), np.zeros((len(variants), len(encoded)))
    tokens = np.array([len(ids) - 1 for ids in encoded])
    if work and stored_weights(model) is not None:
        order = [text for batch in work for text in batch.index]
        rows = sweep_variants(model, work, variants, title=title, progress=progress)
        base[order], losses[:, order] = rows[0], rows[1:]
        return VariantLosses(base, losses, tokens)

    def run(batch: Batch) -> tuple[Losses, Float[np.ndarray, "variant document"]]:
        return _batch_losses(model, batch, variants, stack)

    for batch, (own, changed) in track(shared_out(run, work), title, progress, count=len(work)):
        base[list(batch.index)] = own
        losses[:, list(batch.index)] = changed
    return VariantLosses(base, losses, tokens)


def head_costs(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    interventions: Sequence[Intervention],
    *,
    batch_size: int = 1,
    stack: int | None = None,
    progress: Progress = silent,
) -> Float[np.ndarray, "head kind document"]:
    """Change of every document's summed loss for each head alone under each intervention."""
    variants = [Variant((head,), kind) for head in heads for kind in interventions]
    costs = variant_losses(
        model, encoded, variants, batch_size=batch_size, stack=stack, progress=progress
    )
    return costs.deltas.reshape(len(heads), len(interventions), len(encoded))


@dataclass(frozen=True)
class BasePass:
    """The model as it is on one batch: what variants of it start from."""

    ids: Int[Tensor, "text position"]
    lengths: Int[Tensor, "text"]
    inputs: list[Tensor] = field(repr=False)  # of every layer
    attention: dict[int, LayerAttention] = field(repr=False)
    calls: dict[int, Rerun] = field(repr=False)
    attended: dict[int, Any] = field(repr=False)  # what attention modules returned, often a tuple
    losses: Losses = field(repr=False)


def base_pass(model: PreTrainedModel, batch: Batch, layers: Collection[int] = ()) -> BasePass:
    """Run a batch and keep every layer's input, and the attention of these layers."""
    ids = batch.ids.to(device_of(model))
    attention: dict[int, LayerAttention] = {}

    def read(one: LayerAttention) -> None:
        if one.layer in layers:
            attention[one.layer] = one

    with fused_gelu(model), tapped(model, read), attention_calls(model, layers) as calls:
        inputs, attended, last = layer_inputs(model, ids, layers)
    losses = _document_losses(model, last, ids, batch.lengths)
    return BasePass(ids, batch.lengths, inputs, attention, calls, attended, losses)


def losses_from(
    model: PreTrainedModel, base: BasePass, layer: int, copies: int = 1
) -> Float[np.ndarray, "copy document"]:
    """Losses of `copies` copies of the batch from `layer` on, as the open contexts change them."""
    ids = base.ids.repeat(copies, 1)
    with fused_gelu(model):
        start = torch.cat([base.inputs[layer]] * copies, -3)  # gemma3n: streams come before
        last = run_from(model, ids, layer, start)
    lengths = base.lengths.repeat(copies)
    return _document_losses(model, last, ids, lengths).reshape(copies, -1)


def _document_losses(model: PreTrainedModel, last: Tensor, ids: Tensor, lengths: Tensor) -> Losses:
    by_token = token_losses(model, last, shifted_targets(ids, lengths))
    losses: Losses = by_token.double().sum(1).cpu().numpy()
    return losses


@torch.inference_mode()
def _batch_losses(
    model: PreTrainedModel, batch: Batch, variants: Sequence[Variant], stack: int | None
) -> tuple[Losses, Float[np.ndarray, "variant document"]]:
    base = base_pass(model, batch, {variant.lowest for variant in variants})
    losses = np.zeros((len(variants), len(base.losses)))
    known: dict[Intervention, HeadOutputs] = {}  # of one layer; the next has its own
    layer = -1
    for numbers in _stacks(variants, stack or max(1, TOKENS // base.ids.numel())):
        some = [variants[number] for number in numbers]
        if some[0].lowest != layer:
            known, layer = {}, some[0].lowest
        for kind in {variant.intervention: None for variant in some}:
            if kind not in known:
                known[kind] = kind.outputs(base.attention[layer], base.calls[layer])
        losses[numbers] = _stacked_losses(model, base, some, known)
    return base.losses, losses


def _stacks(variants: Sequence[Variant], size: int) -> Iterator[list[int]]:
    """Variants with the same lowest layer, one head there or several; at most `size` in a stack."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for number, variant in enumerate(variants):
        several = len(variant.in_layer(variant.lowest)) > 1
        alike.setdefault((variant.lowest, not several), []).append(number)
    for _, numbers in sorted(alike.items()):
        yield from (numbers[at : at + size] for at in range(0, len(numbers), size))


def _stacked_losses(
    model: PreTrainedModel,
    base: BasePass,
    variants: Sequence[Variant],
    base_outputs: dict[Intervention, HeadOutputs],
) -> Float[np.ndarray, "variant document"]:
    """Variants with one lowest layer at once, one copy of the batch each."""
    layer = variants[0].lowest
    first = [variant.in_layer(layer)[0] for variant in variants]
    # of several heads too little might remain of the base output for their shares to be exact
    corrected = correctable(model) and len(variants[0].in_layer(layer)) == 1
    above = any(head.layer > layer for variant in variants for head in variant.heads)
    with ExitStack() as stack:
        calls = stack.enter_context(attention_calls(model)) if above else {}
        if not corrected or layer < attention_layers(model)[-1]:  # else the tap would see nothing

            def read(attention: LayerAttention) -> Tensor | None:
                return substitute(variants, attention, calls.get(attention.layer), base_outputs)

            stack.enter_context(tapped(model, read))
        if corrected:
            outputs = [
                base_outputs[variant.intervention][:, head.index]
                for variant, head in zip(variants, first, strict=True)
            ]
            stack.enter_context(corrected_attention(model, base, first, outputs))
        return losses_from(model, base, layer, len(variants))


def correctable(model: PreTrainedModel) -> bool:
    """Whether a head's share may be subtracted: in half precision the difference is too rough.

    A quantised output projection shows no share of a head.
    """
    return torch.finfo(model.dtype).bits >= 32 and not is_packed(model)


def corrected_attention(
    model: PreTrainedModel, base: BasePass, heads: Sequence[Head], outputs: Sequence[Tensor]
) -> AbstractContextManager[None]:
    """One layer's attention does not run: it gives its base output but for one head a copy."""
    layer = heads[0].layer
    own = base.attention[layer].out
    # the output projection head by head: the values of one stand together
    weight = held_tensor(model, f"{projection_name(model, layer, 'o')}.weight")
    rows = weight if is_transposed(projection_of(model, layer, "o")) else weight.T
    by_head = rows.unflatten(0, (own.shape[1], -1))  # (head, value, hidden)
    change = torch.stack(
        [out.to(own) - own[:, head.index] for head, out in zip(heads, outputs, strict=True)]
    )
    change = change @ by_head[[head.index for head in heads]][:, None]
    whole = base.attended[layer]
    out: Tensor = whole[0] if isinstance(whole, tuple) else whole
    stacked = (out + change).flatten(0, 1)
    output = (stacked, *whole[1:]) if isinstance(whole, tuple) else stacked
    return replaced_attention(model, layer, output)
