"""`repair --treatment auto`: the treatment and dose per head, slice training, and never worse.

Everything is chosen on training text: triage says what is wrong with each head, a search gives the
doses, and heads that the model uses (parked, working) are spared. Empty heads are reinitialised
only where nothing sleeps. Of many heads those are triaged that to first order gain most by a
treatment or cost least. What comes out of training is then judged on validation text. Unless it
is better than stock with 95% confidence, the patch is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel

from headwise.diagnosis.triage_settings import TriageThresholds
from headwise.diagnosis.triage_values import HeadTriage, TriageClass
from headwise.heads import Head, format_heads
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.models.values import PatchInfo
from headwise.progress import Progress, silent, stage
from headwise.settings import changed
from headwise.surgery.operation import require_planned_model
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.recipe import Recipe
from headwise.surgery.repair import RepairRun, asked_settings, finished_run, repair
from headwise.surgery.run_settings import PATCH, RunSettings, is_finished
from headwise.surgery.run_state import RunState
from headwise.surgery.sink_directions import LayerDirections, measure_directions
from headwise.surgery.treatments import Dose, Prescription, with_prescription
from headwise.texts.corpus import Corpus
from headwise.texts.text_sets import TextSet
from headwise.therapy.dose import DOSE_BLOCKS, TRIALS, choose_doses
from headwise.therapy.ill_heads import training_documents
from headwise.therapy.never_worse import (
    count_documents,
    judged_blocks,
    validation_change,
)
from headwise.therapy.record import THERAPY, Therapy
from headwise.therapy.triage import INTERVENTIONS, most_promising, triage_heads

FEWEST_TEXTS, MOST_TEXTS = 12, 32  # training documents of a triage: more where heads are few
# Heads that are triaged at most. On the patients and MiniMind2 every head that gains over 0.005 by
# a treatment is among the first ten to first order, and none gains more than its estimate (LOG).
TRIAGED = 40
SPARED: tuple[TriageClass, ...] = ("parked", "working")  # the model uses them as they are


def choice_blocks(heads: int) -> float:
    """Blocks through a forward pass, at most, until treatments and doses of heads are chosen.

    A head is changed in half of the layers on average: under triage's interventions, then with
    every dose that the search tries for it. A first-order estimate takes a backward pass too.
    """
    texts = triage_texts_for(heads)
    estimates = 4 * texts if heads > TRIAGED else 0
    tried = (texts * INTERVENTIONS + DOSE_BLOCKS * TRIALS) * min(heads, TRIAGED) / 2
    return estimates + tried


def triage_texts_for(heads: int) -> int:
    """Documents for so many heads: about as much work, whether many heads or few."""
    return min(MOST_TEXTS, max(FEWEST_TEXTS, FEWEST_TEXTS * TRIAGED // max(heads, 1)))


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
    found = _triaged(model, plan, corpus, directions, progress)
    spared = [head for head in heads if head not in found or found[head].class_ in SPARED]
    promising = [head for head, row in found.items() if head not in spared and _hopeful(row)]
    stage(f"looking for the dose of {len(heads)} heads", progress)
    choice = choose_doses(
        model, plan, corpus.train, heads, directions, spared=spared, promising=promising
    )
    given: Prescription = choice.prescription or {
        head: Dose("reinitialise", 1.0) for head, row in found.items() if row.class_ == "empty"
    }
    return Therapy(
        asked=_identity(asked),
        treatments={str(head): dose.treatment for head, dose in sorted(given.items())},
        doses={str(head): dose.amount for head, dose in sorted(given.items())},
        left_alone=tuple(str(head) for head in heads if head not in given),
        classes={str(head): row.class_ for head, row in sorted(found.items())},
        tried=choice.tried,
        untriaged=tuple(str(head) for head in heads if head not in found),
    )


def _hopeful(found: HeadTriage) -> bool:
    """Whether the better query treatment gained what is worth one, sure or not."""
    return found.release.value < -TriageThresholds().gain


def _triaged(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    corpus: Corpus,
    directions: Mapping[int, LayerDirections],
    progress: Progress,
) -> dict[Head, HeadTriage]:
    """What triage finds on training text in the heads that are worth its work."""
    if not plan.target_heads:
        return {}
    texts = training_documents(corpus, triage_texts_for(len(plan.target_heads)))
    plan = changed(plan, kv_policy="queries-only", treatments={}, doses={}, summary=None)
    if len(plan.target_heads) > TRIAGED:
        stage(f"first-order estimates of {len(plan.target_heads)} heads", progress)
        chosen = most_promising(model, plan, texts, directions, TRIAGED, progress=progress)
        plan = changed(plan, targets=format_heads(chosen))
    stage(f"triage of {len(plan.target_heads)} heads on training text", progress)
    found, _ = triage_heads(model, plan, texts, directions=directions, progress=progress)
    return {Head.parse(name): row for name, row in found.items()}


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
