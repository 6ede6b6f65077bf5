"""`repair --treatment auto`: the treatment and dose per head, slice training, and never worse.

Everything is chosen on training text: triage says what is wrong with each head, a search gives the
doses, and heads that the model uses (parked, working) are spared. Empty heads are reinitialised
only where nothing sleeps. What comes out of training is then judged on validation text. Unless it
is better than stock with 95% confidence, the patch is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel

from headwise.diagnosis.triage_values import TriageClass
from headwise.errors import TextError
from headwise.heads import Head
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.models.patch_info import PatchInfo
from headwise.progress import Progress, silent, stage
from headwise.proof.staged import document_order
from headwise.settings import changed
from headwise.surgery.operation import require_planned_model
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.recipe import Recipe
from headwise.surgery.repair import RepairRun, asked_settings, finished_run, repair
from headwise.surgery.run_settings import PATCH, RunSettings, is_finished
from headwise.surgery.run_state import RunState
from headwise.surgery.sink_directions import LayerDirections, measure_directions
from headwise.surgery.treatments import Dose, Prescription, with_prescription
from headwise.texts.corpus import Corpus, spread_blocks
from headwise.texts.text_sets import TextSet
from headwise.therapy.dose import DOSE_BLOCKS, TRIALS, choose_doses
from headwise.therapy.never_worse import count_documents, judged_blocks, validation_change
from headwise.therapy.record import THERAPY, Therapy
from headwise.therapy.triage import INTERVENTIONS, triage_heads

TRIAGE_TEXTS = 12  # training documents; heads that stay undecided are left to the dose search
SPARED: tuple[TriageClass, ...] = ("parked", "working")  # the model uses them as they are


def choice_blocks(heads: int) -> float:
    """Blocks through a forward pass, at most, until treatments and doses of heads are chosen.

    A head is changed in half of the layers on average: under triage's interventions, then with
    every dose that the search tries for it.
    """
    return (TRIAGE_TEXTS * INTERVENTIONS + DOSE_BLOCKS * TRIALS) * heads / 2


@dataclass(frozen=True)
class AutoRun:
    """The run, and what was decided on the way to it."""

    run: RepairRun
    therapy: Therapy = field(repr=False)


def repair_automatically(
    loaded: LoadedModel,
    plan: SurgeryPlan,
    corpus: Corpus,
    recipe: Recipe,
    *,
    out: Path,
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    tracker: str | None = None,
    keep: TextSet | Sequence[str] | None = None,
    progress: Progress = silent,
) -> AutoRun:
    """Treat each of the plan's heads as it needs, or none; the result is the patch in `out`."""
    model = loaded.model
    fingerprint = require_planned_model(model, plan, force=force)
    _require_validation(corpus)
    asked = asked_settings(plan, recipe, "surgery", seed, corpus, fingerprint, keep)
    if not resume:
        is_finished(asked, out, resume=False)  # refuses a folder that holds another run
    therapy = _earlier(asked, out) if resume else None
    if therapy is None:
        therapy = _chosen(model, asked, corpus, progress)
        therapy.save(out)
    if therapy.better is not None:
        return AutoRun(finished_run(out), therapy)
    if not therapy.treatments:
        return _left_alone(asked, replace(therapy, better=False), out)
    run = repair(
        loaded,
        _treated_plan(plan, therapy),
        corpus,
        recipe,
        out=out,
        seed=seed,
        resume=resume,
        force=force,
        tracker=tracker,
        keep=keep,
        progress=progress,
    )
    return _judged(model, run, therapy, corpus, recipe, progress)


def _require_validation(corpus: Corpus) -> None:
    if count_documents(corpus.validation) < 2:
        raise TextError(
            "auto needs two validation documents at least, to know whether a repair is better",
            where=corpus.name,
            fix="add documents: about one in twenty becomes validation text",
        )


def _earlier(asked: RunSettings, out: Path) -> Therapy | None:
    """What an interrupted run in the same folder had chosen from the same inputs."""
    if not (out / THERAPY).exists():
        return None
    found = Therapy.load(out)
    return found if dict(found.asked) == _identity(asked) else None


