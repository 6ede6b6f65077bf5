"""What a model needs, by count and by one measured layer; run it where there is a GPU.

Bytes are counts of weights, masters and moments; activations are the hidden states that a
checkpointed layer keeps. Seconds come from one random layer of each shape, built and timed on the
device at hand: a GPU if there is one, else one core of this machine. Times on machines that are not
at hand are the counted operations over a rate that is assumed, and are called so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import GIGA, Options, one_thread


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

    def operations(self, length: int) -> int:
        """Of one token in one layer, in a text of so many tokens: matrices, scores and values."""
        return 2 * self.layer + 4 * self.hidden * length

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
class LayerRow:
    """One layer of a shape on the device at hand; None: it was not measured there."""

    model: str
    layer_gb: float  # in the precision in which it runs there
    forward_ms: float | None  # of 512 tokens
    diagnose_ms: float | None
    diagnose_to_forward: float | None
    gflop_s: float | None  # operations of the plain pass over the time of the measured one
    peak_gb: float | None  # of the device, where it counts that


@dataclass(frozen=True)
class MemoryRow:
    """Gigabytes of one model in bfloat16, and the smallest machine for each kind of work."""

    model: str
    weights_gb: float
    streamed_gb: float  # one layer in float32, and the hidden states of 65,536 tokens
    repair_gb: float  # with a third of the heads trained, 4,096 tokens a step
    diagnose_on: str
    repair_on: str


@dataclass(frozen=True)
class TimeRow:
    """A diagnosis of 65,536 tokens: on the device at hand from its layer, elsewhere by rate."""

    model: str
    here: str  # a star: the rate of the largest shape that was measured
    small_gpu: str
    large_gpu: str
    eight_gpus: str
    repair_step: str  # 4,096 tokens on the smallest of these that holds it


@dataclass(frozen=True)
class Machine:
    """Somebody's GPUs: memory is known, rates are assumed."""

    name: str
    memory: float  # GB
    rate: float  # operations a second that a diagnosis gets out of them, together
    link: float = 12.0  # GB/s at which weights that do not fit come from the computer's memory


# Assumed: a third of the makers' dense bfloat16 or float16 peak. Layers spread over several GPUs
# work one after the other, so eight have the memory of eight and the rate of one.
MACHINES = (
    Machine("16 GB GPU", 16.0, 20e12),
    Machine("80 GB GPU", 80.0, 100e12),
    Machine("8 x 80 GB", 640.0, 100e12),
)


_TRAINED = 1 / 3  # of the heads
_STEP_TOKENS, _READ_TOKENS, _LENGTH = 4096, 65_536, 512
_BATCH = 16_384  # tokens a forward pass where weights are offloaded: each brings them anew
_BYTES = 2  # bfloat16
_STATE = 16  # master, gradient and two moments in float32
_USABLE = 0.9  # of a device's memory
_PASSES = 3  # of a checkpointed step: forward, forward again, backward of the activations
_MOST_GB = 1.0  # a layer larger than this is not measured on a CPU


def run(options: Options) -> list[LayerRow | MemoryRow | TimeRow]:
    """On the GPU, else on one core."""
    return gpu_rows()


