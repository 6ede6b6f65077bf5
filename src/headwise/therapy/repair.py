"""Repair by any treatment: one for all heads of a plan, or `auto`, which can also find them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.diagnosis.diagnose import diagnose
from headwise.models.loading import LoadedModel
from headwise.progress import Progress, silent
from headwise.settings import changed
from headwise.surgery.modes import Mode, require_treated_mode
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import Recipe
from headwise.surgery.repair import RepairRun, repair as repair_heads
from headwise.texts.corpus import in_validation
from headwise.texts.text_sets import TextSet
from headwise.therapy.auto import repair_automatically

_TEXTS = 32  # training texts on which auto looks for sick heads if no plan is given


def repair(
    loaded: LoadedModel,
    plan: SurgeryPlan | None,
    texts: TextSet,
    recipe: Recipe,
    *,
    out: Path,
    mode: Mode = "surgery",
    treatment: str | None = None,
    dose: float | None = None,
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    excluded: Sequence[str] = (),
    tracker: str | None = None,
    progress: Progress = silent,
) -> RepairRun:
    """Run one arm; with `treatment="auto"` the patch is empty unless it makes the model better."""
    model, tokenizer = loaded.model, loaded.tokenizer
    chosen = plan or plan_sick_heads(loaded, texts, recipe, seed=seed)
    if treatment == "auto":
        require_treated_mode(mode)
        return repair_automatically(
            model,
            tokenizer,
            chosen,
            texts,
            recipe,
            out=out,
            seed=seed,
            resume=resume,
            force=force,
            excluded=excluded,
            tracker=tracker,
            progress=progress,
        ).run
    return repair_heads(
        model,
        tokenizer,
        chosen,
        texts,
        recipe,
        out=out,
        mode=mode,
        treatment=treatment,
        dose=dose,
        seed=seed,
        resume=resume,
        force=force,
        excluded=excluded,
        tracker=tracker,
        progress=progress,
    )


def plan_sick_heads(
    loaded: LoadedModel, texts: TextSet, recipe: Recipe, *, seed: int = 0
) -> SurgeryPlan:
    """A plan for the heads that are sick on training text; it may have no targets."""
    train = [text for text in texts.texts if not in_validation(text)][:_TEXTS]
    found = diagnose(
        loaded.model,
        loaded.tokenizer,
        TextSet(texts.name, tuple(train)),
        name=loaded.id,
        max_length=recipe.block,
    )
    if found.counts["sick"]:
        return make_plan(found, heads="sick", seed=42 + seed)
    return changed(make_plan(found, heads="all"), targets="", healthy="all", summary=None)
