"""The training loop: slices only, and deterministic.

A step is a function of the masters, the optimizer's moments and the step number: which blocks it
sees follows from seed and step.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headwise.errors import TrainingError
from headwise.forward.divergence import divergence
from headwise.forward.losses import shifted_targets, summed_loss
from headwise.models.architectures import backbone_of, device_of
from headwise.progress import Progress, silent
from headwise.surgery.checkpoints import (
    fresh_state,
    kept_checkpoints,
    restore_checkpoint,
    save_best,
    save_checkpoint,
)
from headwise.surgery.job import Held, Job, last_hidden
from headwise.surgery.probes import first_token_map, mean_loss
from headwise.surgery.recipe import Recipe, learning_rate
from headwise.surgery.run_state import RunState, StepMap, TrainStep, Validation
from headwise.texts.batches import Batch, join_batches
from headwise.texts.corpus import Corpus, block_at


def train(job: Job, *, resume: bool = False, progress: Progress = silent) -> RunState:
    """Train until the recipe's steps are done or validation stops improving."""
    # what ran before must not reach a checkpoint's bytes
    with torch.random.fork_rng(devices=[]), _stopping() as asked:
        torch.manual_seed(job.seed)
        return _train(job, resume, progress, asked)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM let the step at hand finish and be saved; a second one does not wait.

    Only the main thread may set signal handlers; elsewhere nothing changes.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        restore()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()


def _train(job: Job, resume: bool, progress: Progress, asked: list[int]) -> RunState:
    recipe = job.recipe
    optimizer = make_optimizer(job)
    state = restore_checkpoint(job, optimizer, progress) if resume else fresh_state(job)
    job.write()
    if recipe.steps:
        progress(job.title, state.step, recipe.steps, "")
    while state.step < recipe.steps:
        if state.step % recipe.validate_every == 0:
            _validate(job, state)
        if state.stopped:
            break
        if state.step % recipe.map_every == 0:
            _map(job, state)
        row = _step(job, optimizer, state.step)
        _require_number(job, row)
        _record(job, state, row)
        if asked or state.step % recipe.save_every == 0:
            save_checkpoint(job, state, optimizer)
        if asked:
            raise KeyboardInterrupt
        progress(job.title, state.step, recipe.steps, f"loss {row.loss:.4f}")
    if not state.stopped:
        _validate(job, state)
    _map(job, state)
    save_checkpoint(job, state, optimizer)
    return state


def _step(job: Job, optimizer: torch.optim.Optimizer, step: int) -> TrainStep:
    """One optimizer step: the mean loss over the predicted tokens of all its blocks."""
    started = time.perf_counter()
    blocks = step_blocks(job.corpus, job.recipe, job.seed, step)
    tokens = sum(int((block.lengths - 1).sum()) for _, block in blocks)
    loss = backward_step(job, blocks, tokens)
    if job.held is not None:
        _backward_held(job, job.held, step)
    rate = learning_rate(job.recipe, step)
    norm = optimizer_step(job, optimizer, rate, apply=math.isfinite(loss))
    speed = round(tokens / (time.perf_counter() - started), 1)
    return TrainStep(step, loss, rate, norm, tokens, speed)


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
            batch = join_batches([block for _, block in part])
            hidden = last_hidden(job, batch, part)
            targets = shifted_targets(batch.ids.to(device_of(job.model)), batch.lengths)
            loss = summed_loss(job.model, hidden, targets) / tokens
            loss.backward()
            total += float(loss.detach())
    return total


def _backward_held(job: Job, held: Held, step: int) -> None:
    """Add the gradients of the weighted KL to stock on this step's blocks of kept text."""
    count = job.recipe.hold_blocks
    with job.forward():
        for i in range(count):
            place = block_at(len(held.blocks), job.seed, step * count + i)
            block = held.blocks[place]
            ids = block.ids.to(device_of(job.model))
            hidden = backbone_of(job.model)(input_ids=ids, use_cache=False).last_hidden_state
            apart = divergence(job.model, hidden, held.hidden[place], block.lengths)
            (apart * (job.recipe.hold_weight / count)).backward()


def step_blocks(corpus: Corpus, recipe: Recipe, seed: int, step: int) -> list[tuple[int, Batch]]:
    """The numbered blocks of one step: the same for every mode with this seed and recipe."""
    count = recipe.batch_size * recipe.accumulation
    places = [block_at(len(corpus.train), seed, step * count + i) for i in range(count)]
    return [(place, corpus.train[place]) for place in places]


def _map(job: Job, state: RunState) -> None:
    """The head map at this step, always on the same blocks, so that only training moves it."""
    if not state.maps or state.maps[-1].step != state.step:
        state.maps.append(StepMap(state.step, first_token_map(job.model, job.corpus)))


def _validate(job: Job, state: RunState) -> None:
    """Validation loss now; keeps the best slices, counts patience, says when to stop."""
    blocks = job.corpus.validation[: job.recipe.validation_blocks]
    done = any(row.step == state.step for row in state.validations[-1:])
    if not blocks or done:
        return
    row = Validation(state.step, mean_loss(job.model, blocks))
    state.rows.append(row)
    job.tell(row.to_json(), state.step)
    if row.loss < state.best_loss:
        state.best_loss, state.best_step, state.stale = row.loss, state.step, 0
        save_best(job, state.step)
    else:
        state.stale += 1
        if state.stale >= job.recipe.patience:
            state.stopped = f"no better validation loss in {state.stale} validations"


def _require_number(job: Job, row: TrainStep) -> None:
    if math.isfinite(row.loss) and math.isfinite(row.grad_norm):
        return
    kept = kept_checkpoints(job.out)
    raise TrainingError(
        f"the loss is not a number at step {row.step} (loss {row.loss}, "
        f"gradient norm {row.grad_norm})",
        where=job.out,
        fix=(f"the last good checkpoint is kept ({kept[-1].name})" if kept else "nothing was saved")
        + "; start anew with a lower lr or --dtype float32",
    )


def _record(job: Job, state: RunState, row: TrainStep) -> None:
    state.step += 1
    state.rows.append(row)
    job.tell({key: value for key, value in row.to_json().items() if key != "step"}, row.step)
