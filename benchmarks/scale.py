"""A model larger than memory, and how the work grows.

A random model of BLOOM's shape is written to disk and diagnosed layer by layer in a process with a
limit on its address space; the kernel's own count of its memory stands beside the limit, and its
time beside the time to read the same files. Growth is the exponent of a power law, fitted to CPU
seconds at doubled sizes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import GIGA, Options, cpu_seconds, environment, one_thread
from headwise.progress import Progress, silent, stage


@dataclass(frozen=True)
class Shape:
    """A BLOOM model's sizes."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """All of them; the output head is the embedding."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden + 4 * self.hidden


BLOOM_3B = Shape(layers=30, hidden=2560, heads=32, vocabulary=250_880)
_POOL = 2**24 + 43  # random numbers; no width divides it, so rows differ
SMALL = Shape(layers=4, hidden=256, heads=8, vocabulary=2_000)


@dataclass(frozen=True)
class StreamedRow:
    """A diagnosis from disk under a memory limit, beside reading the files."""

    case: str
    weights_gb: float
    limit_gb: float
    peak_gb: float  # resident, the kernel's count of the whole process
    wall_s: float
    cpu_s: float
    read_s: float  # the same files once, by plain reads in the same run
    time_to_read: float
    texts: int
    tokens: int


@dataclass(frozen=True)
class GrowthRow:
    """CPU seconds of a diagnosis as one size doubles, and the fitted exponent."""

    case: str
    grows: str
    sizes: str
    cpu_s: str
    exponent: float


def run(options: Options) -> list[StreamedRow | GrowthRow]:
    """BLOOM-3b's shape inside 4 GB, or a small model."""
    folder = options.out / "scale"
    if options.quick:
        return bench_scale(folder=folder, shape=SMALL, texts=4, progress=options.progress)
    return bench_scale(folder=folder, progress=options.progress)


def bench_scale(
    *,
    folder: Path,
    shape: Shape = BLOOM_3B,
    limit_gb: float = 4.0,
    texts: int = 8,
    length: int = 64,
    progress: Progress = silent,
) -> list[StreamedRow | GrowthRow]:
    """A streamed diagnosis of a model on disk, and growth with tokens, texts, heads and layers."""
    model = folder / "model"
    try:
        stage(f"writing {shape.weights * 4 / GIGA:.1f} GB of random weights", progress)
        write_model(model, shape)
        stage("diagnosing it layer by layer", progress)
        streamed = _streamed(model, folder, shape, limit_gb, texts, length)
    finally:
        shutil.rmtree(model, ignore_errors=True)
    stage("growth", progress)
    return [streamed, *_growth()]


def write_model(folder: Path, shape: Shape, seed: int = 0) -> None:
    """A random BLOOM model in float32, one file a layer, never more than one layer in memory.

    To be quick, weights are stretches of one pool of normal numbers, each from a random place on.
    """
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import BloomConfig, BloomForCausalLM

    from headwise.models.patient import patient_dir

    config = BloomConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
    )
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(folder)
    for file in patient_dir().glob("*token*"):
        shutil.copy(file, folder / file.name)
    with init_empty_weights():
        model = BloomForCausalLM(config)
    torch.manual_seed(seed)
    pool = torch.randn(_POOL) * 0.02
    files: dict[str, str] = {}
    for name, part in _parts(model):
        shard = f"{name}.safetensors"
        tensors = {key: _random(key, tuple(value.shape), pool) for key, value in part.items()}
        save_file(tensors, folder / shard, {"format": "pt"})
        _to_disk(folder / shard)
        files |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": shape.weights * 4}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _to_disk(file: Path) -> None:
    """What is not on the disk yet cannot be forgotten by the kernel before it is read."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _parts(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of each layer, and what is outside of them one by one."""
    named = dict(model.named_parameters())
    named.pop("lm_head.weight", None)  # it is the embedding
    layers: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        inside = name.startswith("transformer.h.")
        key = f"layer-{int(name.split('.')[2]):03d}" if inside else name
        layers.setdefault(key, {})[name] = value
    yield from sorted(layers.items())


def _random(name: str, shape: tuple[int, ...], pool: Any) -> Any:
    import torch

    if len(shape) < 2:
        return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)  # of norms
    count, start = math.prod(shape), int(torch.randint(len(pool), ()))
    found = torch.empty(count)
    filled = 0
    while filled < count:
        part = pool[start : start + count - filled]
        found[filled : filled + len(part)] = part
        filled, start = filled + len(part), 0
    return found.view(shape)


