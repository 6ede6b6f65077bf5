"""Repair: operate, train, and the controls that tell a cure from a metric artefact.

All modes share plan, data order, steps and seed, and all end in the same artefact, a patch:
`surgery` treats (reinitialises, unless the plan names another treatment) and trains; `sham` treats
and never trains (by first-token mass it "recovers" every head at once); `gradient-only` trains the
same slices as they are; `ablate` only silences; `random-heads` operates on as many healthy heads,
matched by layer; `lora` spends the same number of weights on low-rank updates of the same
projections.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from headwise.alarms import Alarm, cure_alarms, loss_alarms, merge_alarms
from headwise.errors import SelectionError, SettingsError
from headwise.forward.guard import guard
from headwise.forward.mean_outputs import measure_means
from headwise.frames import frame
from headwise.models.architectures import layers_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, Slice
from headwise.progress import Progress, silent, stage
from headwise.ranks import by_the_first, is_first
from headwise.settings import changed
from headwise.surgery.checkpoints import load_best
from headwise.surgery.job import PREFIX, Held, Job, Tracker, choose_saving, hold, told_saving
from headwise.surgery.lora import LoraAdapter
from headwise.surgery.modes import TRAINED, Mode, random_heads_plan, require_treated_mode
from headwise.surgery.operation import require_planned_model, silence, unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.probes import first_token_map, mean_loss
from headwise.surgery.recipe import Recipe, default_recipe, fit_positions
from headwise.surgery.run_settings import (
    PATCH,
    Outcome,
    RunSettings,
    chosen_before,
    is_finished,
)
from headwise.surgery.run_state import RunState
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.slice_training import make_masters, master_slices
from headwise.surgery.training import train
from headwise.surgery.treatments import measured_layers, prescribed, treat, with_treatment
from headwise.texts.corpus import Corpus, build_corpus, spread_blocks
from headwise.texts.text_sets import TextSet, as_text_set, default_corpus
from headwise.texts.unigram import unigram_loss

if TYPE_CHECKING:
    import pandas as pd

_HELD_BLOCKS = 64  # blocks of kept text whose hidden states stay in memory


_MEAN_BLOCKS = 32  # blocks for the heads' mean outputs (compensate: mean)


@dataclass(frozen=True)
class RepairRun:
    """What a run produced: the patch, and how training went."""

    out: Path
    mode: Mode
    patch: Patch = field(repr=False)
    state: RunState = field(repr=False)
    outcome: Outcome = "trained"
    stock_loss: float | None = None  # on the validation text
    alarms: tuple[Alarm, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row per optimizer step and validation, as in `trace.jsonl` (needs pandas)."""
        return frame([row.to_json() for row in self.state.rows])


@takes_model
def repair(
    loaded: LoadedModel,
    plan: SurgeryPlan,
    corpus: TextSet | Corpus | Sequence[str] | None = None,
    recipe: Recipe | None = None,
    *,
    out: Path | str,
    mode: Mode = "surgery",
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    excluded: Sequence[str] = (),
    tracker: str | None = None,
    treatment: str | None = None,
    dose: float | None = None,
    keep: TextSet | Sequence[str] | None = None,
    bos: bool | None = None,
    progress: Progress = silent,
) -> RepairRun:
    """Repair in one mode and write `out/`; the model is left as it was, the result is the patch.

    Without a `corpus` the patient is trained on its own; without a `recipe` the model's default is
    used. `excluded` texts, those of a later evaluation, are left out of the corpus. The first token
    is the plan's; a `bos` that differs from it is refused.
    """
    loaded = loaded.reading(bos, (plan.bos, "the plan"), progress=progress)
    plan = changed(plan, bos=loaded.bos)
    out, model = Path(out), loaded.model
    recipe = fit_positions(recipe or default_recipe(loaded.id), loaded.max_positions)
    if not plan.targets:
        raise SelectionError("the plan has no targets", fix="choose heads, or --treatment auto")
    fingerprint = require_planned_model(model, plan, force=force)
    if treatment is not None:
        require_treated_mode(mode)
        plan = with_treatment(plan, treatment, dose)
    if mode == "random-heads":
        plan = random_heads_plan(plan, seed)
    if mode not in TRAINED:
        recipe = changed(recipe, steps=0)
    blocks = repair_corpus(corpus, loaded, recipe, excluded)
    settings = asked_settings(plan, recipe, mode, seed, blocks, fingerprint, keep)
    if by_the_first(lambda: is_finished(settings, out, resume=resume)):
        _drop_cache(out)  # a kill may have come just before this
        return finished_run(out)
    guard(model, recipe.block)
    told = _tracker(tracker, out, settings)  # refused before anything is written
    settings = _with_saving(settings, model, blocks, out, progress)
    settings.save(out)
    job = _job(model, settings, blocks, out, told)
    job = replace(job, held=_held(loaded, keep, recipe, excluded))
    stage("reading the validation text with the model as it is", progress)
    stock, unigram = stock_reading(loaded, blocks, recipe)
    patch, state = _run(job, settings, resume, progress)
    patch = replace(patch, documents=blocks.documents)
    patch.save(out / PATCH)
    alarms = _alarms(loaded, stock, unigram, state)
    done = RepairRun(out, mode, patch, state, _outcome(settings, state), stock, alarms)
    _finish(done, settings)
    return done


