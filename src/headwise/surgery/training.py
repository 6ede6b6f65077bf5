"""The training loop: slices only, deterministic, and impossible to lose.

A step is a function of the masters, the optimizer's moments and the step number: which blocks it
sees follows from seed and step. A checkpoint is these three, written atomically, so a killed run
that resumes ends with the same bits as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import read_lines, write_text
from headwise.errors import TrainingError
from headwise.forward.attention import mass_at
from headwise.forward.checkpointing import checkpointed
from headwise.forward.gelu import fused_gelu
from headwise.forward.losses import shifted_targets, summed_loss, token_losses
from headwise.forward.partial_run import layer_input, run_from
from headwise.forward.tap import Sight, tapped
from headwise.models.architectures import device_of, geometry_of
from headwise.models.tensor_files import read_safetensors, write_array, write_safetensors
from headwise.surgery.recipe import Recipe, learning_rate
from headwise.surgery.slice_training import Master, training_slices, write_masters
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus, block_at

CHECKPOINTS = "checkpoints"


PREFIX = "prefix"  # outputs of the frozen layers below the operation, if cached


BEFORE = -1  # the step of the map of the model before the operation


Tracker = Callable[[dict[str, Any], int], None]


MassMap = list[list[float]]  # [layer][head]


_PROBE_BLOCKS = 4


@dataclass
class Progress:
    """Where a run is: the only mutable state besides masters and optimizer."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = -1
    stale: int = 0  # validations since the best one
    stopped: str = ""  # why training ended early, if it did
    rows: list[dict[str, Any]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What a run trains, on what, and how; fixed for the whole run."""

    model: PreTrainedModel = field(repr=False)
    masters: tuple[Master, ...] = field(repr=False)
    trained: tuple[torch.nn.Parameter, ...] = field(repr=False)  # the masters' values, or LoRA's
    corpus: Corpus
    recipe: Recipe
    seed: int
    lowest: int  # the lowest layer with a trained weight
    out: Path
    track: Tracker | None = None
    before: MassMap | None = None  # first-token mass on the probe before the operation

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The frozen model with slice gradients, fused attention and, if asked, checkpointing."""
        with contextlib.ExitStack() as stack:
            if self.masters:
                stack.enter_context(training_slices(self.model, list(self.masters)))
            if self.recipe.checkpoint_layers:
                stack.enter_context(checkpointed(self.model, self.lowest))
            stack.enter_context(fused_gelu(self.model))
            stack.enter_context(tapped(self.model))
            yield

    def write(self) -> None:
        """Put the masters into the model."""
        write_masters(self.model, list(self.masters))


def train(
    job: Job, *, resume: bool = False, advance: Callable[[int, str], None] = lambda n, note: None
) -> Progress:
    """Train until the recipe's steps are done or validation stops improving."""
    # what ran before must not reach a checkpoint's bytes
    with torch.random.fork_rng(devices=[]), _stopping() as asked:
        torch.manual_seed(job.seed)
        return _train(job, resume, advance, asked)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Ctrl-C lets the step at hand finish, so that the checkpoint is whole; a second one does not.

    Only the main thread may set signal handlers; elsewhere nothing changes.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _train(
    job: Job, resume: bool, advance: Callable[[int, str], None], asked: list[int]
) -> Progress:
    recipe = job.recipe
    optimizer = make_optimizer(job)
    progress = _restore(job, optimizer) if resume else _fresh(job)
    job.write()
    advance(progress.step, "")
    while progress.step < recipe.steps:
        if progress.step % recipe.validate_every == 0:
            _validate(job, progress)
        if progress.stopped:
            break
        if progress.step % recipe.map_every == 0:
            _map(job, progress)
        started = time.perf_counter()
        row = _step(job, optimizer, progress)
        _require_number(job, row)
        progress.step += 1
        _record(job, progress, row, time.perf_counter() - started)
        if asked or progress.step % recipe.save_every == 0:
            save_checkpoint(job, progress, optimizer)
        if asked:
            raise KeyboardInterrupt
        advance(1, f"loss {row['loss']:.4f}")
    if not progress.stopped:
        _validate(job, progress)
    _map(job, progress)
    save_checkpoint(job, progress, optimizer)
    return progress


def _step(job: Job, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    """One optimizer step: the mean loss over the predicted tokens of all its blocks."""
    step, recipe = progress.step, job.recipe
    blocks = step_blocks(job.corpus, recipe, job.seed, step)
    tokens = sum(int((block.lengths - 1).sum()) for _, block in blocks)
    loss = backward_step(job, blocks, tokens)
    rate = learning_rate(recipe, step)
    norm = optimizer_step(job, optimizer, rate, apply=math.isfinite(loss))
    return {"step": step, "loss": loss, "lr": rate, "grad_norm": norm, "tokens": tokens}


def make_optimizer(job: Job) -> torch.optim.Optimizer:
    """AdamW over what is trained: its moments exist for the slices only."""
    recipe = job.recipe
    return torch.optim.AdamW(job.trained, lr=recipe.lr, weight_decay=recipe.weight_decay)


def optimizer_step(
    job: Job, optimizer: torch.optim.Optimizer, rate: float, *, apply: bool
) -> float:
    """Clip, step and write the masters into the model; a gradient that is no number is dropped."""
    norm = float(torch.nn.utils.clip_grad_norm_(job.trained, job.recipe.clip))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if apply and math.isfinite(norm):
        optimizer.step()
        job.write()
    optimizer.zero_grad(set_to_none=True)
    return norm


def backward_step(job: Job, blocks: list[tuple[int, Batch]], tokens: int) -> float:
    """Gradients of the mean loss over all micro-batches of a step; returns that loss."""
    total = 0.0
    with job.forward():
        for start in range(0, len(blocks), job.recipe.batch_size):
            part = blocks[start : start + job.recipe.batch_size]
            batch = join_blocks([block for _, block in part])
            hidden = _hidden(job, batch, part)
            targets = shifted_targets(batch.ids.to(device_of(job.model)), batch.lengths)
            loss = summed_loss(job.model, hidden, targets) / tokens
            loss.backward()
            total += float(loss.detach())
    return total


def _hidden(job: Job, batch: Batch, part: list[tuple[int, Batch]]) -> Tensor:
    """Last hidden states; layers below the operation run without gradients, or from the cache."""
    ids = batch.ids.to(device_of(job.model))
    if not (job.recipe.cache_prefix and job.lowest > 0):
        last: Tensor = job.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return last
    stored = [_prefix(job, place, block) for place, block in part]
    padded = [F.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1])) for hidden in stored]
    start = torch.cat(padded).to(ids.device, job.model.dtype)
    return run_from(job.model, ids, job.lowest, start)


