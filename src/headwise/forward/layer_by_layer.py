"""A model on disk, layer by layer: all texts pass through one layer before the next is read.

So each weight is read once, whoever wants to see what: batches that several passes share run once,
and the output head is read once for all losses. A layer runs inside its own model, the layers
below passing on what they get, so that masks, positions and norms stay the family's own code; and
every layer is also run as the model itself would run it, on one short text: no row is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward.faithfulness import beyond_rounding, is_half
from headwise.forward.hooked_pass import HookedPass, SharedBatch, shared_batches
from headwise.forward.losses import stored_losses
from headwise.forward.partial_run import LayerInput, after_layers, layer_input, run_layer
from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.forward.tap import LayerAttention, Reader, tapped
from headwise.models.architectures import architecture_of, attention_layers, layers_of
from headwise.models.stored_weights import at_hand, stored_weights
from headwise.progress import Progress, silent

_PROOF_TOKENS = 64  # of one text, on which each layer's tapped run is compared with its own
_EXACT = 2e-3  # of the output's size


def run_layer_by_layer(
    model: PreTrainedModel,
    passes: Sequence[HookedPass[Any]],
    *,
    title: str = "",
    progress: Progress = silent,
) -> None:
    """Take all batches of all passes through the model, layer after layer."""
    batches = shared_batches(passes)
    count = len(layers_of(model))
    stop = max(count if one.stop is None else one.stop for one in passes)
    title = title or passes[0].title
    progress(title, 0, stop, "layers")
    with embedding_by_rows(model):
        states = [first_state(model, batch.ids) for batch in batches]
        for layer in range(stop):
            with layer_at_hand(model, layer):
                for one in passes:
                    if one.visit is not None:
                        one.visit(layer)
                if batches:
                    require_faithful(model, layer, batches[0].ids, states[0])
                for place, batch in enumerate(batches):
                    states[place] = _observed(model, layer, batch, states[place])
            progress(title, layer + 1, stop, "layers")
        _take_losses(model, batches, states)


def _observed(
    model: PreTrainedModel, layer: int, batch: SharedBatch, hidden: LayerInput
) -> LayerInput:
    """What one layer makes of a batch, while its passes look at it."""

    def read(attention: LayerAttention) -> None:
        for one, number in batch.seen_by:
            if one.observe is not None:
                one.take(number, attention.layer, one.observe(number, attention))

    with ExitStack() as stack:
        for one, number in batch.seen_by:
            if one.listen is not None:
                stack.enter_context(one.listen(number, partial(one.take, number)))
        return through(model, batch.ids, layer, hidden, read)


@torch.inference_mode()
def _take_losses(
    model: PreTrainedModel, batches: Sequence[SharedBatch], states: list[Tensor]
) -> None:
    """The losses of all batches at once: the output head is read from disk once."""
    wanted: list[tuple[HookedPass[Any], int]] = []
    lasts: list[Tensor] = []
    targets: list[Tensor] = []
    for place, batch in enumerate(batches):
        predicted = batch.targets()
        if not predicted:
            continue
        last = after_layers(model, batch.ids, states[place])
        wanted += [batch.seen_by[at] for at, _ in predicted]
        lasts += [last] * len(predicted)
        targets += [one for _, one in predicted]
        states[place] = last[:0]  # frees the memory of the hidden states
    losses = stored_losses(model, lasts, targets) if lasts else []
    for (one, number), values in zip(wanted, losses, strict=True):
        one.take(number, None, values)


@contextmanager
def layer_at_hand(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """One layer's weights in memory, and found to be numbers."""
    with at_hand(model, f"{architecture_of(model).layers}.{layer}") as weights:
        _require_finite(weights)
        yield


@torch.inference_mode()
def first_state(model: PreTrainedModel, ids: Tensor) -> LayerInput:
    """What enters the first layer."""
    with _weights_where_they_run(model):
        return layer_input(model, ids, 0)


@contextmanager
def _weights_where_they_run(model: PreTrainedModel) -> Iterator[None]:
    """Refuse a family that reads a weight outside of the module that has it.

    There accelerate's hooks do not bring it (dbrx's experts, the device of llama4's embedding).
    """
    try:
        yield
    except NotImplementedError as error:
        if "meta tensor" not in str(error).lower():
            raise
        raise ModelError(
            f"this {model.config.model_type!r} model cannot be streamed: its code reads weights "
            "outside of the modules that hold them",
            where=model.config._name_or_path or None,
            fix="load it whole (without --stream), on a machine with memory for it",
        ) from None


@torch.inference_mode()
def through(
    model: PreTrainedModel, ids: Tensor, layer: int, hidden: LayerInput, reader: Reader | None
) -> LayerInput:
    """What one layer makes of hidden states; a reader may look and replace, None: its own code."""
    with ExitStack() as stack:
        stack.enter_context(_weights_where_they_run(model))
        if reader is not None and layer in attention_layers(model):
            stack.enter_context(tapped(model, reader))
        return run_layer(model, ids, layer, hidden)


def require_faithful(model: PreTrainedModel, layer: int, ids: Tensor, hidden: LayerInput) -> None:
    """Refuse a layer that, run by headwise, gives another output than run by its own code."""
    if layer not in attention_layers(model):
        return
    few, start = ids[:1, :_PROOF_TOKENS], hidden[..., :1, :_PROOF_TOKENS, :]
    tapped_run = through(model, few, layer, start, lambda attention: None)
    own = through(model, few, layer, start, None)
    if is_half(model):
        apart = beyond_rounding(tapped_run, own, start)
    else:
        apart = float((tapped_run - own).abs().max() / own.abs().max().clamp_min(1e-30))
        apart = 0.0 if apart < _EXACT else apart
    if apart:
        raise UnknownArchitectureError(
            f"this {model.config.model_type!r} model is not what its row says: run by headwise "
            f"the output of layer {layer} differs by {apart:.1e} of its size",
            fix="nothing measured on it would be true",
        )


def _require_finite(weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise ModelError(
                f"weights hold NaN or infinity, first in {name}",
                fix="use an undamaged checkpoint; a half-precision conversion may have overflowed",
            )


@contextmanager
def embedding_by_rows(model: PreTrainedModel) -> Iterator[None]:
    """The token embedding reads the rows of the tokens at hand, never the whole table."""
    weights = stored_weights(model)
    assert weights is not None
    module = model.get_input_embeddings()
    name = next(n for n, part in model.named_modules() if part is module)
    factor = getattr(module, "embed_scale", None) if type(module) is not nn.Embedding else None
    plain = type(module) is nn.Embedding or factor is not None

    def gathering(_: nn.Module, previous: Forward) -> Forward:
        def forward(ids: Tensor) -> Tensor:
            rows = weights.rows(f"{name}.weight", ids)
            return rows if factor is None else rows * torch.as_tensor(factor).to(rows)

        return forward

    with replaced_forward([module] if plain else [], gathering, around_hooks=True):
        yield
