"""The modes of a repair: what each one starts from, and what it trains.

All modes share plan, data order, steps and seed, and all end in the same artefact, a patch:
`surgery` treats (reinitialises, unless the plan names another treatment) and trains; `sham` treats
and never trains (by first-token mass it "recovers" every head at once); `gradient-only` trains the
same slices as they are; `ablate` only silences; `random-heads` operates on as many healthy heads,
matched by layer; `lora` spends the same number of weights on low-rank updates of the same
projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headwise.errors import SelectionError
from headwise.forward.mean_outputs import measure_means
from headwise.heads import Head, format_heads
from headwise.models.patch import Patch, Slice
from headwise.progress import Progress, silent
from headwise.settings import changed
from headwise.surgery.checkpoints import load_best
from headwise.surgery.job import Job
from headwise.surgery.lora import LoraAdapter
from headwise.surgery.operation import silence, unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.run_state import RunState
from headwise.surgery.sink_directions import LayerDirections
from headwise.surgery.slice_training import make_masters, master_slices
from headwise.surgery.training import train
from headwise.surgery.treatments import measure_for, prescribed, treat

_MEAN_BLOCKS = 32  # blocks for the heads' mean outputs (compensate: mean)


def random_heads_plan(plan: SurgeryPlan, seed: int) -> SurgeryPlan:
    """As many healthy heads in each layer as it has targets; from the nearest layers if short."""
    generator = np.random.default_rng([seed, 7919])
    free = list(plan.healthy_heads)
    if len(free) < len(plan.target_heads):
        raise SelectionError(
            f"random-heads needs {len(plan.target_heads)} healthy heads, the model has {len(free)}",
            fix="plan fewer heads, or leave this control out",
        )
    chosen: list[Head] = []
    for target in plan.target_heads:
        nearest = min(abs(head.layer - target.layer) for head in free)
        pool = [head for head in free if abs(head.layer - target.layer) == nearest]
        pick = pool[int(generator.integers(len(pool)))]
        free.remove(pick)
        chosen.append(pick)
    same = {name: format_heads(chosen) for name in plan.treatments}
    if len(same) > 1:
        raise SelectionError("random-heads needs a plan with one treatment", fix="use --treatment")
    return changed(plan, targets=format_heads(chosen), watched="", treatments=same)


def carry_out(
    job: Job,
    directions: Mapping[int, LayerDirections],
    *,
    resume: bool = False,
    progress: Progress = silent,
) -> tuple[Patch, RunState]:
    """Operate as the mode says and train what it trains; the model is given back as it was.

    `directions` are those that are known already; missing layers are measured.
    """
    start = _start(job, directions)
    if job.run.mode == "lora":
        return _train_lora(job, start, resume, progress)
    return _train_masters(job, start, resume, progress)


def _start(job: Job, directions: Mapping[int, LayerDirections]) -> Patch:
    """The patch that training starts from."""
    model, plan, mode = job.model, job.run.plan, job.run.mode
    if mode in ("gradient-only", "lora"):
        return unchanged(model, plan)
    if mode == "ablate":
        return silence(model, plan)
    given = prescribed(plan)
    blocks = job.corpus.train
    means = measure_means(model, blocks[:_MEAN_BLOCKS]) if plan.compensate == "mean" else None
    known = measure_for(model, plan, given, blocks, directions)
    return treat(model, plan, given, directions=known, mean_outputs=means)


def _train_masters(
    job: Job, start: Patch, resume: bool, progress: Progress
) -> tuple[Patch, RunState]:
    """Train float32 masters of the slices; output biases of `compensate` are set, not trained."""
    trained = {n: part for n, part in start.slices.items() if not n.endswith(".o_bias")}
    masters = tuple(make_masters(trained, job.model))
    job = replace(job, masters=masters, trained=tuple(m.value for m in masters))
    start.apply(job.model)
    try:
        state = train(job, resume=resume, progress=progress)
        load_best(job, state.best_step)
        values = master_slices(list(masters))
        slices = {
            name: Slice(part.span, part.before, values[name][1].to(part.before))
            if name in values
            else part
            for name, part in start.slices.items()
        }
    finally:
        start.undo(job.model, force=True)
    patch = Patch(slices, start.info)
    return (patch if job.run.recipe.steps else patch.without_unchanged()), state


def _train_lora(job: Job, start: Patch, resume: bool, progress: Progress) -> tuple[Patch, RunState]:
    """Low-rank updates of the planned layers' projections, with as many weights as the slices."""
    with LoraAdapter(job.model, job.run.plan, start.num_weights, job.run.seed) as adapter:
        job = replace(job, trained=tuple(adapter.parameters))
        state = train(job, resume=resume, progress=progress)
        load_best(job, state.best_step)
        slices = adapter.merged_slices()
    return Patch(slices, start.info), state
