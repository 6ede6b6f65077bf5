"""What work will cost on this machine: CPU minutes by a short probe of the model, memory by count.

The probe is one forward pass of at most 128 tokens after a first one that warms up, of a streamed
model through one layer. It is timed by what the processor did for it, so that other work on the
machine does not count. Times are rough: attention over long texts is not in them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import SettingsError
from headwise.forward.layer_by_layer import embedding_by_rows, first_state, layer_at_hand, through
from headwise.models.architectures import architecture_of, device_of, layers_of, max_positions
from headwise.models.loading import free_memory
from headwise.models.stored_weights import StoredWeights, stored_weights
from headwise.progress import Work

MOST_HOURS = 24.0
_PROBE = 128  # tokens
_CHUNK = 256  # rows of logits alive at once
_PRODUCT, _PRODUCTS = 768, 12  # width of a matrix product that tells the speed, and how many
_EFFICIENCY = 0.6  # of the speed of a large matrix product: 0.56 to 0.93 on three models, one core
_FLOAT = 4  # bytes
_DISK = 45e6  # bytes a second: sorting, compressing and sealing Parquet, measured on one core
_TRAINED = 4 * _FLOAT  # master, gradient and two moments


@dataclass(frozen=True)
class Cost:
    """Minutes and gigabytes of a piece of work, and what the machine still has."""

    minutes: float  # of CPU, all cores together; on an accelerator of time
    gigabytes: float
    available: float  # gigabytes
    less: str = ""  # options that make it less

    @property
    def absurd(self) -> str:
        """Why nobody should start this by accident; empty if it is affordable."""
        if self.minutes > 60 * MOST_HOURS * torch.get_num_threads():
            return f"more than {MOST_HOURS:.0f} hours"
        if self.gigabytes > self.available:
            return f"more than the {self.available:.1f} GB that this process can have"
        return ""

    def __str__(self) -> str:
        cheaper = f" (less: {self.less})" if self.less else ""
        return (
            f"estimate: at most about {duration(self.minutes)} of CPU, {self.gigabytes:.1f} GB"
            f"{cheaper}"
        )


def duration(minutes: float) -> str:
    """A time as people say it."""
    if minutes < 1:
        return f"{max(1, round(60 * minutes))} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def estimate_cost(model: PreTrainedModel, work: Work) -> Cost:
    """Probe the model and price the work."""
    resident, stored = int(psutil.Process().memory_info().rss), stored_weights(model)
    if stored is None:
        held = max(resident, sum(p.numel() * p.element_size() for p in model.parameters()))
    else:
        hidden = int(model.config.get_text_config().hidden_size)
        held = resident + 2 * _layer_bytes(model, stored) + _FLOAT * work.waiting * hidden
    needed = held + _activation_bytes(model, work) + _TRAINED * work.trained
    total = (free_memory() + resident) / 1e9
    clock = time.process_time if device_of(model).type == "cpu" else time.perf_counter
    seconds = work.tokens * seconds_per_token(model, clock) + work.written / _DISK
    return Cost(seconds / 60, needed / 1e9, total, work.less)


def seconds_per_token(
    model: PreTrainedModel, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Of a plain forward pass with its output head; of a streamed model without it."""
    length = min(_PROBE, max_positions(model) or _PROBE)
    ids = torch.arange(length)[None] % int(model.config.get_text_config().vocab_size)
    if stored_weights(model) is not None:
        return _streamed_seconds(model, ids, clock) / length
    ids = ids.to(device_of(model))
    for _ in range(2):  # the first one warms up
        start = clock()
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
        taken = clock() - start
    return taken / length


def assumed_seconds_per_token(parameters: int) -> float:
    """Of a forward pass of a model that is not loaded: 2 operations a weight and token.

    Divided by what a core does on a matrix product: CPU seconds, within a factor of two.
    """
    left, right = torch.rand(2, _PRODUCT, _PRODUCT)
    times = []
    for _ in range(_PRODUCTS):
        start = time.process_time()
        left @ right
        times.append(time.process_time() - start)
    operations_a_second = 2 * _PRODUCT**3 / sorted(times)[_PRODUCTS // 2]
    return 2 * parameters / (_EFFICIENCY * operations_a_second)


def _streamed_seconds(model: PreTrainedModel, ids: Tensor, clock: Callable[[], float]) -> float:
    """Of all layers, from one that is read and then run twice; reading itself is once for all."""
    with embedding_by_rows(model):
        hidden = first_state(model, ids)
        with layer_at_hand(model, 0):
            for _ in range(2):  # the first one warms up
                start = clock()
                through(model, ids, 0, hidden, None)
                taken = clock() - start
    return taken * len(layers_of(model))


def _layer_bytes(model: PreTrainedModel, stored: StoredWeights) -> int:
    """The largest layer, in the precision it is read in."""
    prefix, size = f"{architecture_of(model).layers}.", stored.dtype.itemsize
    layers: Counter[str] = Counter()
    for name, one in stored.tensors.items():
        if name.startswith(prefix):
            layers[name.removeprefix(prefix).partition(".")[0]] += one.numel * size
    return max(layers.values())


def require_affordable(cost: Cost, work: Work, yes: bool) -> None:
    """Raise if the estimate exceeds what this machine can do and `yes` is false."""
    if cost.absurd and not yes:
        raise SettingsError(
            f"this would take {cost.absurd} ({replace(cost, less='')})",
            fix=f"ask for less ({work.less}), or pass --yes",
        )


def _activation_bytes(model: PreTrainedModel, work: Work) -> int:
    """One layer of the batch, every layer of what is kept, and a chunk of logits with its slope."""
    config = model.config.get_text_config()
    hidden = int(config.hidden_size)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else int(inner)  # one per layer
    token = _FLOAT * (8 * hidden + 3 * inner)  # of one layer
    logits = 2 * _FLOAT * min(_CHUNK, work.batch) * int(config.vocab_size)
    return work.batch * token + work.kept * token * int(config.num_hidden_layers) + logits