def _finish(done: RepairRun, settings: RunSettings) -> None:
    """Write `run.json` as that of a finished run, and drop the cache."""
    replace(
        settings,
        finished=True,
        patch=done.patch.fingerprint(),
        outcome=done.outcome,
        stock_loss=done.stock_loss,
        alarms=done.alarms,
        trace_rows=len(done.state.rows),
        map_rows=len(done.state.maps),
    ).save(done.out)
    _drop_cache(done.out)


def _drop_cache(out: Path) -> None:
    by_the_first(lambda: shutil.rmtree(out / PREFIX, ignore_errors=True))


def finished_run(out: Path) -> RepairRun:
    """A run that was finished before, from its directory."""
    settings = RunSettings.load(out)
    return RepairRun(
        out,
        settings.mode,
        Patch.load(out / PATCH),
        RunState(),
        settings.outcome,
        settings.stock_loss,
        settings.alarms,
    )


def stock_reading(
    loaded: LoadedModel, corpus: Corpus, recipe: Recipe
) -> tuple[float | None, float | None]:
    """Validation loss before the operation, and a unigram model's on the same text."""
    blocks = corpus.validation[: recipe.validation_blocks]
    if not blocks:
        return None, None
    rows = [
        row[:length].tolist()
        for block in blocks
        for row, length in zip(block.ids, block.lengths, strict=True)
    ]
    return mean_loss(loaded.model, blocks), unigram_loss(rows, loaded.num_embeddings)


def _alarms(
    loaded: LoadedModel, stock: float | None, unigram: float | None, state: RunState
) -> tuple[Alarm, ...]:
    if stock is None:
        return loaded.alarms
    unusable = loss_alarms("stock on validation text", stock, loaded.num_embeddings, unigram)
    usable = not loss_alarms("", state.best_loss, loaded.num_embeddings, unigram)
    cured = cure_alarms(stock, state.best_loss) if unusable and usable else ()
    return merge_alarms(loaded.alarms, unusable, cured)


def _outcome(settings: RunSettings, state: RunState) -> Outcome:
    """What the patch is: a run that never beat its own start is the operation, untrained."""
    if settings.recipe.steps and state.best_step != 0:
        return "trained"
    untouched = settings.mode in ("gradient-only", "lora")
    return "unchanged" if untouched else "sham"


def asked_settings(
    plan: SurgeryPlan,
    recipe: Recipe,
    mode: Mode,
    seed: int,
    corpus: Corpus,
    fingerprint: str,
    keep: TextSet | Sequence[str] | None = None,
) -> RunSettings:
    """What a run is asked to do, on this machine."""
    threads = torch.get_num_threads()
    settings = RunSettings(
        plan.model.id, fingerprint, plan, recipe, mode, seed, corpus.info, threads
    )
    return settings if keep is None else replace(settings, kept=as_text_set(keep, "").sha256)


def _held(
    loaded: LoadedModel,
    keep: TextSet | Sequence[str] | None,
    recipe: Recipe,
    excluded: Sequence[str],
) -> Held | None:
    """The stock model's behaviour on the text that it shall keep."""
    if keep is None or not recipe.steps:
        return None
    corpus = build_corpus(
        as_text_set(keep, loaded.id),
        loaded.tokenizer,
        block=recipe.block,
        batch_tokens=2,
        validation_share=0.0,
        excluded=excluded,
        first_token=loaded.first_token,
    )
    return hold(loaded.model, spread_blocks(corpus.train, _HELD_BLOCKS))