def _prefix(job: Job, place: int, block: Batch) -> Tensor:
    """What enters the lowest operated layer for one block.

    From disk after the first time: no layer below changes.
    """
    path = job.out / PREFIX / f"{place}.npy"
    if not path.exists():
        with torch.no_grad():
            hidden = layer_input(job.model, block.ids.to(device_of(job.model)), job.lowest)
        write_array(path, hidden.float().cpu().numpy())
    return torch.from_numpy(np.array(np.load(path, mmap_mode="r")))


def step_blocks(corpus: Corpus, recipe: Recipe, seed: int, step: int) -> list[tuple[int, Batch]]:
    """The numbered blocks of one step: the same for every arm with this seed and recipe."""
    count = recipe.batch_size * recipe.accumulation
    places = [block_at(len(corpus.train), seed, step * count + i) for i in range(count)]
    return [(place, corpus.train[place]) for place in places]


def join_blocks(blocks: Sequence[Batch]) -> Batch:
    """Several blocks as one right-padded batch."""
    longest = max(block.ids.shape[1] for block in blocks)
    padded = [F.pad(block.ids, (0, longest - block.ids.shape[1])) for block in blocks]
    lengths = torch.cat([block.lengths for block in blocks])
    return Batch(torch.cat(padded), lengths, tuple(range(len(lengths))))


def _fresh(job: Job) -> Progress:
    if job.before is None:
        return Progress()
    return Progress(maps=[{"step": BEFORE, "first_token_mass": job.before}])


def _map(job: Job, progress: Progress) -> None:
    """The head map at this step, always on the same blocks, so that only training moves it."""
    if not progress.maps or progress.maps[-1]["step"] != progress.step:
        found = first_token_map(job.model, job.corpus)
        progress.maps.append({"step": progress.step, "first_token_mass": found})


def first_token_map(model: PreTrainedModel, corpus: Corpus) -> MassMap:
    """First-token mass of every head on the probe: the first validation blocks of the corpus."""
    geometry = geometry_of(model)
    sums = torch.zeros(geometry.num_layers, geometry.num_heads, dtype=torch.float64)
    blocks = (corpus.validation or corpus.train)[:_PROBE_BLOCKS]
    with torch.inference_mode():
        for block in blocks:
            with tapped(model, partial(_add_mass, sums, block.lengths)):
                model.base_model(input_ids=block.ids.to(device_of(model)), use_cache=False)
    return (sums / sum(len(block.lengths) for block in blocks)).tolist()


def _add_mass(sums: Tensor, lengths: Tensor, sight: Sight) -> None:
    """Add each row's own mean over its real queries."""
    mass = mass_at(sight.scores, sight.lse, None)
    real = torch.arange(mass.shape[2], device=mass.device)[None] < lengths[:, None].to(mass.device)
    means = (mass * real[:, None]).sum(2) / real.sum(1)[:, None]
    sums[sight.layer] += means.sum(0).double().cpu()


