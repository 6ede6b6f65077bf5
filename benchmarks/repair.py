"""Training of slices beside the paper's way, and its limit.

`headwise` is what `repair` chooses by itself for three epochs on this machine; `plain` neither runs
layers twice nor keeps what enters the lowest one on disk, `checkpointed` runs all trained layers
twice. A BLOOM-shaped random model; the lowest operated layer is a quarter up and 37.5% of the heads
above are operated on. The peer is our own plain transcription of the paper's training (whole-tensor
gradients with mask hooks, transformers' eager attention, gradient checkpointing with input
gradients, AdamW over whole tensors). The limit is what no slice training can beat: one forward pass
and the backward pass of activations down to the lowest operated layer, without weight gradients.

Each way lives in a process of its own with one thread. Rounds go through all ways in turn and time
is CPU time, so that other work on the machine hits all alike; only ratios are meant to be compared.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import (
    ROOT,
    Options,
    command_of,
    cpu_seconds,
    environment,
    peak_mb,
    reset_peak,
    resident_mb,
)
from headwise.errors import HeadwiseError

HIDDEN, HEADS, VOCABULARY = 1024, 16, 50_000
ACCUMULATION = 8  # blocks an optimizer step, as in the paper
EPOCHS = 3  # as in the paper: its best epoch was the third
WAYS = ("headwise", "plain", "checkpointed", "peer", "limit")
_OPERATED = 6  # of 16 heads in each layer: 37.5%


@dataclass(frozen=True)
class Measured:
    """One round of one way."""

    seconds: float
    peak_mb: float
    state_mb: float


@dataclass(frozen=True)
class RepairRow:
    """One length and way: medians over rounds, and ratios to the peer and the limit."""

    length: int
    way: str
    tokens_per_cpu_s: float
    speed_to_peer: float | None
    time_to_limit: float | None
    peak_mb: int
    peak_to_peer: float | None
    state_mb: float
    state_to_peer: float | None


Work = tuple[Callable[[], None], Callable[[], None], Callable[[], int]]  # block, update, state


def run(options: Options) -> list[RepairRow]:
    """Both lengths and all ways, or a shallow model at 512 tokens."""
    if options.quick:
        ways = ("headwise", "peer", "limit")
        return bench_repair(lengths=(512,), repeats=2, layers=4, ways=ways)
    return bench_repair(repeats=options.repeats)


def bench_repair(
    *,
    lengths: tuple[int, ...] = (512, 2048),
    repeats: int = 3,
    layers: int = 8,
    ways: tuple[str, ...] = WAYS,
) -> list[RepairRow]:
    """One row per length and way: tokens per CPU second, peak memory above the weights, state."""
    rows: list[RepairRow] = []
    for length in lengths:
        rows += _compared(_measured(length, layers, repeats, ways), length)
    return rows


def _measured(
    length: int, layers: int, repeats: int, ways: tuple[str, ...]
) -> dict[str, list[Measured]]:
    """way -> one measurement per round; rounds visit every way before the next begins."""
    workers: dict[str, subprocess.Popen[str]] = {}
    try:
        for way in ways:
            workers[way] = _start(way, length, layers)
            _call(workers[way])  # builds the model and warms up, before any clock runs
        rounds: dict[str, list[Measured]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, worker in workers.items():
                rounds[way].append(Measured(**json.loads(_call(worker))))
        return rounds
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()


def _start(way: str, length: int, layers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of("repair", way, length, layers),
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _call(worker: subprocess.Popen[str]) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise HeadwiseError("a benchmark process died", fix="see its message above; free memory?")
    return line


def _compared(rounds: dict[str, list[Measured]], length: int) -> list[RepairRow]:
    """Medians over rounds; ratios are medians of the ratios within a round."""

    def of(way: str, key: str) -> float:
        return median(float(getattr(found, key)) for found in rounds[way])

    def against(way: str, other: str, key: str) -> float | None:
        if other not in rounds:
            return None
        pairs = zip(rounds[way], rounds[other], strict=True)
        return round(median(float(getattr(a, key) / getattr(b, key)) for a, b in pairs), 3)

    return [
        RepairRow(
            length=length,
            way=way,
            tokens_per_cpu_s=round(length / of(way, "seconds"), 1),
            speed_to_peer=against("peer", way, "seconds") if "peer" in rounds else None,
            time_to_limit=against(way, "limit", "seconds"),
            peak_mb=round(of(way, "peak_mb")),
            peak_to_peer=against(way, "peer", "peak_mb"),
            state_mb=round(of(way, "state_mb"), 1),
            state_to_peer=against(way, "peer", "state_mb"),
        )
        for way in rounds
    ]


def _worker(way: str, length: int, layers: int) -> None:
    """Answer every line on stdin with one measurement; the first answer says `ready`."""
    import torch

    torch.set_num_threads(1)
    sys.stdin.readline()
    model = _bloom(layers)
    base = resident_mb()
    with tempfile.TemporaryDirectory() as folder:
        block, update, state = _WORK[way](model, length, Path(folder))
        block()  # allocates gradients, and fills the prefix cache
        update()
        _answer("ready")
        for _ in sys.stdin:
            gc.collect()
            reset_peak()
            seconds = [cpu_seconds(step) for step in (block, update)]
            found = Measured(
                seconds=seconds[0] + seconds[1] / ACCUMULATION,
                peak_mb=peak_mb() - base,
                state_mb=state() / 2**20,
            )
            _answer(json.dumps(asdict(found)))


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _bloom(layers: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bloom",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _ids(length: int) -> Any:
    import torch

    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


def _lowest(model: Any) -> int:
    return int(model.config.num_hidden_layers) // 4


def _operated(model: Any) -> Any:
    from headwise.heads import Head

    layers = range(_lowest(model), model.config.num_hidden_layers)
    return [Head(layer, HEADS - 1 - i) for layer in layers for i in range(_OPERATED)]


def _headwise(model: Any, length: int, folder: Path, **options: Any) -> Work:
    """The project's own job, backward pass and optimizer step."""
    import torch

    from headwise.heads import format_heads
    from headwise.models.patch import Slice
    from headwise.models.slices import read_slices, spans_of
    from headwise.surgery.job import Job, choose_saving
    from headwise.surgery.plan import PlannedModel, SurgeryPlan
    from headwise.surgery.recipe import Recipe
    from headwise.surgery.settings import RepairRequest
    from headwise.surgery.slice_training import make_masters
    from headwise.surgery.training import backward_step, make_optimizer, optimizer_step
    from headwise.surgery.values import RunSettings
    from headwise.texts.batches import Batch
    from headwise.texts.corpus import Corpus
    from headwise.texts.corpus_info import CorpusInfo

    spans = spans_of(model, _operated(model))
    values = read_slices(model, spans)
    slices = {name: Slice(span, values[name], values[name]) for name, span in spans.items()}
    masters = tuple(make_masters(slices, model))
    del slices, values
    batch = Batch(_ids(length), torch.tensor([length]), (0,))
    corpus = Corpus(CorpusInfo("bench"), (batch,))
    recipe = Recipe(block=length, accumulation=1, steps=EPOCHS, **options)
    trained = tuple(master.value for master in masters)
    saving, reason = choose_saving(model, recipe, corpus, _lowest(model), folder)
    sys.stderr.write(f"{length} tokens, {reason}\n")
    layers = model.config.num_hidden_layers
    planned = PlannedModel(
        id="bench", fingerprint="", num_layers=layers, num_heads=HEADS, num_kv_heads=HEADS
    )
    plan = SurgeryPlan(model=planned, targets=format_heads(_operated(model)))
    asked = RepairRequest(plan=plan)
    run = RunSettings(asked, "bench", "", plan, recipe, corpus.info, saving=saving)
    job = Job(model, run, corpus, folder, masters, trained)
    optimizer = make_optimizer(job)

    def block() -> None:
        backward_step(job, [(0, batch)], length - 1)

    def update() -> None:
        optimizer_step(job, optimizer, 1e-5, apply=True)

    return block, update, lambda: _state_bytes(trained)


