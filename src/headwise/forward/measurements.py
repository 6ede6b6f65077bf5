"""Run measurements: several share the forward passes of the batches that they have in common.

A measurement is a generator that yields one `HookedPass` and, when its batches have been run,
returns what it made of them. In memory batch follows batch, shared out over the processes that work
as one; a model on disk takes all batches through one layer before the next is read. Either way a
layer's observations come in the order of the batches: sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from headwise.forward.hooked_pass import HookedPass, SharedBatch, shared_batches
from headwise.forward.losses import token_losses
from headwise.forward.tap import LayerAttention, tapped
from headwise.models.architectures import backbone_of, device_of, layers_of
from headwise.models.stored_weights import stored_weights
from headwise.progress import Progress, silent
from headwise.ranks import shared_out

Result = TypeVar("Result")
Measurement = Generator[HookedPass[Any], None, Result]
# the place of a pass in `SharedBatch.seen_by`, the layer (None: losses), and what it takes
_Seen = tuple[int, int | None, Any]


def run_measurement(
    model: PreTrainedModel, measurement: Measurement[Result], *, progress: Progress = silent
) -> Result:
    """The result of one measurement."""
    run_passes(model, [next(measurement)], progress=progress)
    return _result(measurement)


def run_measurements(
    model: PreTrainedModel,
    measurements: Sequence[Measurement[Any]],
    *,
    title: str = "",
    progress: Progress = silent,
) -> list[Any]:
    """The results of several measurements; a batch that they share runs once."""
    run_passes(model, [next(one) for one in measurements], title=title, progress=progress)
    return [_result(one) for one in measurements]


def _result(measurement: Measurement[Result]) -> Result:
    try:
        next(measurement)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a measurement yields one pass")


def run_passes(
    model: PreTrainedModel,
    passes: Sequence[HookedPass[Any]],
    *,
    title: str = "",
    progress: Progress = silent,
) -> None:
    """Run all batches of all passes, each batch once. In memory the output head is not run."""
    if stored_weights(model) is not None:
        from headwise.forward.layer_by_layer import run_layer_by_layer  # late: few models need it

        run_layer_by_layer(model, passes, title=title, progress=progress)
        return
    for one in passes:
        if one.visit is not None:
            for number in range(len(layers_of(model))):
                one.visit(number)
    batches, title = shared_batches(passes), title or passes[0].title
    if batches:
        progress(title, 0, len(batches), "")
    runs = shared_out(lambda at: _run(model, batches[at]), range(len(batches)))
    for at, seen in runs:
        for place, layer, value in seen:
            one, own_number = batches[at].seen_by[place]
            one.take(own_number, layer, value)
        progress(title, at + 1, len(batches), "")


@torch.inference_mode()
def _run(model: PreTrainedModel, batch: SharedBatch) -> list[_Seen]:
    """What the passes see of one batch, layer by layer, and its losses."""
    seen: list[_Seen] = []

    def read(attention: LayerAttention) -> None:
        for place, (one, number) in enumerate(batch.seen_by):
            if one.observe is not None:
                seen.append((place, attention.layer, one.observe(number, attention)))

    def emit(place: int, layer: int, value: Any) -> None:
        seen.append((place, layer, value))

    with ExitStack() as stack:
        for place, (one, number) in enumerate(batch.seen_by):
            if one.listen is not None:
                stack.enter_context(one.listen(number, partial(emit, place)))
        stack.enter_context(tapped(model, read))
        inputs = batch.ids.to(device_of(model))
        last = backbone_of(model)(input_ids=inputs, use_cache=False).last_hidden_state
        for place, targets in batch.targets():
            losses = token_losses(model, last, targets.to(last.device)).cpu()
            seen.append((place, None, losses))
    return seen
