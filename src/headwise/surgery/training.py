"""The training loop: slices only, and deterministic.

A step is a function of the masters, the optimizer's moments and the step number: which blocks it
sees follows from seed and step.

With several processes each takes its share of a step's micro-batches and their slice gradients,
nothing else, go around. They are added one after the other as one process would: a sum in another
order would differ, and Adam turns a difference in a tiny gradient into a whole step. So a run may
be started with two processes and resumed with one, to the same bits.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from headwise.errors import TrainingError
from headwise.forward.losses import divergence, shifted_targets, summed_loss
from headwise.models.architectures import backbone_of, device_of
from headwise.models.rope import length_class
from headwise.progress import Progress, silent
from headwise.ranks import anyone, gathered_tensors, place, shared_out
from headwise.surgery.checkpoints import (
    BEST,
    CHECKPOINTS,
    fresh_state,
    kept_checkpoints,
    require_none,
    restore_checkpoint,
    save_best,
    save_checkpoint,
)
from headwise.surgery.job import Job, last_hidden
from headwise.surgery.probes import first_token_map, mean_loss
from headwise.surgery.recipe import Recipe, learning_rate
from headwise.surgery.run_state import RunState, TrainStep
from headwise.texts.batches import Batch, join_batches
from headwise.texts.corpus import Corpus, block_at

BackwardPass = Callable[[], float]  # adds to the gradients and returns its part of the loss


def train(job: Job, *, resume: bool = False, progress: Progress = silent) -> RunState:
    """Train until the recipe's steps are done or validation stops improving."""
    # what ran before must not reach a checkpoint's bytes
    with torch.random.fork_rng(devices=[]), _stopping() as asked:
        torch.manual_seed(job.run.seed)
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
    recipe = job.run.recipe
    optimizer = make_optimizer(job)
    if resume:
        state = restore_checkpoint(job, optimizer, progress)
    else:
        require_none(job.out)
        state = fresh_state(job)
    job.write()
    if recipe.steps:
        progress(job.run.name, state.step, recipe.steps, "")
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
        if anyone(bool(asked)):
            asked.append(signal.SIGINT)
        every = (recipe.save_every, recipe.checkpoint_every)
        due = any(isinstance(n, int) and state.step % n == 0 for n in every)
        if asked or due:
            save_checkpoint(job, state, optimizer)
        if asked:
            raise KeyboardInterrupt
        progress(job.run.name, state.step, recipe.steps, f"loss {row.loss:.4f}")
    if not state.stopped:
        _validate(job, state)
    _map(job, state)
    save_checkpoint(job, state, optimizer)
    return state


def _step(job: Job, optimizer: torch.optim.Optimizer, step: int) -> TrainStep:
    """One optimizer step: the mean loss over the predicted tokens of all its blocks."""
    started = time.perf_counter()
    blocks = step_blocks(job.corpus, job.run.recipe, job.run.seed, step)
    tokens = sum(int((block.lengths - 1).sum()) for _, block in blocks)
    loss = backward_step(job, blocks, tokens)
    if job.kept is not None:
        _backward_kept(job, job.kept.train, step)
    rate = learning_rate(job.run.recipe, step)
    norm = optimizer_step(job, optimizer, rate, apply=math.isfinite(loss))
    speed = round(tokens / (time.perf_counter() - started), 1)
    return TrainStep(step, loss, rate, norm, tokens, speed)


def make_optimizer(job: Job) -> torch.optim.Optimizer:
    """AdamW over what is trained: its moments exist for the slices only."""
    recipe = job.run.recipe
    return torch.optim.AdamW(job.trained, lr=recipe.lr, weight_decay=recipe.weight_decay)


def optimizer_step(
    job: Job, optimizer: torch.optim.Optimizer, rate: float, *, apply: bool
) -> float:
    """Clip, step and write the masters into the model; a gradient that is no number is dropped."""
    norm = float(torch.nn.utils.clip_grad_norm_(job.trained, job.run.recipe.clip))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if apply and math.isfinite(norm):
        optimizer.step()
        job.write()
    optimizer.zero_grad(set_to_none=True)
    return norm


def backward_step(job: Job, blocks: list[tuple[int, Batch]], tokens: int) -> float:
    """Gradients of the mean loss over all micro-batches of a step; returns that loss."""
    size = job.run.recipe.batch_size
    kind = length_class(job.model)
    parts = [
        [(number, block) for number, block in chunk if kind(int(block.lengths.max())) == one]
        for chunk in (blocks[start : start + size] for start in range(0, len(blocks), size))
        for one in dict.fromkeys(kind(int(block.lengths.max())) for _, block in chunk)
    ]
    with job.forward():
        passes = [partial(_backward_part, job, part, tokens) for part in parts]
        return sum_gradients(job.trained, passes)