def _streamed(
    model: Path, folder: Path, shape: Shape, limit_gb: float, texts: int, length: int
) -> StreamedRow:
    sample = folder / "texts.jsonl"
    sample.write_text("".join(json.dumps({"text": _text(n, length)}) + "\n" for n in range(texts)))
    read = _read_seconds(model)
    command = ["diagnose", str(model), "--texts", str(sample), "--max-length", str(length)]
    command += ["--batch-size", "2", "--stream", "--no-bos", "--no-figures", "--quiet"]
    command += ["--out", str(folder / "d")]
    started = time.perf_counter()
    peak, cpu = limited([sys.executable, "-m", "headwise", *command], limit_gb, folder)
    wall = time.perf_counter() - started
    found = json.loads((folder / "d" / "diagnosis.json").read_text())
    return StreamedRow(
        case=f"BLOOM, {shape.layers} layers of {shape.hidden}",
        weights_gb=round(sum(f.stat().st_size for f in model.glob("*.safetensors")) / GIGA, 2),
        limit_gb=limit_gb,
        peak_gb=round(peak / GIGA, 2),
        wall_s=round(wall, 1),
        cpu_s=round(cpu, 1),
        read_s=round(read, 1),
        time_to_read=round(wall / read, 1),
        texts=texts,
        tokens=int(found["provenance"]["texts"]["tokens"]),
    )


def _text(number: int, length: int) -> str:
    return " ".join(f"The ship {number + n} left the harbour." for n in range(length))


def _read_seconds(folder: Path) -> float:
    """Plain sequential reads of all weight files, first asked to be forgotten by the kernel."""
    started = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while opened.read(2**24):
                pass
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return time.perf_counter() - started


_LAUNCHER = """
import json, resource, subprocess, sys
limit, told, *command = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
code = subprocess.run(command).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(told, "w") as file:
    json.dump([code, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime], file)
"""


def limited(command: Sequence[str], limit_gb: float, folder: Path) -> tuple[int, float]:
    """Run with a limit on the address space; returns peak resident bytes, and CPU seconds.

    A process begins with the peak of the one that it was forked from. So it is not started here,
    where a model was just written, but by a small process of its own.
    """
    told = folder / "used.json"
    launcher = [sys.executable, "-c", _LAUNCHER, str(int(limit_gb * GIGA)), str(told)]
    subprocess.run(
        [*launcher, *command], env={**environment(), "MALLOC_ARENA_MAX": "2"}, check=True
    )
    code, peak, seconds = json.loads(told.read_text())
    if code:
        raise subprocess.CalledProcessError(code, list(command))
    return int(peak), float(seconds)


def _growth() -> Iterator[GrowthRow]:
    sizes: dict[str, tuple[Sequence[int], Callable[[int], tuple[Shape, int, int]]]] = {
        "tokens a text": ((256, 512, 1024, 2048), lambda n: (SMALL, 2, n)),
        "texts": ((4, 8, 16, 32), lambda n: (SMALL, n, 256)),
        "heads a layer": ((4, 8, 16, 32), lambda n: (_with_heads(n), 4, 512)),
        "layers": ((2, 4, 8, 16), lambda n: (_with_layers(n), 4, 512)),
    }
    fewer: dict[str, tuple[Sequence[int], Callable[[int], tuple[Shape, int, int]]]] = {
        "tokens a text": ((64, 128, 256, 512), lambda n: (SMALL, 2, n)),
        "texts": ((1, 2, 4, 8), lambda n: (SMALL, n, 128)),
        "heads a layer": ((2, 4, 8, 16), lambda n: (_with_heads(n), 2, 128)),
        "layers": ((2, 4, 8, 16), lambda n: (_with_layers(n), 2, 128)),
    }
    for case, work, cases in (("diagnose", _diagnosed, sizes), ("ablation", _ablated, fewer)):
        for name, (steps, made) in cases.items():
            seconds = [_work_seconds(work, *made(size)) for size in steps]
            yield GrowthRow(
                case=case,
                grows=name,
                sizes=" ".join(map(str, steps)),
                cpu_s=" ".join(f"{s:.2f}" for s in seconds),
                exponent=round(fitted_exponent(steps, seconds), 2),
            )


def _with_heads(heads: int) -> Shape:
    """Heads of one width: the model grows with them."""
    return Shape(SMALL.layers, 32 * heads, heads, SMALL.vocabulary)


def _with_layers(layers: int) -> Shape:
    return Shape(layers, SMALL.hidden, SMALL.heads, SMALL.vocabulary)


def _diagnosed(model: Any, ids: list[list[int]]) -> None:
    """Every head measured on every text."""
    from headwise.diagnosis.measures import measure_heads
    from headwise.texts.batches import batches

    measure_heads(model, batches(ids, 1))


def _ablated(model: Any, ids: list[list[int]]) -> None:
    """Every head ablated, each alone, on every text."""
    from headwise.forward.interventions import ZERO
    from headwise.forward.variant_losses import head_costs
    from headwise.heads import all_heads

    heads = all_heads(int(model.config.n_layer), int(model.config.n_head))
    head_costs(model, ids, heads, [ZERO])


def _work_seconds(
    work: Callable[[Any, list[list[int]]], None], shape: Shape, texts: int, length: int
) -> float:
    """The smaller of two runs of the work itself on a random model, one thread."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
    )
    model = BloomForCausalLM(config).eval()
    ids = torch.randint(3, shape.vocabulary, (texts, length)).tolist()
    with one_thread():
        return min(cpu_seconds(lambda: work(model, ids)) for _ in range(2))


def fitted_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares."""
    import numpy as np

    slope: float = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return float(slope)
