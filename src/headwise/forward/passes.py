"""Show every layer of every batch to an observer, however the model is run.

Batch by batch, the batches shared out over the processes that work together; or, for a model that
is streamed from disk, all batches through one layer before the next is read, so that each weight is
read once. Either way a layer's observations come in the order of the batches: sums have the same
bits. A streamed layer runs inside its own model, the layers below passing on what they get, so that
masks, positions and norms stay the family's own code; and every layer is also run as the model
itself would run it, on one short text: no row is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward.partial_run import Hidden, LayerInput, after_layers, layer_input, run_layer
from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.forward.tap import Reader, Sight, tapped
from headwise.models.architectures import (
    architecture_of,
    attention_layers,
    backbone_of,
    device_of,
    layers_of,
)
from headwise.models.stored_weights import at_hand, stored_weights
from headwise.progress import Progress, silent
from headwise.ranks import shared_out

Found = TypeVar("Found")
Observe = Callable[[int, Sight], Found]  # of a batch by its number, and one of its layers
Finish = Callable[[int, Hidden], Found]  # of a batch and its last hidden states
Visit = Callable[[int], None]  # of a layer whose weights are at hand

_PROOF_TOKENS = 64  # of one text, on which each layer's tapped run is compared with its own
_DIFFERENCE = {torch.bfloat16: 0.2, torch.float16: 0.05}  # of the output's size, by rounding alone
_EXACT = 2e-3


def observed(
    model: PreTrainedModel,
    ids: Sequence[Tensor],  # each (text, position)
    observe: Observe[Found] | None,
    finish: Finish[Found] | None = None,
    *,
    title: str = "",
    progress: Progress = silent,
    visit: Visit | None = None,
) -> Iterator[tuple[int, int | None, Found]]:
    """(batch, layer, what was observed) for all batches; with `finish` also (batch, None, ...).

    The output head is not run: attention does not need it, and `finish` may. `visit` is called once
    a layer while its weights are at hand.
    """
    if stored_weights(model) is not None:
        layers = len(layers_of(model))
        yield from _streamed(
            model, ids, observe, finish, visit, lambda done: progress(title, done, layers, "layers")
        )
        return
    if visit is not None:
        for number in range(len(layers_of(model))):
            visit(number)

    def run(number: int) -> list[tuple[int | None, Found]]:
        found: list[tuple[int | None, Found]] = []

        def read(sight: Sight) -> None:
            if observe is not None:
                found.append((sight.layer, observe(number, sight)))

        with torch.inference_mode(), tapped(model, read):
            inputs = ids[number].to(device_of(model))
            last = backbone_of(model)(input_ids=inputs, use_cache=False).last_hidden_state
            if finish is not None:
                found.append((None, finish(number, last)))
        return found

    if ids:
        progress(title, 0, len(ids), "")
    for number, seen in shared_out(run, range(len(ids))):
        for layer, value in seen:
            yield number, layer, value
        progress(title, number + 1, len(ids), "")


def _streamed(
    model: PreTrainedModel,
    ids: Sequence[Tensor],
    observe: Observe[Found] | None,
    finish: Finish[Found] | None,
    visit: Visit | None,
    tell: Callable[[int], None],
) -> Iterator[tuple[int, int | None, Found]]:
    """(batch, layer, what was observed), layer after layer; `tell` hears how many are done."""
    with _embedding_by_rows(model):
        states = [_first_state(model, one) for one in ids]
        for layer in range(len(layers_of(model))):
            with at_hand(model, f"{architecture_of(model).layers}.{layer}") as weights:
                _require_finite(weights)
                if visit is not None:
                    visit(layer)
                _require_faithful(model, layer, ids[0], states[0])
                for number, one in enumerate(ids):
                    seen = _Seen(number, observe)
                    states[number] = _through(model, one, layer, states[number], seen.read)
                    yield from ((number, layer, found) for found in seen.found)
            tell(layer + 1)
        if finish is not None:
            for number, one in enumerate(ids):
                yield number, None, _finished(model, one, states[number], number, finish)


class _Seen(Generic[Found]):
    """What an observer finds in one layer of one batch."""

    def __init__(self, number: int, observe: Observe[Found] | None) -> None:
        self.number, self.observe, self.found = number, observe, list[Found]()

    def read(self, sight: Sight) -> None:
        """A reader for the tap."""
        if self.observe is not None:
            self.found.append(self.observe(self.number, sight))


@torch.inference_mode()
def _first_state(model: PreTrainedModel, ids: Tensor) -> LayerInput:
    return layer_input(model, ids, 0)


@torch.inference_mode()
def _finished(
    model: PreTrainedModel,
    ids: Tensor,
    hidden: LayerInput,
    number: int,
    finish: Finish[Found],
) -> Found:
    return finish(number, after_layers(model, ids, hidden))


@torch.inference_mode()
def _through(
    model: PreTrainedModel, ids: Tensor, layer: int, hidden: LayerInput, reader: Reader | None
) -> LayerInput:
    with ExitStack() as stack:
        if reader is not None and layer in attention_layers(model):
            stack.enter_context(tapped(model, reader))
        return run_layer(model, ids, layer, hidden)


def _require_faithful(model: PreTrainedModel, layer: int, ids: Tensor, hidden: LayerInput) -> None:
    """Refuse a layer that, run by headwise, gives another output than run by its own code."""
    if layer not in attention_layers(model):
        return
    few, start = ids[:1, :_PROOF_TOKENS], hidden[..., :1, :_PROOF_TOKENS, :]
    tapped_run = _through(model, few, layer, start, lambda sight: None)
    own = _through(model, few, layer, start, None)
    apart = float((tapped_run - own).abs().max() / own.abs().max().clamp_min(1e-30))
    if not apart < _DIFFERENCE.get(model.dtype, _EXACT):
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
def _embedding_by_rows(model: PreTrainedModel) -> Iterator[None]:
    """The token embedding reads the rows of the tokens at hand, never the whole table."""
    weights = stored_weights(model)
    assert weights is not None
    module = model.get_input_embeddings()
    name = next(n for n, found in model.named_modules() if found is module)
    factor = getattr(module, "embed_scale", None) if type(module) is not nn.Embedding else None
    plain = type(module) is nn.Embedding or factor is not None

    def gathering(_: nn.Module, previous: Forward) -> Forward:
        def forward(ids: Tensor) -> Tensor:
            rows = weights.rows(f"{name}.weight", ids)
            return rows if factor is None else rows * torch.as_tensor(factor).to(rows)

        return forward

    with replaced_forward([module] if plain else [], gathering, around_hooks=True):
        yield
