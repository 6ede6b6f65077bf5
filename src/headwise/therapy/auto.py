"""`repair --treatment auto` writes a plan: which heads are treated, with what, and how much.

Everything is chosen on training text: triage says what is wrong with each head, a search gives the
doses, and heads that the model uses (parked, working) are spared. Flat and harmful heads for which
the search finds nothing are trained as they are. Empty heads are treated only where nothing else
is: reinitialised or trained as they are, whichever does better in a short trial. Of many heads
those are triaged that to first order gain most by a treatment or cost least. With the others
treated, a head that was not called asleep or harmful is judged again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from headwise.heads import Head, format_heads
from headwise.progress import Progress, silent, stage
from headwise.settings import changed
from headwise.surgery.job import Job
from headwise.surgery.modes import carry_out
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.sink_directions import LayerDirections, with_directions
from headwise.surgery.treatments import (
    Dose,
    Prescription,
    treat,
    with_prescription,
    with_slopes,
)
from headwise.texts.corpus import Corpus, spread_blocks
from headwise.therapy.dose import DOSE_BLOCKS, TRIALS, choose_doses
from headwise.therapy.ill_heads import IllHeads, training_documents
from headwise.therapy.never_worse import loss_change
from headwise.therapy.values import Therapy, Tried
from headwise.triaging.settings import TriageThresholds
from headwise.triaging.triage import INTERVENTIONS, most_promising, triage_heads
from headwise.triaging.values import HeadTriage, TriageClass

FEWEST_TEXTS, MOST_TEXTS = 12, 32  # training documents of a triage: more where heads are few
# Heads that are triaged at most. On the patients and MiniMind2 every head that gains over 0.005 by
# a treatment is among the first ten to first order, and none gains more than its estimate (LOG).
TRIAGED = 40
TRIAL_STEPS = 20  # of training empty heads in either way, before one is chosen
REVISED = 8  # heads that are judged again at most
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


def write_plan(
    model: PreTrainedModel,
    ill: IllHeads,
    corpus: Corpus,
    *,
    asked: str,
    most: int = TRIAGED,
    progress: Progress = silent,
) -> tuple[Therapy, dict[int, LayerDirections]]:
    """Classes, then doses by search on training text; where nothing sleeps, empty heads.

    The directions that were measured for it come along: carrying the plan out needs them again.
    """
    plan, heads = ill.plan, ill.plan.target_heads
    layers = [head.layer for head in heads]
    directions = with_directions(ill.directions, model, corpus.train, layers, plan.sink_positions)
    rows = _triaged(model, ill, corpus, directions, most, progress)
    symptoms = {} if ill.diagnosis is None else ill.diagnosis.symptoms
    others = {
        "harmful": [head for head, row in sorted(rows.items()) if row.class_ == "harmful"],
        "flat": [h for h in symptoms.get("flat", []) if h in rows and rows[h].class_ != "harmful"],
    }
    apart = [head for some in others.values() for head in some]
    flat = {head.layer for head in others["flat"]}
    directions = with_slopes(directions, model, corpus.train, flat)
    spared = [head for head in heads if head not in rows or rows[head].class_ in SPARED]
    promising = [head for head, row in rows.items() if head not in spared and _hopeful(row)]
    stage(f"auto: looking for the dose of {len(heads)} heads", progress)
    doses, tried = choose_doses(
        model,
        plan,
        corpus.train,
        directions,
        spared=[head for head in spared if head not in apart],
        promising=promising,
        others=others,
    )
    given: Prescription = {**dict.fromkeys(apart, Dose("none", 0.0)), **doses} or {
        head: Dose("reinitialise", 1.0) for head, row in rows.items() if row.class_ == "empty"
    }
    revised = _revised(model, plan, given, rows, directions, corpus)
    therapy = Therapy(
        asked=asked,
        plan=with_prescription(plan, given) if given else without_targets(plan),
        left_alone=tuple(str(head) for head in heads if head not in given),
        classes={str(head): row.class_ for head, row in sorted(rows.items())},
        tried=tuple(tried),
        untriaged=tuple(str(head) for head in heads if head not in rows),
        symptoms={name: format_heads(some) for name, some in symptoms.items()},
        heads=plan.model.num_layers * plan.model.num_heads,
        revised=revised,
    )
    return therapy, directions


def try_empty_heads(job: Job, therapy: Therapy, progress: Progress = silent) -> Therapy:
    """Where empty heads are all that is treated: reinitialised, or trained as they are?

    Each way is trained for a few steps on every other block, at the rate of the run, and read on
    blocks in between. A silenced head costs nothing and learns anew; one that triage called empty
    may still hold what only its partners could use.
    """
    blocks, recipe = job.corpus.train, job.run.recipe
    if list(therapy.plan.treatments) != ["reinitialise"] or not recipe.steps or len(blocks) < 2:
        return therapy
    stage("auto: are empty heads better reinitialised, or trained as they are?", progress)
    steps = min(recipe.steps, TRIAL_STEPS)
    never = dict.fromkeys(("validate_every", "save_every", "map_every"), steps + 1)
    recipe = changed(recipe, steps=steps, validation_blocks=0, **never)
    corpus = replace(job.corpus, train=blocks[::2])
    rows: list[Tried] = []
    as_they_are = dict.fromkeys(therapy.plan.target_heads, Dose("none", 0.0))
    plans = {
        "reinitialise": therapy.plan,
        "none": with_prescription(therapy.plan, as_they_are),
    }
    for name, plan in plans.items():
        run = replace(job.run, plan=plan, recipe=recipe)
        with TemporaryDirectory() as folder:  # its checkpoints are of no use to anybody
            trial = replace(job, run=run, corpus=corpus, out=Path(folder), track=None)
            patch, _ = carry_out(trial, {})
        read = loss_change(job.model, patch, spread_blocks(blocks[1::2], DOSE_BLOCKS), "").change
        error = (read.high - read.low) / 4  # an interval of 95% has some four of them
        rows.append(Tried(f"empty, {steps} steps", f"{name} 1", read.value, error, False))
    best = rows.index(min(rows, key=lambda row: row.change))
    tried = [replace(row, kept=place == best) for place, row in enumerate(rows)]
    return replace(therapy, plan=list(plans.values())[best], tried=(*therapy.tried, *tried))


def _revised(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    given: Prescription,
    rows: Mapping[Head, HeadTriage],
    directions: Mapping[int, LayerDirections],
    corpus: Corpus,
) -> dict[str, str]:
    """Classes of heads that were not called ill, each judged while the others are treated.

    Heads that work together sleep together: alone, waking one of them changes nothing.
    """
    asked = [h for h, row in sorted(rows.items()) if row.class_ not in ("asleep", "harmful")]
    texts = training_documents(corpus, FEWEST_TEXTS)
    revised: dict[str, str] = {}
    for head in [head for head in asked if head in given][:REVISED] if len(given) > 1 else []:
        rest = {other: dose for other, dose in given.items() if other != head}
        one = _queries_of(plan, [head])
        with treat(model, plan, rest, directions=directions).applied(model):
            again, _ = triage_heads(model, one, texts, directions=directions)
        revised[str(head)] = again[str(head)].class_
    return revised


def _queries_of(plan: SurgeryPlan, heads: Sequence[Head]) -> SurgeryPlan:
    """The plan for the queries of some of its heads."""
    return changed(
        plan,
        targets=format_heads(heads),
        kv_policy="queries-only",
        treatments={},
        doses={},
        summary=None,
    )


def without_targets(plan: SurgeryPlan) -> SurgeryPlan:
    """The plan of an empty patch: it operates on nothing."""
    return changed(plan, targets="", treatments={}, doses={}, summary=None)


def _hopeful(row: HeadTriage) -> bool:
    """Whether the better query treatment gained what is worth one, sure or not."""
    return row.release.value < -TriageThresholds().gain


def _triaged(
    model: PreTrainedModel,
    ill: IllHeads,
    corpus: Corpus,
    directions: Mapping[int, LayerDirections],
    most: int,
    progress: Progress,
) -> dict[Head, HeadTriage]:
    """What triage finds on training text in the heads that are worth its work, each once."""
    left = [head for head in ill.plan.target_heads if head not in ill.triaged]
    if not left:
        return dict(ill.triaged)
    texts = training_documents(corpus, triage_texts_for(len(left)))
    plan = _queries_of(ill.plan, left)
    most = max(1, most - len(ill.triaged))
    if len(left) > most:
        stage(f"auto: first-order estimates of {len(left)} heads", progress)
        chosen = most_promising(model, plan, texts, directions, most, progress=progress)
        plan = changed(plan, targets=format_heads(chosen))
    stage(f"auto: triage of {len(plan.target_heads)} heads on training text", progress)
    rows, _ = triage_heads(model, plan, texts, directions=directions, progress=progress)
    return {**ill.triaged, **{Head.parse(name): row for name, row in rows.items()}}
