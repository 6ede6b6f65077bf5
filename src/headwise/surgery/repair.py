"""Repair: operate, train, and the controls that tell a cure from a metric artefact.

All modes share plan, data order, steps and seed, and all end in the same artefact, a patch:
`surgery` reinitialises and trains; `sham` reinitialises and never trains (by first-token mass it
"recovers" every head at once); `gradient-only` trains the same slices as they are; `ablate` only
silences; `random-heads` operates on as many healthy heads, matched by layer; `lora` spends the same
number of weights on low-rank updates of the same projections.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.artefacts import load_artefact, save_artefact, versions
from headwise.diagnosis.mean_outputs import measure_means
from headwise.errors import ArtefactError
from headwise.models.architectures import device_of
from headwise.models.description import weight_fingerprint
from headwise.models.patch import Patch, Slice
from headwise.progress import progress as progress_bar
from headwise.surgery.lora import LoraAdapter
from headwise.surgery.modes import TRAINED, Mode, random_heads_plan
from headwise.surgery.operation import operate, require_planned_model, silence, unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.recipe import Recipe
from headwise.surgery.slice_training import make_masters, master_slices
from headwise.surgery.training import (
    PREFIX,
    Job,
    MassMap,
    Progress,
    Tracker,
    first_token_map,
    load_best,
    train,
)
from headwise.texts.corpus import Corpus, build_corpus
from headwise.texts.text_sets import TextSet

_MEAN_BLOCKS = 32  # blocks for the heads' mean outputs (compensate: mean)


@dataclass(frozen=True)
class RepairRun:
    """What a run produced: the patch, and how training went."""

    out: Path
    mode: Mode
    patch: Patch = field(repr=False)
    progress: Progress = field(repr=False)


def repair(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: SurgeryPlan,
    texts: TextSet | Corpus,
    recipe: Recipe,
    *,
    out: Path,
    mode: Mode = "surgery",
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    excluded: Sequence[str] = (),
    tracker: str | None = None,
    quiet: bool = True,
) -> RepairRun:
    """Run one arm and write `out/`; the model is left as it was, the result is the patch."""
    require_planned_model(model, plan, force=force)
    if mode == "random-heads":
        plan = random_heads_plan(plan, seed)
    if mode not in TRAINED:
        recipe = recipe.model_copy(update={"steps": 0})
    corpus = (
        texts
        if isinstance(texts, Corpus)
        else build_corpus(
            texts,
            tokenizer,
            block=recipe.block,
            batch_tokens=recipe.batch_tokens,
            excluded=excluded,
        )
    )
    settings = _settings(model, plan, recipe, mode, seed, corpus)
    if _is_finished(out, settings, resume):
        return RepairRun(out, mode, Patch.load(out / "patch.safetensors"), Progress())
    track = _tracker(tracker, out, settings)
    start = _start(model, plan, mode, corpus)
    arm = _train_lora if mode == "lora" else _train_masters
    with progress_bar(recipe.steps, f"{mode}", quiet=quiet) as advance:
        before = first_token_map(model, corpus)
        patch, progress = arm(
            model, start, Arm(plan, corpus, recipe, out, seed, resume, track, before), advance
        )
    patch.save(out / "patch.safetensors")
    _save_settings(out, settings, finished=True)
    shutil.rmtree(out / PREFIX, ignore_errors=True)
    return RepairRun(out, mode, patch, progress)


@dataclass(frozen=True)
class Arm:
    """The parts of a run that every way of training needs."""

    plan: SurgeryPlan
    corpus: Corpus
    recipe: Recipe
    out: Path
    seed: int
    resume: bool
    track: Tracker | None
    before: MassMap

    @property
    def lowest(self) -> int:
        """The lowest operated layer: nothing below it can change."""
        return min(head.layer for head in self.plan.target_heads)


def _start(model: PreTrainedModel, plan: SurgeryPlan, mode: Mode, corpus: Corpus) -> Patch:
    """The patch that training starts from."""
    if mode in ("gradient-only", "lora"):
        return unchanged(model, plan)
    if mode == "ablate":
        return silence(model, plan)
    means = None
    if plan.compensate == "mean":
        means = measure_means(model, corpus.train[:_MEAN_BLOCKS])
    return operate(model, plan, mean_outputs=means)


def _train_masters(
    model: PreTrainedModel, start: Patch, arm: Arm, advance: Callable[[int, str], None]
) -> tuple[Patch, Progress]:
    """Train float32 masters of the slices; output biases of `compensate` are set, not trained."""
    trained = {n: part for n, part in start.slices.items() if not n.endswith(".o_bias")}
    masters = tuple(make_masters(trained, device_of(model)))
    job = Job(
        model,
        masters,
        tuple(m.value for m in masters),
        arm.corpus,
        arm.recipe,
        arm.seed,
        arm.lowest,
        arm.out,
        arm.track,
        arm.before,
    )
    start.apply(model)
    try:
        progress = train(job, resume=arm.resume, advance=advance)
        load_best(job)
        values = master_slices(list(masters))
        slices = {
            name: Slice(part.span, part.before, values[name][1].to(part.before))
            if name in values
            else part
            for name, part in start.slices.items()
        }
    finally:
        start.undo(model, force=True)
    return Patch(slices, start.info), progress


def _train_lora(
    model: PreTrainedModel, start: Patch, arm: Arm, advance: Callable[[int, str], None]
) -> tuple[Patch, Progress]:
    """Low-rank updates of the planned layers' projections, with as many weights as the slices."""
    with LoraAdapter(model, arm.plan, start.num_weights, arm.seed) as adapter:
        job = Job(
            model,
            (),
            tuple(adapter.parameters),
            arm.corpus,
            arm.recipe,
            arm.seed,
            arm.lowest,
            arm.out,
            arm.track,
            arm.before,
        )
        progress = train(job, resume=arm.resume, advance=advance)
        load_best(job)
        slices = adapter.merged_slices()
    return Patch(slices, start.info), progress