def repair_corpus(
    texts: TextSet | Corpus | Sequence[str] | None,
    loaded: LoadedModel,
    recipe: Recipe,
    excluded: Sequence[str],
) -> Corpus:
    """The corpus cut into the recipe's blocks; evaluation texts are left out."""
    if isinstance(texts, Corpus):
        return texts
    return build_corpus(
        default_corpus(loaded.id) if texts is None else as_text_set(texts, loaded.id),
        loaded.tokenizer,
        block=recipe.block,
        batch_tokens=recipe.batch_tokens,
        excluded=excluded,
        first_token=loaded.first_token,
    )


def _with_saving(
    settings: RunSettings, model: PreTrainedModel, corpus: Corpus, out: Path, progress: Progress
) -> RunSettings:
    """The settings with how memory and time are saved: as at the start of a run that goes on."""
    recipe, lowest = settings.recipe, settings.lowest
    if not recipe.steps:
        return settings
    before = by_the_first(lambda: chosen_before(settings, out))
    if before is not None:
        above = len(layers_of(model)) - lowest
        return replace(settings, saving=told_saving(recipe, before, above))
    found = by_the_first(lambda: choose_saving(model, recipe, corpus, lowest, out))
    stage(found.reason, progress)
    return replace(settings, saving=found.saving)


def _job(
    model: PreTrainedModel,
    settings: RunSettings,
    corpus: Corpus,
    out: Path,
    track: Tracker | None,
) -> Job:
    """The job as every mode has it; what is trained comes with the mode."""
    return Job(
        model,
        (),
        (),
        corpus,
        settings.recipe,
        settings.seed,
        settings.lowest,
        out,
        track,
        before=first_token_map(model, corpus),
        title=settings.mode,
        identity=settings.identity,
        saving=settings.saving,
    )


def _run(
    job: Job, settings: RunSettings, resume: bool, progress: Progress
) -> tuple[Patch, RunState]:
    start = _start(job.model, settings.plan, settings.mode, job.corpus)
    if settings.mode == "lora":
        return _train_lora(job, start, settings.plan, resume, progress)
    return _train_masters(job, start, resume, progress)


def _start(model: PreTrainedModel, plan: SurgeryPlan, mode: Mode, corpus: Corpus) -> Patch:
    """The patch that training starts from."""
    if mode in ("gradient-only", "lora"):
        return unchanged(model, plan)
    if mode == "ablate":
        return silence(model, plan)
    prescription = prescribed(plan)
    means = None
    if plan.compensate == "mean":
        means = measure_means(model, corpus.train[:_MEAN_BLOCKS])
    directions = measure_directions(model, corpus.train, measured_layers(prescription))
    return treat(model, plan, prescription, directions=directions, mean_outputs=means)


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
    return (patch if job.recipe.steps else patch.without_unchanged()), state


def _train_lora(
    job: Job, start: Patch, plan: SurgeryPlan, resume: bool, progress: Progress
) -> tuple[Patch, RunState]:
    """Low-rank updates of the planned layers' projections, with as many weights as the slices."""
    with LoraAdapter(job.model, plan, start.num_weights, job.seed) as adapter:
        job = replace(job, trained=tuple(adapter.parameters))
        state = train(job, resume=resume, progress=progress)
        load_best(job, state.best_step)
        slices = adapter.merged_slices()
    return Patch(slices, start.info), state


def _tracker(name: str | None, out: Path, settings: RunSettings) -> Tracker | None:
    """TensorBoard, Trackio, W&B and others through accelerate; None if not asked for."""
    if name is None or not is_first():
        return None
    from accelerate import Accelerator

    recipe = settings.recipe.model_dump(mode="json")
    config = {"mode": settings.mode, "seed": settings.seed, **recipe}
    try:
        accelerator = Accelerator(log_with=name, project_dir=str(out / "tracking"))
        accelerator.init_trackers("headwise", config=config)
    except (ValueError, ImportError, OSError) as error:
        raise SettingsError(
            f"the tracker {name!r} cannot be used ({str(error)[:200]})",
            fix="install it, or choose tensorboard, trackio, wandb ...",
        ) from None
    return lambda values, step: accelerator.log(dict(values), step=step)
