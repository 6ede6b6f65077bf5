"""What a model needs, from a formula, and what a GPU user must still measure: `headwise bench gpu`.

Bytes are exact counts of weights, masters and moments; activations are the hidden states that a
checkpointed layer keeps. Seconds are never predicted: one layer of each shape is built at random
and timed on the device at hand, or left blank where it does not fit or there is no such device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIGA = 10**9


@dataclass(frozen=True)
class ModelShape:
    """The sizes that memory follows from."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int  # width of the MLP
    gated: bool
    vocabulary: int
    tied: bool

    @property
    def attention(self) -> int:
        """Attention weights of a layer, without biases."""
        keys = self.hidden * self.kv_heads // self.heads
        return 2 * self.hidden * self.hidden + 2 * self.hidden * keys

    @property
    def layer(self) -> int:
        """Matrix weights of a layer."""
        return self.attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def weights(self) -> int:
        """Of the whole model, matrices only: biases and norms are below 0.1% of it."""
        return self.layers * self.layer + self.hidden * self.vocabulary * (1 if self.tied else 2)


def _bloom(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, heads, 4 * hidden, False, 250_880, True)


SHAPES = (
    _bloom("BLOOM-560m", 24, 1024, 16),
    _bloom("BLOOM-1b1", 24, 1536, 16),
    _bloom("BLOOM-1b7", 24, 2048, 16),
    _bloom("BLOOM-3b", 30, 2560, 32),
    _bloom("BLOOM-7b1", 30, 4096, 32),
    _bloom("BLOOM-176B", 70, 14336, 112),
    ModelShape("Llama-3-8B", 32, 4096, 32, 8, 14336, True, 128_256, False),
    ModelShape("Llama-3-70B", 80, 8192, 64, 8, 28672, True, 128_256, False),
)


@dataclass(frozen=True)
class SizeRow:
    """Gigabytes of one model in bfloat16, and the smallest machine for each kind of work."""

    model: str
    weights_gb: float
    streamed_gb: float  # one layer in float32, and the hidden states of 65,536 tokens
    repair_gb: float  # with a third of the heads trained, 4,096 tokens a step
    diagnose_on: str
    repair_on: str


_TRAINED = 1 / 3  # of the heads
_STEP_TOKENS, _READ_TOKENS = 4096, 65_536
_BYTES = 2  # bfloat16
_STATE = 16  # master, gradient and two moments in float32
_MACHINES = (("16 GB GPU", 16.0), ("80 GB GPU", 80.0), ("8 x 80 GB", 640.0))
_USABLE = 0.9  # of a device's memory


def size_rows() -> list[SizeRow]:
    """The sizing table."""
    return [_size(shape) for shape in SHAPES]


def _size(shape: ModelShape) -> SizeRow:
    weights = shape.weights * _BYTES
    streamed = shape.layer * 4 + _READ_TOKENS * shape.hidden * 4
    slices = shape.layers * shape.attention * _TRAINED
    kept = _STEP_TOKENS * shape.hidden * _BYTES * (shape.layers + 2 * shape.inner // shape.hidden)
    repair = weights + slices * _STATE + kept
    return SizeRow(
        shape.name,
        round(weights / GIGA, 1),
        round(streamed / GIGA, 1),
        round(repair / GIGA, 1),
        smallest_machine(weights + _READ_TOKENS * shape.hidden * _BYTES),
        smallest_machine(repair),
    )


def smallest_machine(needed: float) -> str:
    """The first machine that holds so many bytes, or what to do without one."""
    for name, size in _MACHINES:
        if needed < _USABLE * size * GIGA:
            return name
    return "offloaded"


@dataclass(frozen=True)
class GpuRow:
    """One layer of a shape on a device, and what that makes for all layers; None: not measured."""

    model: str
    weights_gb: float
    layer_gb: float
    layer_forward_ms: float | None  # of 512 tokens
    layer_diagnose_ms: float | None
    diagnose_to_forward: float | None
    all_layers_s_per_1000_tokens: float | None
    peak_layer_gb: float | None


def gpu_rows(device: str | None = None, tokens: int = 512) -> Iterator[GpuRow]:
    """Time one random layer of every shape that fits; without a GPU the columns stay empty."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else None)
    for shape in SHAPES:
        blank = GpuRow(
            shape.name,
            round(shape.weights * _BYTES / GIGA, 1),
            round(shape.layer * _BYTES / GIGA, 2),
            *(None,) * 5,
        )
        yield blank if chosen is None else measured_layer(blank, shape, chosen, tokens)


def measured_layer(blank: GpuRow, shape: ModelShape, device: str, tokens: int) -> GpuRow:
    """Fill in a row; a layer that does not fit leaves it as it was."""
    import torch

    try:
        forward, diagnosed, peak = _layer_times(shape, device, tokens)
    except torch.OutOfMemoryError:
        return blank
    return GpuRow(
        blank.model,
        blank.weights_gb,
        blank.layer_gb,
        round(forward * 1e3, 2),
        round(diagnosed * 1e3, 2),
        round(diagnosed / forward, 2),
        round(diagnosed * shape.layers * 1000 / tokens, 3),
        round(peak / GIGA, 2),
    )


def _layer_times(shape: ModelShape, device: str, tokens: int) -> tuple[float, float, float]:
    """Seconds of a plain and of a measured forward pass of one layer, and its peak memory."""
    import torch

    from headwise.diagnosis.measures import measure_heads
    from headwise.texts.batches import batches

    model = _one_layer(shape).to(device, torch.bfloat16 if device != "cpu" else torch.float32)
    ids = torch.randint(3, 1000, (1, tokens))

    def plain() -> None:
        with torch.inference_mode():
            model.base_model(input_ids=ids.to(device), use_cache=False)

    def measured() -> None:
        measure_heads(model, batches(ids.tolist(), 1), num_texts=1, max_length=tokens)

    found = _seconds(plain, device), _seconds(measured, device)
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    return *found, float(peak)


def _one_layer(shape: ModelShape) -> Any:
    """A random model with one layer of the shape and a small vocabulary."""
    from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

    if not shape.gated:
        return BloomForCausalLM(
            BloomConfig(vocab_size=1000, hidden_size=shape.hidden, n_layer=1, n_head=shape.heads)
        ).eval()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
        )
    ).eval()


def _seconds(work: Any, device: str) -> float:
    """The smallest of three runs, after one that warms up."""
    import torch

    found = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])
