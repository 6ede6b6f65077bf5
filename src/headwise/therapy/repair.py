"""Repair: take a request, write a plan where `auto` is asked for, carry it out, and judge it.

Every way to ask (the library's keywords, the command line, an arm of a study) becomes one
`RepairRequest`, and every request takes the same steps. The model is left as it was; the result is
the patch in `out/`, beside `run.json`, the trace and the head maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwise.alarms import Alarm, cure_alarms, loss_alarms, merge_alarms
from headwise.artefacts import remove_files
from headwise.errors import SettingsError
from headwise.forward.guard import guard
from headwise.frames import frame
from headwise.integrity.locks import one_writer
from headwise.models.architectures import layers_of, require_plain
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch
from headwise.models.values import PatchInfo, model_name
from headwise.progress import Budget, Progress, Work, silent, stage, unlimited
from headwise.provenance import Origin, require_same_origin
from headwise.ranks import by_the_first, is_first
from headwise.settings import changed
from headwise.surgery.fitting import fit_request
from headwise.surgery.job import PREFIX, Job, Tracker, choose_saving, last_hiddens, saving_of
from headwise.surgery.modes import carry_out, random_heads_plan
from headwise.surgery.operation import require_planned_model
from headwise.surgery.plan import SurgeryPlan, planned_model
from headwise.surgery.plan_settings import Mode
from headwise.surgery.probes import first_token_map, mean_loss
from headwise.surgery.recipe import Recipe
from headwise.surgery.run_state import RunState
from headwise.surgery.settings import RepairRequest
from headwise.surgery.sink_directions import LayerDirections
from headwise.surgery.treatments import with_treatment
from headwise.surgery.values import (
    PATCH,
    THEN,
    Outcome,
    RunSettings,
    chosen_before,
    is_finished,
    resumed_versions,
)
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus, build_corpus, spread_blocks
from headwise.texts.corpus_info import CorpusInfo
from headwise.texts.text_sets import TextSet, as_text_set, bundled_texts, default_texts
from headwise.texts.unigram import unigram_loss
from headwise.therapy.auto import (
    TRIAL_STEPS,
    choice_blocks,
    try_empty_heads,
    without_targets,
    write_plan,
)
from headwise.therapy.ill_heads import SEARCH_BLOCKS, IllHeads, find_ill_heads
from headwise.therapy.never_worse import (
    judged_blocks,
    loss_change,
    other_blocks,
    require_validation,
)
from headwise.therapy.values import THERAPY, Therapy

if TYPE_CHECKING:
    import pandas as pd

_HELD_BLOCKS = 64  # blocks of kept text whose hidden states stay in memory
_UNVALIDATED = (
    "no validation text: about one document in twenty would be, and the corpus has too few. The "
    "patch will be the last state, and nothing here says whether it is better than stock"
)


@dataclass(frozen=True)
class RepairRun:
    """What a run produced: the patch, how training went, and what `run.json` says of it."""

    out: Path
    settings: RunSettings
    patch: Patch = field(repr=False)
    state: RunState = field(repr=False)

    def __repr__(self) -> str:
        run = self.settings
        heads = f"{len(run.plan.target_heads)} heads, {run.recipe.steps} steps"
        return (
            f"RepairRun({run.name} of {model_name(run.model)}, {heads}: {run.outcome}, {self.out})"
        )

    @property
    def mode(self) -> Mode:
        """Surgery, or the control that it was."""
        return self.settings.mode

    @property
    def outcome(self) -> Outcome:
        """What the patch is: trained, sham, unchanged or empty."""
        return self.settings.outcome

    @property
    def stock_loss(self) -> float | None:
        """On the validation text, before the operation."""
        return self.settings.stock_loss

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What makes its numbers not worth believing."""
        return self.settings.alarms

    def to_frame(self) -> pd.DataFrame:
        """One row per optimizer step and validation, as in `trace.jsonl` (needs pandas)."""
        return frame(self.state.trace())