def _validate(job: Job, progress: Progress) -> None:
    """Validation loss now; keeps the best slices, counts patience, says when to stop."""
    blocks = job.corpus.validation[: job.recipe.validation_blocks]
    done = any(row.get("validated_at") == progress.step for row in progress.rows[-2:])
    if not blocks or done:
        return
    loss = mean_loss(job.model, blocks)
    row = {"validated_at": progress.step, "validation_loss": loss}
    progress.rows.append(row)
    if job.track is not None:
        job.track(row, progress.step)
    if loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.stale = loss, progress.step, 0
        tensors = {f"master.{i}": p.detach().cpu() for i, p in enumerate(job.trained)}
        write_safetensors(job.out / CHECKPOINTS / "best.safetensors", tensors)
    else:
        progress.stale += 1
        if progress.stale >= job.recipe.patience:
            progress.stopped = f"no better validation loss in {progress.stale} validations"


def mean_loss(model: PreTrainedModel, blocks: Sequence[Batch]) -> float:
    """Mean loss in nats over the predicted tokens of blocks."""
    total, tokens = 0.0, 0
    with torch.inference_mode(), tapped(model):
        for block in blocks:
            ids = block.ids.to(device_of(model))
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            losses = token_losses(model, hidden, shifted_targets(ids, block.lengths))
            total += float(losses.double().sum())
            tokens += int((block.lengths - 1).sum())
    return total / max(tokens, 1)


def _require_number(job: Job, row: dict[str, Any]) -> None:
    if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
        return
    kept = sorted((job.out / CHECKPOINTS).glob("step-*.safetensors"))
    raise TrainingError(
        f"the loss is not a number at step {row['step']} (loss {row['loss']}, "
        f"gradient norm {row['grad_norm']})",
        where=job.out,
        fix=(f"the last good checkpoint is kept ({kept[-1].name})" if kept else "nothing was saved")
        + "; start anew with a lower lr or --dtype float32",
    )


def _record(job: Job, progress: Progress, row: dict[str, Any], seconds: float) -> None:
    row["tokens_per_second"] = round(row["tokens"] / seconds, 1)
    progress.rows.append(row)
    if job.track is not None:
        job.track({k: v for k, v in row.items() if k != "step"}, row["step"])


def save_checkpoint(job: Job, progress: Progress, optimizer: torch.optim.Optimizer) -> None:
    """Write trace, maps and the newest checkpoint; drop old checkpoints only after that."""
    write_text(job.out / "trace.jsonl", _lines(progress.rows))
    write_text(job.out / "maps.jsonl", _lines(progress.maps))
    tensors = {}
    for i, parameter in enumerate(job.trained):
        tensors[f"master.{i}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{i}"] = value.detach().cpu().contiguous()
    state = {
        "step": progress.step,
        "best_loss": progress.best_loss,
        "best_step": progress.best_step,
        "stale": progress.stale,
        "stopped": progress.stopped,
        "rows": len(progress.rows),
        "maps": len(progress.maps),
    }
    metadata = {"progress": json.dumps(state), "rng": bytes(torch.get_rng_state()).hex()}
    folder = job.out / CHECKPOINTS
    write_safetensors(folder / f"step-{progress.step:07d}.safetensors", tensors, metadata)
    for old in sorted(folder.glob("step-*.safetensors"))[: -job.recipe.keep]:
        old.unlink()


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _restore(job: Job, optimizer: torch.optim.Optimizer) -> Progress:
    """The newest checkpoint, or a fresh start if the run was killed before its first one."""
    for half_written in job.out.rglob(".*.tmp"):  # a kill may leave one behind
        half_written.unlink(missing_ok=True)
    found = sorted((job.out / CHECKPOINTS).glob("step-*.safetensors"))
    if not found:
        return _fresh(job)
    tensors, metadata = read_safetensors(found[-1])
    state = json.loads(metadata["progress"])
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
        if f"step.{i}" in tensors:
            optimizer.state[parameter] = {
                key: tensors[f"{key}.{i}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(metadata["rng"]), dtype=torch.uint8))
    rows = read_lines(job.out / "trace.jsonl")[: state.pop("rows")]
    maps = read_lines(job.out / "maps.jsonl")[: state.pop("maps")]
    if maps and job.before is not None and maps[0]["step"] != BEFORE:  # of an older headwise
        maps = _fresh(job).maps
    return Progress(**state, rows=rows, maps=maps)


def load_best(job: Job) -> bool:
    """Put the best validated values back; False if nothing was validated."""
    path = job.out / CHECKPOINTS / "best.safetensors"
    if not path.exists():
        return False
    tensors, _ = read_safetensors(path)
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
    job.write()
    return True