def _identity(asked: RunSettings) -> dict[str, object]:
    body = asked.to_json()
    return {key: body[key] for key in ("model", "plan", "recipe", "seed", "corpus", "kept")}


def _chosen(
    model: PreTrainedModel, asked: RunSettings, corpus: Corpus, progress: Progress
) -> Therapy:
    """Classes, then doses by search on training text; where nothing sleeps, empty heads."""
    plan, heads = asked.plan, asked.plan.target_heads
    directions = measure_directions(model, corpus.train, [head.layer for head in heads])
    classes = _classes(model, plan, corpus, directions, progress)
    stage(f"looking for the dose of {len(heads)} heads", progress)
    spared = [head for head in heads if classes[head] in SPARED]
    choice = choose_doses(model, plan, corpus.train, heads, directions, spared=spared)
    given: Prescription = choice.prescription or {
        head: Dose("reinitialise", 1.0) for head in heads if classes[head] == "empty"
    }
    return Therapy(
        asked=_identity(asked),
        treatments={str(head): dose.treatment for head, dose in sorted(given.items())},
        doses={str(head): dose.amount for head, dose in sorted(given.items())},
        left_alone=tuple(str(head) for head in heads if head not in given),
        classes={str(head): classes[head] for head in heads},
        tried=choice.tried,
    )


def _classes(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    corpus: Corpus,
    directions: Mapping[int, LayerDirections],
    progress: Progress,
) -> dict[Head, TriageClass]:
    """What triage finds in the plan's heads on training text."""
    if not plan.target_heads:
        return {}
    stage(f"triage of {len(plan.target_heads)} heads on training text", progress)
    pieces = {  # one per document: the bootstrap takes them for independent
        owner: ids[:length].tolist()
        for block in spread_blocks(corpus.train, 2 * TRIAGE_TEXTS)
        for owner, ids, length in zip(block.index, block.ids, block.lengths, strict=True)
        if length > 1
    }
    rows = list(pieces.values())
    order = document_order(len(rows), 0)[:TRIAGE_TEXTS]
    queries = changed(plan, kv_policy="queries-only", treatments={}, doses={}, summary=None)
    found, _ = triage_heads(
        model, queries, [rows[i] for i in order], directions=directions, progress=progress
    )
    return {Head.parse(name): row.class_ for name, row in found.items()}


def _treated_plan(plan: SurgeryPlan, therapy: Therapy) -> SurgeryPlan:
    given = {
        Head.parse(name): Dose(treatment, therapy.doses[name])
        for name, treatment in therapy.treatments.items()
    }
    return with_prescription(plan, given)


def _judged(
    model: PreTrainedModel,
    run: RepairRun,
    therapy: Therapy,
    corpus: Corpus,
    recipe: Recipe,
    progress: Progress,
) -> AutoRun:
    """Keep the patch if it is better than stock with 95% confidence, else empty it."""
    stage("judging the repair on validation text", progress)
    blocks = judged_blocks(corpus, recipe.validation_blocks if recipe.steps else 0)
    change = validation_change(model, run.patch, blocks)
    better = change.high < 0
    told = replace(therapy, change=change, documents=count_documents(blocks), better=better)
    if not better:
        return _left_alone(RunSettings.load(run.out), told, run.out, run.state)
    told.save(run.out)
    return AutoRun(run, told)


def _left_alone(
    settings: RunSettings, therapy: Therapy, out: Path, state: RunState | None = None
) -> AutoRun:
    """An empty patch, and a run that says so; its plan operates on nothing."""
    plan = changed(settings.plan, targets="", treatments={}, doses={}, summary=None)
    patch = Patch({}, PatchInfo(base_model=settings.model, plan=plan.model_dump(mode="json")))
    found = state or RunState()
    if state is None:
        found.write_rows(out, settings.identity)
    patch.save(out / PATCH)
    therapy.save(out)
    replace(settings, finished=True, outcome="empty", patch=patch.fingerprint()).save(out)
    return AutoRun(RepairRun(out, settings.mode, patch, found, "empty"), therapy)