def _state_bytes(parameters: Any) -> int:
    """Gradients and AdamW's two moments of what is trained, in float32."""
    return sum(3 * 4 * parameter.numel() for parameter in parameters)


def _peer(model: Any, length: int, folder: Path) -> Work:
    """The paper's way: whole tensors, masks, eager attention, checkpointing with input grads."""
    import torch

    from headwise.models.slices import spans_of

    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    masks: dict[str, torch.Tensor] = {}
    for span in spans_of(model, _operated(model)).values():
        parameter = model.get_parameter(span.parameter)
        masks.setdefault(span.parameter, torch.zeros_like(parameter))
        span.within(masks[span.parameter]).fill_(1)
    trained = [model.get_parameter(name).requires_grad_(True) for name in masks]
    for parameter, mask in zip(trained, masks.values(), strict=True):
        parameter.register_hook(lambda gradient, mask=mask: gradient * mask)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)
    ids = _ids(length)

    def block() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return block, update, lambda: _state_bytes(trained)


def _limit(model: Any, length: int, folder: Path) -> Work:
    """One forward, and the backward of activations down to the lowest operated layer."""
    import torch

    from headwise.forward.losses import shifted_targets, summed_loss
    from headwise.forward.replaced_forward import fused_gelu
    from headwise.forward.tap import tapped
    from headwise.models.architectures import layers_of

    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def begin(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].detach().requires_grad_(True), *args[1:])

    layers_of(model)[_lowest(model)].register_forward_pre_hook(begin)
    ids = _ids(length)
    targets = shifted_targets(ids, torch.tensor([length]))

    def block() -> None:
        with tapped(model), fused_gelu(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            summed_loss(model, hidden, targets).backward()

    return block, lambda: None, lambda: 0


_WORK: dict[str, Callable[..., Work]] = {
    "headwise": _headwise,
    "plain": lambda *args: _headwise(*args, checkpoint_layers=False, cache_prefix=False),
    "checkpointed": lambda *args: _headwise(*args, checkpoint_layers=True, cache_prefix=False),
    "prefix-cached": lambda *args: _headwise(*args, checkpoint_layers=False, cache_prefix=True),
    "peer": _peer,
    "limit": _limit,
}


if __name__ == "__main__":
    _worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