def _settings(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    recipe: Recipe,
    mode: Mode,
    seed: int,
    corpus: Corpus,
) -> dict[str, Any]:
    return {
        "model": {"id": plan.model.id, "fingerprint": weight_fingerprint(model)},
        "plan": plan.model_dump(mode="json"),
        "recipe": recipe.model_dump(mode="json"),
        "mode": mode,
        "seed": seed,
        "corpus": corpus.info,
        "provenance": {"versions": versions(), "threads": torch.get_num_threads()},
    }


def _is_finished(out: Path, settings: dict[str, Any], resume: bool) -> bool:
    """Check an existing run directory against what is asked now; True if there is nothing to do."""
    path = out / "run.json"
    if not path.exists():
        _save_settings(out, settings, finished=False)
        return False
    if not resume:
        raise ArtefactError(
            "there is a run here already", where=out, fix="add --resume, or choose another --out"
        )
    before = load_artefact(path, "run")
    for key in ("model", "plan", "recipe", "mode", "seed", "corpus"):
        if before[key] != settings[key]:
            raise ArtefactError(
                f"cannot resume: {key} differs from the run that was started here",
                where=out,
                fix="use the same settings, or choose another --out",
            )
    return bool(before["finished"]) and (out / "patch.safetensors").exists()


def _save_settings(out: Path, settings: dict[str, Any], *, finished: bool) -> None:
    save_artefact(out / "run.json", "run", {**settings, "finished": finished})


def _tracker(name: str | None, out: Path, settings: dict[str, Any]) -> Tracker | None:
    """TensorBoard, Trackio, W&B and others through accelerate; None if not asked for."""
    if name is None:
        return None
    from accelerate import Accelerator

    accelerator = Accelerator(log_with=name, project_dir=str(out / "tracking"))
    config = {"mode": settings["mode"], "seed": settings["seed"], **settings["recipe"]}
    accelerator.init_trackers("headwise", config=config)
    return lambda values, step: accelerator.log(values, step=step)
