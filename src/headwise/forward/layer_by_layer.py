"""A model on disk, layer by layer: all texts pass through one layer before the next is read.

So each weight is read once, whoever wants to see what: batches that several readings share run
once, and the output head is read once for all losses. A layer runs inside its own model, the layers
below passing on what they get, so that masks, positions and norms stay the family's own code; and
every layer is also run as the model itself would run it, on one short text: no row is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward.losses import stored_losses
from headwise.forward.partial_run import Hidden, LayerInput, after_layers, layer_input, run_layer
from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.forward.tap import LayerAttention, Reader, tapped
from headwise.models.architectures import architecture_of, attention_layers, layers_of
from headwise.models.stored_weights import at_hand, stored_weights
from headwise.progress import Progress, silent

Found = TypeVar("Found")
Observe = Callable[[int, LayerAttention], Found]  # of a batch by its number, and one of its layers
Finish = Callable[[int, Hidden], Found]  # of a batch and its last hidden states
Visit = Callable[[int], None]  # of a layer whose weights are at hand
Emit = Callable[[int, Found], object]  # of a layer and what a hook has heard in it
Listen = Callable[[int, Emit[Found]], AbstractContextManager[object]]  # hooks, for one batch

_PROOF_TOKENS = 64  # of one text, on which each layer's tapped run is compared with its own
_DIFFERENCE = {torch.bfloat16: 0.2, torch.float16: 0.05}  # of the output's size, by rounding alone
_EXACT = 2e-3


@dataclass(frozen=True)
class HookedPass(Generic[Found]):
    """Batches that go through a model, what is looked at in them, and who is told of it.

    `take` hears (batch, layer, what was observed), and (batch, None, ...) of what `finish` finds
    and of the losses at `targets`, (text, position). `listen` opens hooks while a batch runs.
    `visit` is called once a layer while its weights are at hand. Layers from `stop` on are not run.
    """

    ids: Sequence[Tensor]  # each (text, position)
    take: Callable[[int, int | None, Any], None]
    observe: Observe[Found] | None = None
    listen: Listen[Found] | None = None
    finish: Finish[Found] | None = None
    targets: Sequence[Tensor | None] = ()
    visit: Visit | None = None
    stop: int | None = None
    title: str = ""


def run_layer_by_layer(
    model: PreTrainedModel,
    readings: Sequence[HookedPass[Any]],
    *,
    title: str = "",
    progress: Progress = silent,
) -> None:
    """Take all batches of all readings through the model, layer after layer."""
    runs = _runs(readings)
    count = len(layers_of(model))
    stop = max(count if reading.stop is None else reading.stop for reading in readings)
    told = title or readings[0].title
    progress(told, 0, stop, "layers")
    with embedding_by_rows(model):
        states = [first_state(model, run.ids) for run in runs]
        for layer in range(stop):
            with layer_at_hand(model, layer):
                for reading in readings:
                    if reading.visit is not None:
                        reading.visit(layer)
                if runs:
                    require_faithful(model, layer, runs[0].ids, states[0])
                for place, run in enumerate(runs):
                    states[place] = run.through(model, layer, states[place])
            progress(told, layer + 1, stop, "layers")
        _finish(model, runs, states)


@dataclass(frozen=True)
class _Run:
    """A batch, and whoever looks at it: readings with the number that it has there."""

    ids: Tensor
    seen_by: list[tuple[HookedPass[Any], int]] = field(default_factory=list)

    def through(self, model: PreTrainedModel, layer: int, hidden: LayerInput) -> LayerInput:
        """What one layer makes of the batch, while it is looked at."""
        with ExitStack() as stack:
            for reading, number in self.seen_by:
                if reading.listen is not None:
                    stack.enter_context(reading.listen(number, _telling(reading, number)))
            return through(model, self.ids, layer, hidden, self._read)

    def _read(self, attention: LayerAttention) -> None:
        for reading, number in self.seen_by:
            if reading.observe is not None:
                reading.take(number, attention.layer, reading.observe(number, attention))

    def wanted(self) -> list[tuple[HookedPass[Any], int, Tensor]]:
        """Readings that want losses of this batch, with its number there and its targets."""
        return [
            (reading, number, targets)
            for reading, number in self.seen_by
            for targets in reading.targets[number : number + 1]
            if targets is not None
        ]


def _telling(reading: HookedPass[Any], number: int) -> Emit[Any]:
    return lambda layer, found: reading.take(number, layer, found)


def _runs(readings: Sequence[HookedPass[Any]]) -> list[_Run]:
    """Every batch once, however many readings have it; within one all keep their order."""
    runs: dict[tuple[torch.Size, bytes, int], _Run] = {}
    for reading in readings:
        met: Counter[tuple[torch.Size, bytes]] = Counter()
        for number, ids in enumerate(reading.ids):
            key = ids.shape, ids.cpu().numpy().tobytes()
            runs.setdefault((*key, met[key]), _Run(ids)).seen_by.append((reading, number))
            met[key] += 1
    return list(runs.values())


@torch.inference_mode()
def _finish(model: PreTrainedModel, runs: Sequence[_Run], states: list[Tensor]) -> None:
    """What is wanted of the last hidden states; losses of all batches at once."""
    jobs: list[tuple[HookedPass[Any], int]] = []
    lasts: list[Tensor] = []
    targets: list[Tensor] = []
    for place, run in enumerate(runs):
        finishing = [(r, number, r.finish) for r, number in run.seen_by if r.finish is not None]
        wanted = run.wanted()
        if not finishing and not wanted:
            continue
        last = after_layers(model, run.ids, states[place])
        for reading, number, finish in finishing:
            reading.take(number, None, finish(number, last))
        jobs += [(reading, number) for reading, number, _ in wanted]
        lasts += [last] * len(wanted)
        targets += [one for _, _, one in wanted]
        states[place] = last[:0]  # its memory is wanted elsewhere
    for (reading, number), losses in zip(jobs, _losses(model, lasts, targets), strict=True):
        reading.take(number, None, losses)


def _losses(model: PreTrainedModel, lasts: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    return stored_losses(model, lasts, targets) if lasts else []


@contextmanager
def layer_at_hand(model: PreTrainedModel, layer: int) -> Iterator[None]:
    """One layer's weights in memory, and found to be numbers."""
    with at_hand(model, f"{architecture_of(model).layers}.{layer}") as weights:
        _require_finite(weights)
        yield


@torch.inference_mode()
def first_state(model: PreTrainedModel, ids: Tensor) -> LayerInput:
    """What enters the first layer."""
    return layer_input(model, ids, 0)


@torch.inference_mode()
def through(
    model: PreTrainedModel, ids: Tensor, layer: int, hidden: LayerInput, reader: Reader | None
) -> LayerInput:
    """What one layer makes of hidden states; a reader may look and replace, None: its own code."""
    with ExitStack() as stack:
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
def embedding_by_rows(model: PreTrainedModel) -> Iterator[None]:
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