def _backward_part(job: Job, part: list[tuple[int, Batch]], tokens: int) -> float:
    batch = join_batches([block for _, block in part])
    hidden = last_hidden(job, batch, part)
    targets = shifted_targets(batch.ids, batch.lengths).to(hidden.device)
    loss = summed_loss(job.model, hidden, targets) / tokens
    loss.backward()
    return float(loss.detach())


def _backward_kept(job: Job, blocks: Sequence[Batch], step: int) -> None:
    """Add the gradients of the weighted KL to stock on this step's blocks of kept text."""
    count = job.run.recipe.hold_blocks
    places = [block_at(len(blocks), job.run.seed, step * count + i) for i in range(count)]
    apart = [partial(_backward_apart, job, blocks[n], job.stock_hidden[n]) for n in places]
    with job.forward():
        sum_gradients(job.trained, apart)


def _backward_apart(job: Job, block: Batch, stock: Tensor) -> float:
    ids = block.ids.to(device_of(job.model))
    hidden = backbone_of(job.model)(input_ids=ids, use_cache=False).last_hidden_state
    apart = divergence(job.model, hidden, stock, block.lengths)
    (apart * (job.run.recipe.hold_weight / job.run.recipe.hold_blocks)).backward()
    return float(apart.detach())


def sum_gradients(parameters: Sequence[nn.Parameter], passes: Sequence[BackwardPass]) -> float:
    """Add all backward passes to what is in `.grad`; returns the sum of their losses."""
    if place().world == 1:
        return sum(one() for one in passes)
    total = 0.0
    sums = [parameter.grad for parameter in parameters]
    for losses, gathered in _rounds(parameters, passes):
        total = sum(losses, total)
        for gradients in gathered:
            for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                own, before = gradient.view_as(parameter).to(parameter.device), sums[i]
                sums[i] = own if before is None else before.add_(own)
    for parameter, total_gradient in zip(parameters, sums, strict=True):
        parameter.grad = total_gradient
    return total


def _rounds(
    parameters: Sequence[nn.Parameter], passes: Sequence[BackwardPass]
) -> Iterator[tuple[list[float], list[Sequence[Tensor]]]]:
    """Rounds of one micro-batch a process: their losses, and their gradients, in order."""
    world = place().world
    sizes = [parameter.numel() for parameter in parameters]
    for start in range(0, len(passes), world):
        chosen = passes[start : start + world]
        for parameter in parameters:
            parameter.grad = None
        losses = [loss for _, loss in shared_out(lambda one: one(), chosen)]
        flat = torch.cat([_gradient(parameter) for parameter in parameters])
        yield losses, [one.split(sizes) for one in gathered_tensors(flat)[: len(chosen)]]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """As one row; zeros in a process that had no micro-batch in this round."""
    gradient = parameter.grad
    return torch.zeros(parameter.numel()) if gradient is None else gradient.flatten().cpu()


def step_blocks(corpus: Corpus, recipe: Recipe, seed: int, step: int) -> list[tuple[int, Batch]]:
    """The numbered blocks of one step: the same for every mode with this seed and recipe."""
    count = recipe.batch_size * recipe.accumulation
    places = [block_at(len(corpus.train), seed, step * count + i) for i in range(count)]
    return [(place, corpus.train[place]) for place in places]


def _map(job: Job, state: RunState) -> None:
    """The head map at this step, always on the same blocks, so that only training moves it."""
    if state.step not in state.maps:
        state.maps[state.step] = first_token_map(job.model, job.corpus)


def _validate(job: Job, state: RunState) -> None:
    """Validation loss now; keeps the best slices, counts patience, says when to stop."""
    blocks = job.corpus.validation[: job.run.recipe.validation_blocks]
    if not blocks or state.step in state.validations:
        return
    loss = mean_loss(job.model, blocks)
    job.tell({"validated_at": state.step, "validation_loss": loss}, state.step)
    if state.note(state.step, loss):
        save_best(job, state.step)
    elif state.stale >= job.run.recipe.patience:
        state.stop()


def _require_number(job: Job, row: TrainStep) -> None:
    if math.isfinite(row.loss) and math.isfinite(row.grad_norm):
        return
    kept = [path.name for path in kept_checkpoints(job.out)[-1:]]
    if (job.out / CHECKPOINTS / BEST).exists():
        kept.append(f"the best validated state ({BEST})")
    narrower = "" if job.model.dtype == torch.float32 else " or --dtype float32"
    raise TrainingError(
        f"the loss is not a number at step {row.step} (loss {row.loss}, "
        f"gradient norm {row.grad_norm})",
        where=job.out,
        fix=(f"{' and '.join(kept)} of before are kept" if kept else "nothing was saved")
        + f"; start anew with a lower lr{narrower}",
    )


def _record(job: Job, state: RunState, row: TrainStep) -> None:
    state.step += 1
    state.rows.append(row)
    job.tell({key: value for key, value in row.to_json().items() if key != "step"}, row.step)
