"""Show every layer of every batch to an observer, however the model is run.

Batch by batch, the batches shared out over the processes that work together; or, for a model that
is streamed from disk, all batches through one layer before the next is read. Several measurements
then go through the model in one reading: each is a generator that says what it wants to see, is
shown it, and returns what it made of it. Either way a layer's observations come in the order of the
batches: sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.layer_by_layer import Finish, HookedPass, Observe, run_layer_by_layer
from headwise.forward.losses import token_losses
from headwise.forward.partial_run import Hidden
from headwise.forward.tap import LayerAttention, tapped
from headwise.models.architectures import backbone_of, device_of, layers_of
from headwise.models.stored_weights import stored_weights
from headwise.progress import Progress, silent
from headwise.ranks import shared_out

Found = TypeVar("Found")
Made = TypeVar("Made")
Measurement = Generator[HookedPass[Any], None, Made]  # yields one reading, and returns a result


def run_measurement(
    model: PreTrainedModel, measuring: Measurement[Made], *, progress: Progress = silent
) -> Made:
    """The result of one measurement."""
    made: Made = run_measurements(model, [measuring], progress=progress)[0]
    return made


def run_measurements(
    model: PreTrainedModel,
    measurings: Sequence[Measurement[Any]],
    *,
    title: str = "",
    progress: Progress = silent,
) -> list[Any]:
    """The results of several measurements; a streamed model is read once for all of them."""
    readings = [next(one) for one in measurings]
    if stored_weights(model) is not None:
        run_layer_by_layer(model, readings, title=title, progress=progress)
    else:
        for reading in readings:
            _read_loaded(model, reading, progress)
    return [_made(one) for one in measurings]


def _made(measuring: Measurement[Made]) -> Made:
    try:
        next(measuring)
    except StopIteration as end:
        made: Made = end.value
        return made
    raise AssertionError("a measurement has one reading")


def observed(
    model: PreTrainedModel,
    ids: Sequence[Tensor],  # each (text, position)
    observe: Observe[Found] | None,
    finish: Finish[Found] | None = None,
    *,
    title: str = "",
    progress: Progress = silent,
) -> Iterator[tuple[int, int | None, Found]]:
    """(batch, layer, what was observed) for all batches; with `finish` also (batch, None, ...).

    The output head is not run: attention does not need it, and `finish` may.
    """
    found: list[tuple[int, int | None, Found]] = []

    def take(number: int, layer: int | None, one: Found) -> None:
        found.append((number, layer, one))

    reading = HookedPass(ids, take, observe=observe, finish=finish, title=title)
    if stored_weights(model) is not None:
        run_layer_by_layer(model, [reading], title=title, progress=progress)
        yield from found
        return
    for _ in _numbers(model, reading, progress):
        yield from found
        found.clear()


def _read_loaded(model: PreTrainedModel, reading: HookedPass[Any], progress: Progress) -> None:
    """Batch after batch through the whole model."""
    for _ in _numbers(model, reading, progress):
        pass


def _numbers(model: PreTrainedModel, reading: HookedPass[Any], progress: Progress) -> Iterator[int]:
    """The numbers of the batches, each when all that was found in it has been taken."""
    if reading.visit is not None:
        for each in range(len(layers_of(model))):
            reading.visit(each)
    count = len(reading.ids)
    if count:
        progress(reading.title, 0, count, "")
    for number, seen in shared_out(lambda number: _run(model, reading, number), range(count)):
        for layer, value in seen:
            reading.take(number, layer, value)
        yield number
        progress(reading.title, number + 1, count, "")


def _run(
    model: PreTrainedModel, reading: HookedPass[Found], number: int
) -> list[tuple[int | None, Any]]:
    """What one batch shows, layer by layer, and after the last one."""
    found: list[tuple[int | None, Any]] = []

    def read(attention: LayerAttention) -> None:
        if reading.observe is not None:
            found.append((attention.layer, reading.observe(number, attention)))

    with torch.inference_mode(), ExitStack() as stack:
        if reading.listen is not None:
            stack.enter_context(reading.listen(number, lambda *one: found.append(one)))
        if reading.observe is not None or reading.listen is None:
            stack.enter_context(tapped(model, read))
        inputs = reading.ids[number].to(device_of(model))
        last = backbone_of(model)(input_ids=inputs, use_cache=False).last_hidden_state
        if reading.finish is not None:
            found.append((None, reading.finish(number, last)))
        if reading.targets[number:] and reading.targets[number] is not None:
            found.append((None, _losses(model, last, reading.targets[number])))
    return found


def _losses(model: PreTrainedModel, last: Hidden, targets: Tensor | None) -> Tensor:
    assert targets is not None
    return token_losses(model, last, targets.to(last.device)).cpu()