@takes_model
def repair(
    loaded: LoadedModel,
    plan: SurgeryPlan | None = None,
    corpus: TextSet | Corpus | Sequence[str] | None = None,
    recipe: Recipe | None = None,
    *,
    out: Path | str,
    mode: Mode = "surgery",
    treatment: str | None = None,
    dose: float | None = None,
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    excluded: TextSet | Sequence[str] | None = None,
    tracker: str | None = None,
    keep: TextSet | Sequence[str] | None = None,
    also: TextSet | Sequence[str] | None = None,
    bos: bool | None = None,
    changes: Mapping[str, float | bool | str | None] | None = None,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> RepairRun:
    """Repair in one mode and write `out/`; the model is left as it was, the result is the patch.

    Without a `corpus` the patient is trained on its own; without a `recipe` one is fitted, and
    `changes` come last. "auto" chooses per head (no plan: ill ones) and ends in an empty patch
    without a sure gain on text like the corpus; what it does to other text (`also`, else `keep`,
    else the bundled varied texts) is measured beside it. `keep` texts hold the model to what stock
    says there, and a patch that makes the other text worse is emptied; `excluded` texts (by default
    those that it is evaluated on) are trained on in neither way.
    """
    other = None if also is None else as_text_set(also, loaded.id)
    kept = None if keep is None else as_text_set(keep, loaded.id)
    left_out = default_texts(loaded.id) if excluded is None else excluded
    if not isinstance(left_out, TextSet):
        left_out = TextSet("given", tuple(left_out))
    request = RepairRequest(
        plan=plan,
        mode=mode,
        treatment=treatment,
        dose=dose,
        recipe=recipe,
        changes=changes or {},
        seed=seed,
        keep=None if kept is None else kept.describe(),
        also=None if other is None else other.describe(),
        excluded=left_out.describe() if left_out.texts else None,
        bos=bos,
        force=force,
        tracker=tracker,
    )
    out = Path(out)
    loaded, plan, fingerprint = _planned(loaded, request, progress)
    stage("tokenising the corpus", progress)
    untrained = [*left_out.texts, *(other.texts if other else ())]
    recipe, blocks = fit_request(loaded, request, corpus, untrained, judged=request.auto)
    _tell_corpus(blocks.info, progress)
    if request.auto:
        require_validation(blocks)
    if recipe.steps:
        _tell_recipe(recipe, loaded, blocks, progress)
    threads = torch.get_num_threads()
    asked = RunSettings(request, plan.model.id, fingerprint, plan, recipe, blocks.info, threads)
    with one_writer(out):
        if by_the_first(lambda: is_finished(asked, out, resume=resume)):
            _drop_cache(out)  # a kill may have come just before this
            return finished_run(out)
        run = by_the_first(lambda: resumed_versions(asked, out))
        _tell_versions(run, progress)
        budget(loaded.model, _asked_work(run))
        guard(loaded.model, recipe.block)
        track = _tracker(asked, out)  # refused before anything is written
        job = Job(loaded.model, run, blocks, out, track=track)
        if kept is not None and recipe.steps:
            block, avoided = recipe.block, left_out.texts
            held = build_corpus(loaded, kept, block=block, validation_share=0.0, excluded=avoided)
            held = replace(held, train=tuple(spread_blocks(held.train, _HELD_BLOCKS)))
            job = replace(job, kept=held, stock_hidden=last_hiddens(loaded.model, held.train))
        other = other or kept or bundled_texts()
        return _finished(_run(loaded, job, other, resume, progress))


def _planned(
    loaded: LoadedModel, request: RepairRequest, progress: Progress
) -> tuple[LoadedModel, SurgeryPlan, str]:
    """The plan as the mode and the treatment change it, for this very model.

    It comes with the model, which starts texts as the plan says, and the weights' fingerprint.
    """
    given = request.plan
    request.require_plan()
    require_plain(loaded.model)
    if given is None:  # auto writes one; until then it has no heads
        loaded, described = loaded.reading(request.bos, progress=progress), loaded.describe()
        plan = SurgeryPlan(model=planned_model(described), targets="", bos=loaded.bos)
        require_planned_model(loaded.model, plan, force=True)
        return loaded, plan, described.fingerprint
    fingerprint = require_planned_model(loaded.model, given, force=request.force)
    loaded = loaded.reading(request.bos, (given.bos, "the plan"), progress=progress)
    plan = changed(given, bos=loaded.bos)
    if request.treatment is not None and not request.auto:
        plan = with_treatment(plan, request.treatment, request.dose)
    if request.mode == "random-heads":
        plan = random_heads_plan(plan, request.seed)
    return loaded, plan, fingerprint


def repair_work(
    recipe: Recipe, heads: int, weights: int, *, auto: bool = False, search: bool = False
) -> Work:
    """The steps, with their backward passes, the validations, and what auto tries before.

    With `search` it is not known yet which heads are ill: `heads` is all of them, at most.
    """
    blocks = float((1 + recipe.steps // recipe.validate_every) * recipe.validation_blocks)
    blocks += choice_blocks(heads) if auto else 0
    blocks += SEARCH_BLOCKS if search else 0
    steps = recipe.steps + (2 * min(recipe.steps, TRIAL_STEPS) if auto else 0)
    one = recipe.batch_size * recipe.block
    return Work(
        tokens=3 * steps * recipe.batch_tokens + blocks * recipe.block,
        batch=one,
        kept=one if recipe.steps else 0,
        trained=weights,
        less="--steps, --block, --batch-size" + (", --plan" if auto else ""),
    )


def _asked_work(asked: RunSettings) -> Work:
    plan, auto = asked.plan, asked.request.auto
    search = auto and not plan.targets
    every = plan.model.num_layers * plan.model.num_heads
    weights = 0 if plan.summary is None else plan.summary.trainable_weights
    heads = every if search else len(plan.target_heads)
    return repair_work(asked.recipe, heads, weights, auto=auto, search=search)


def _tell_corpus(info: CorpusInfo, progress: Progress) -> None:
    """What near-duplicates did to the corpus, where there are any."""
    if info.near_excluded:
        stage(
            f"left out of the corpus: {info.near_excluded} near-duplicates of evaluation texts",
            progress,
        )
    if info.near_duplicates:
        stage(
            f"{info.near_duplicates} documents are near-duplicates of others: each stays on their "
            "side of the split, and in validation they count as one",
            progress,
        )


def _tell_recipe(recipe: Recipe, loaded: LoadedModel, corpus: Corpus, progress: Progress) -> None:
    """The recipe and what decided it, in one line."""
    width = int(loaded.model.config.get_text_config().hidden_size)
    positions = loaded.max_positions
    stage(
        f"recipe {recipe.name}: {recipe.steps} steps of {recipe.batch_tokens:,} tokens at lr "
        f"{recipe.lr:.2g}, blocks of {recipe.block} (width {width}, "
        f"{positions or 'any number of'} positions, {corpus.info.train_tokens:,} training tokens)",
        progress,
    )
    if not corpus.validation and recipe.validation_blocks:
        stage(_UNVALIDATED, progress)


def _tell_versions(run: RunSettings, progress: Progress) -> None:
    """Say what a run that goes on was begun with, if that was something else."""
    moved = [f"{name} {both}" for name, both in run.versions.items() if THEN in both]
    if moved:
        stage(f"begun under other versions: {'; '.join(moved)}", progress)


def _run(
    loaded: LoadedModel, job: Job, other: TextSet, resume: bool, progress: Progress
) -> RepairRun:
    """Carry out the plan, or the one that auto writes, and judge that one, on `other` text too."""
    therapy: Therapy | None = None
    directions: dict[int, LayerDirections] = {}
    if job.run.request.auto:
        therapy = _earlier(job) if resume else None
        if therapy is None:
            ill = _ill_heads(loaded, job, progress)
            therapy, directions = write_plan(
                job.model, ill, job.corpus, asked=job.run.identity, progress=progress
            )
            if not therapy.plan.targets:
                job = replace(job, run=replace(job.run, plan=ill.plan))
                return _left_alone(job, replace(therapy, better=False), RunState())
            therapy = try_empty_heads(job, therapy, progress)
        therapy.save(job.out)
        job = replace(job, run=replace(job.run, plan=therapy.plan))
    job = replace(job, run=_with_saving(job, progress))
    job.run.save(job.out)
    job = replace(job, before=first_token_map(job.model, job.corpus))
    stage("reading the validation text with the model as it is", progress)
    stock, unigram = _stock_reading(loaded, job)
    patch, state = carry_out(job, directions, resume=resume, progress=progress)
    kept = () if job.kept is None else job.kept.documents
    patch = replace(patch, documents=tuple(sorted({*job.corpus.documents, *kept})))
    run = replace(
        job.run,
        outcome=_outcome(job.run, state),
        stock_loss=stock,
        alarms=_alarms(loaded, stock, unigram, state),
    )
    job = replace(job, run=run)
    done = RepairRun(job.out, run, patch, state)
    if therapy is None:
        return done
    stage(f"auto: judging the repair on validation text and on {other.name}", progress)
    therapy = _judged(job, therapy, patch, other_blocks(loaded, other, job.run.recipe.block), other)
    known = {part.texts: part.change for part in (therapy.judged, therapy.elsewhere) if part}
    job = replace(job, run=replace(run, against_stock=known))
    if not therapy.better:
        return _left_alone(job, therapy, state)
    replace(therapy, run=job.run.identity).save(job.out)
    return replace(done, settings=job.run)


def _earlier(job: Job) -> Therapy | None:
    """What an interrupted run in the same folder had chosen from the same inputs."""
    if not (job.out / THERAPY).exists():
        return None
    therapy = Therapy.load(job.out)
    return therapy if therapy.asked == job.run.identity else None


def _ill_heads(loaded: LoadedModel, job: Job, progress: Progress) -> IllHeads:
    if job.run.plan.targets:
        return IllHeads(job.run.plan)
    return find_ill_heads(loaded, job.corpus, job.run.recipe, progress=progress)


def _judged(
    job: Job, therapy: Therapy, patch: Patch, elsewhere: Sequence[Batch], other: TextSet
) -> Therapy:
    """Whether the patch is better than stock on validation text with 95% confidence.

    Of one that is, it is asked what it does elsewhere; where text is to be kept, that must not be
    harm.
    """
    recipe = job.run.recipe
    blocks = judged_blocks(job.corpus, recipe.validation_blocks if recipe.steps else 0)
    judged = loss_change(job.model, patch, blocks, "validation text")
    if judged.change.high >= 0:
        return replace(therapy, judged=judged, better=False)
    there = loss_change(job.model, patch, elsewhere, other.name)
    harmed = job.run.request.keep is not None and there.change.low > 0
    return replace(therapy, judged=judged, elsewhere=there, better=not harmed)


def _left_alone(job: Job, therapy: Therapy, state: RunState) -> RepairRun:
    """An empty patch, and a run that says so."""
    if not state.trace():
        state.write_rows(job.out, job.run.identity)
    replace(therapy, run=job.run.identity).save(job.out)
    plan = without_targets(job.run.plan).model_dump(mode="json")
    run = replace(job.run, outcome="empty")
    return RepairRun(job.out, run, Patch({}, PatchInfo(base_model=run.model, plan=plan)), state)


def _finished(done: RepairRun) -> RepairRun:
    """Write the patch, then `run.json` as that of a finished run, and drop the cache."""
    done.patch.save(done.out / PATCH)
    run = replace(
        done.settings,
        finished=True,
        patch=done.patch.fingerprint(),
        trace_rows=len(done.state.trace()),
        map_rows=len(done.state.maps),
    )
    run.save(done.out)
    _drop_cache(done.out)
    return replace(done, settings=run)


def _drop_cache(out: Path) -> None:
    by_the_first(lambda: remove_files(out / PREFIX, "[0-9]*.safetensors"))


def finished_run(out: Path) -> RepairRun:
    """A run that was finished before, from its directory."""
    run, patch = RunSettings.load(out), Patch.load(out / PATCH)
    require_same_origin(
        Origin(str(out / "run.json"), patch=run.patch or None),
        Origin(str(out / PATCH), patch=patch.fingerprint()),
        fix="put the patch of this run back, or start anew in another --out",
    )
    return RepairRun(out, run, patch, RunState.of_finished(out, run.recipe.steps))


def _stock_reading(loaded: LoadedModel, job: Job) -> tuple[float | None, float | None]:
    """Validation loss before the operation, and a unigram model's on the same text."""
    blocks = job.corpus.validation[: job.run.recipe.validation_blocks]
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


def _outcome(run: RunSettings, state: RunState) -> Outcome:
    """What the patch is: a run that never beat its own start is the operation, untrained."""
    if run.recipe.steps and state.best_step != 0:
        return "trained"
    return "unchanged" if run.mode in ("gradient-only", "lora") else "sham"


def _with_saving(job: Job, progress: Progress) -> RunSettings:
    """The settings with how memory and time are saved: as at the start of a run that goes on."""
    run, recipe = job.run, job.run.recipe
    if not recipe.steps:
        return run
    before = by_the_first(lambda: chosen_before(run, job.out))
    if before is not None:
        above = len(layers_of(job.model)) - run.lowest
        return replace(run, saving=saving_of(recipe, before, above))
    saving, reason = by_the_first(
        lambda: choose_saving(job.model, recipe, job.corpus, run.lowest, job.out)
    )
    stage(reason, progress)
    return replace(run, saving=saving)


def _tracker(run: RunSettings, out: Path) -> Tracker | None:
    """TensorBoard, Trackio, W&B and others through accelerate; None if not asked for."""
    name = run.request.tracker
    if name is None or not is_first():
        return None
    from accelerate import Accelerator

    config = {"mode": run.mode, "seed": run.seed, **run.recipe.model_dump(mode="json")}
    try:
        accelerator = Accelerator(log_with=name, project_dir=str(out / "tracking"))
        accelerator.init_trackers("headwise", config=config)
    except (ValueError, ImportError, OSError) as error:
        raise SettingsError(
            f"the tracker {name!r} cannot be used ({str(error)[:200]})",
            fix="install it, or choose tensorboard, trackio, wandb ...",
        ) from None
    return lambda values, step: accelerator.log(dict(values), step=step)