def gpu_rows(device: str | None = None) -> list[LayerRow | MemoryRow | TimeRow]:
    """Layers as measured here, then memory and time of whole models."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    layers = [measured_layer(shape, chosen) for shape in SHAPES]
    return [*layers, *memory_rows(), *times(layers)]


def memory_rows() -> list[MemoryRow]:
    """The memory table."""
    return [_memory(shape) for shape in SHAPES]


def _memory(shape: ModelShape) -> MemoryRow:
    weights = shape.weights * _BYTES
    streamed = shape.layer * 4 + _READ_TOKENS * shape.hidden * 4
    repair = _repair_bytes(shape)
    return MemoryRow(
        shape.name,
        round(weights / GIGA, 1),
        round(streamed / GIGA, 1),
        round(repair / GIGA, 1),
        smallest_machine(_diagnose_bytes(shape)),
        smallest_machine(repair),
    )


def _diagnose_bytes(shape: ModelShape) -> float:
    return shape.weights * _BYTES + _BATCH * shape.hidden * _BYTES * 8


def _repair_bytes(shape: ModelShape) -> float:
    slices = shape.layers * shape.attention * _TRAINED
    kept = _STEP_TOKENS * shape.hidden * _BYTES * (shape.layers + 2 * shape.inner // shape.hidden)
    return shape.weights * _BYTES + slices * _STATE + kept


def smallest_machine(needed: float) -> str:
    """The first machine that holds so many bytes, or what to do without one."""
    return next((one.name for one in MACHINES if _holds(one, needed)), "offloaded")


def _holds(machine: Machine, needed: float) -> bool:
    return needed < _USABLE * machine.memory * GIGA


def times(layers: Sequence[LayerRow]) -> list[TimeRow]:
    """The time table; a shape that was not measured gets the rate of the last one that was."""
    rows, rate = [], None
    for shape, layer in zip(SHAPES, layers, strict=True):
        rate = layer.gflop_s or rate
        here = "" if rate is None else shown_seconds(_operations(shape) / (rate * 1e9))
        star = "" if layer.gflop_s else "*"
        small, large, eight = (_diagnose_time(shape, machine) for machine in MACHINES)
        rows.append(TimeRow(shape.name, here + star, small, large, eight, _repair_time(shape)))
    return rows


def _operations(shape: ModelShape, tokens: int = _READ_TOKENS) -> float:
    return float(tokens * shape.layers * shape.operations(_LENGTH))


def _diagnose_time(shape: ModelShape, machine: Machine) -> str:
    """Operations over the rate; what does not fit comes over the link once for every batch."""
    seconds = _operations(shape) / machine.rate
    over = _diagnose_bytes(shape) - _USABLE * machine.memory * GIGA
    if over <= 0:
        return shown_seconds(seconds)
    passes = _READ_TOKENS / _BATCH
    return f"{shown_seconds(seconds + passes * over / (machine.link * GIGA))}, offloaded"


def _repair_time(shape: ModelShape) -> str:
    """One step on the smallest machine that holds it."""
    found = [one for one in MACHINES if _holds(one, _repair_bytes(shape))]
    if not found:
        return "offloaded"
    seconds = _PASSES * _operations(shape, _STEP_TOKENS) / found[0].rate
    return f"{shown_seconds(seconds)} on {found[0].name}"


def shown_seconds(seconds: float) -> str:
    """Two figures: more would not be believed."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"


def measured_layer(shape: ModelShape, device: str, tokens: int = _LENGTH) -> LayerRow:
    """One layer in figures; those of one that does not fit stay empty."""
    import torch

    size = shape.layer * (_BYTES if device != "cpu" else 4) / GIGA
    blank = LayerRow(shape.name, round(size, 2), *(None,) * 5)
    if device == "cpu" and size > _MOST_GB:
        return blank
    try:
        forward, diagnosed, peak = _layer_times(shape, device, tokens)
    except torch.OutOfMemoryError:
        return blank
    return replace(
        blank,
        forward_ms=round(forward * 1e3, 1),
        diagnose_ms=round(diagnosed * 1e3, 1),
        diagnose_to_forward=round(diagnosed / forward, 2),
        gflop_s=round(tokens * shape.operations(tokens) / diagnosed / 1e9, 1),
        peak_gb=round(peak / GIGA, 2) if peak else None,
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
        measure_heads(model, batches(ids.tolist(), 1))

    with one_thread():
        seconds = _seconds(plain, device), _seconds(measured, device)
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    return *seconds, float(peak)


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
    """The smallest of some runs, of which the first warms up; of a CPU its own seconds."""
    import torch

    clock = time.process_time if device == "cpu" else time.perf_counter
    found = []
    for _ in range(2 if device == "cpu" else 4):
        started = clock()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(clock() - started)
    return min(found)
