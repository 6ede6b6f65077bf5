"""One reading of a model that is being trained, and not a bit of the training changed by it.

Inside `undisturbed` the model is in eval mode, without gradients and autocast; afterwards the
random states (torch on every device, numpy, Python), each module's mode and every buffer are what
they were. Weights, gradients and the optimizer are never written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.artefacts import versions
from headwise.diagnosis.diagnose import SINK_RATE_EPSILON
from headwise.diagnosis.measures import query_weights, watched_measures
from headwise.diagnosis.settings import DiagnoseSettings
from headwise.errors import HeadwiseError
from headwise.forward.guard import guard
from headwise.forward.tap import LayerAttention, tapped
from headwise.models.architectures import backbone_of, device_of, geometry_of
from headwise.models.loaded_model import LoadedModel
from headwise.provenance import MeasureSettings, Provenance
from headwise.texts.batches import Batch, batches, encode_for
from headwise.texts.text_sets import TextSet

WATCHED = ("first_token_mass", "entropy", "output_norm", "max_logit")
Maps = dict[str, Float[np.ndarray, "layer head"]]


def encode_probe(
    loaded: LoadedModel, texts: TextSet, settings: DiagnoseSettings
) -> tuple[tuple[Batch, ...], Provenance]:
    """The probe's token batches and where their numbers come from.

    A model that headwise would read wrongly is refused here, before anything is read.
    """
    encoded = encode_for(loaded, texts.texts, max_length=settings.max_length)
    guard(loaded.model, max(map(len, encoded)))
    measured = MeasureSettings(loaded.length(settings.max_length), 0, loaded.bos)
    described = texts.describe(sum(map(len, encoded)))
    probe = tuple(batches(encoded, settings.batch_size, model=loaded.model))
    return probe, Provenance(described, measured, versions())


def read_heads(model: nn.Module, probe: tuple[Batch, ...]) -> Maps:
    """Every head's measures, mean over texts, and the share of texts that it sinks on."""
    with undisturbed(model):
        values = _measure(bare(model), probe)
    maps = {name: values[name].mean(0) for name in WATCHED}
    sinks = values["first_token_mass"] > SINK_RATE_EPSILON
    maps["sink_rate"] = sinks.mean(0)
    if values["learned_sink_share"].any():
        maps["learned_sink_share"] = values["learned_sink_share"].mean(0)
    return maps


def _measure(
    model: PreTrainedModel, chosen: tuple[Batch, ...]
) -> dict[str, Float[np.ndarray, "text layer head"]]:
    geometry, device = geometry_of(model), device_of(model)
    shape = (sum(len(b.index) for b in chosen), geometry.num_layers, geometry.num_heads)
    values = {name: np.zeros(shape) for name in (*WATCHED, "learned_sink_share")}
    for batch in chosen:
        weights, rows = query_weights(batch, 0).to(device), list(batch.index)

        def read(
            attention: LayerAttention, weights: Tensor = weights, rows: list[int] = rows
        ) -> None:
            measured = watched_measures(attention, weights)
            row = geometry.layers.index(attention.layer)
            for name, array in values.items():
                array[rows, row] = measured[name].cpu().numpy()

        with tapped(model, read):
            backbone_of(model)(input_ids=batch.ids.to(device), use_cache=False)
    bad = [name for name, array in values.items() if not np.isfinite(array).all()]
    if bad:
        raise HeadwiseError(
            f"{bad[0]} is not a finite number: the model overflows on the probe texts",
            fix="training has diverged; lower the learning rate or go back to a checkpoint",
        )
    return values


def bare(model: nn.Module) -> PreTrainedModel:
    """The causal LM inside compile, DDP and PEFT wrappers; a sharded one is refused."""
    inside: Any = model
    while True:
        inner = getattr(inside, "_orig_mod", None) or getattr(inside, "module", None)
        if inner is None and hasattr(inside, "peft_config") and hasattr(inside, "get_base_model"):
            inner = inside.get_base_model()
        if inner is None:
            break
        inside = inner
    if any(hasattr(p, "ds_id") or hasattr(p, "placements") for p in inside.parameters()):
        raise HeadwiseError(
            "the weights are sharded (FSDP or ZeRO-3): no process has a whole head",
            fix="save checkpoints, and film them with `headwise watch CHECKPOINTS/`",
        )
    whole: PreTrainedModel = inside
    return whole


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; then everything that could steer training is as before."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(owner, name, value, value.clone()) for owner, name, value in _buffers(model)]
    own, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is the user's
    places = {parameter.device for parameter in model.parameters()}
    cuda = sorted(place.index or 0 for place in places if place.type == "cuda")
    plain = torch.autocast("cuda" if cuda else "cpu", enabled=False)
    try:
        with torch.random.fork_rng(cuda), torch.no_grad(), plain:
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for owner, name, value, copy in buffers:
            _restore(owner, name, value, copy)
        random.setstate(own)
        np.random.set_state(numpys)  # noqa: NPY002


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in model.modules():
        for name, value in owner._buffers.items():
            if value is not None:
                yield owner, name, value


def _restore(owner: nn.Module, name: str, value: Tensor, copy: Tensor) -> None:
    """The same tensor with the same numbers: rotary families may exchange theirs while running."""
    if owner._buffers.get(name) is not value:
        owner._buffers[name] = value
    if not torch.equal(value, copy):
        value.copy_(copy)
