"""Repair by any treatment: one for all heads of a plan, or `auto`, which can also find them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.diagnosis.diagnose import diagnose
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patient import PATIENTS
from headwise.progress import Progress, silent
from headwise.settings import changed
from headwise.surgery.modes import Mode, require_treated_mode
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import Recipe, default_recipe, treatment_recipe
from headwise.surgery.repair import RepairRun, repair as repair_heads, repair_corpus
from headwise.texts.corpus import Corpus, spread_blocks
from headwise.texts.text_sets import TextSet
from headwise.therapy.auto import repair_automatically

AUTO = "auto"
_BLOCKS = 32  # training blocks on which auto looks for sick heads if no plan is given


@takes_model
def repair(
    loaded: LoadedModel,
    plan: SurgeryPlan | None = None,
    corpus: TextSet | Corpus | Sequence[str] | None = None,
    recipe: Recipe | None = None,
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
    keep: TextSet | Sequence[str] | None = None,
    progress: Progress = silent,
) -> RepairRun:
    """Repair in one mode and write `out/`; the model is left as it was, the result is the patch.

    `treatment="auto"` chooses per head and ends in an empty patch unless the repaired model is
    better than stock on validation text with 95% confidence; without a plan it treats sick heads.
    On `keep` texts the model is held to what stock says (the recipe's `hold_weight` times the KL).
    """
    chosen = recipe or recipe_for(loaded, treatment)
    blocks = repair_corpus(corpus, loaded, chosen, excluded)
    given = plan or plan_sick_heads(loaded, blocks, chosen)
    if treatment == AUTO:
        require_treated_mode(mode)
        return repair_automatically(
            loaded,
            given,
            blocks,
            chosen,
            out=out,
            seed=seed,
            resume=resume,
            force=force,
            tracker=tracker,
            keep=keep,
            progress=progress,
        ).run
    return repair_heads(
        loaded,
        given,
        blocks,
        chosen,
        out=out,
        mode=mode,
        treatment=treatment,
        dose=dose,
        seed=seed,
        resume=resume,
        force=force,
        tracker=tracker,
        keep=keep,
        progress=progress,
    )


def recipe_for(loaded: LoadedModel, treatment: str | None) -> Recipe:
    """The recipe if none is named: for treated heads one that fits the model's width."""
    if treatment in (None, "reinitialise") or loaded.id in PATIENTS:
        return default_recipe(loaded.id)
    width = int(loaded.model.config.get_text_config().hidden_size)
    return treatment_recipe(width, loaded.max_positions)


def plan_sick_heads(loaded: LoadedModel, corpus: Corpus, recipe: Recipe) -> SurgeryPlan:
    """A plan for the heads that are sick on training text; it may have no targets."""
    rows = [
        row[:length].tolist()
        for block in spread_blocks(corpus.train, _BLOCKS)
        for row, length in zip(block.ids, block.lengths, strict=True)
    ]
    texts = tuple(str(loaded.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows)
    found = diagnose(loaded, TextSet(corpus.name, texts), max_length=recipe.block)
    if found.counts["sick"]:
        return make_plan(found, heads="sick")
    return changed(make_plan(found, heads="all"), targets="", healthy="all", summary=None)
