"""Repair by any treatment: one for all heads of a plan, or `auto`, which can also find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headwise.integrity.locks import one_writer
from headwise.models.architectures import require_plain
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.progress import Budget, Progress, Work, silent, stage, unlimited
from headwise.settings import changed
from headwise.surgery.modes import TRAINED, Mode, require_treated_mode
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.recipe import Recipe, fit_corpus, fit_positions, fitted_recipe, known_recipe
from headwise.surgery.repair import RepairRun, repair as repair_heads, repair_corpus
from headwise.texts.corpus import Corpus
from headwise.texts.text_sets import TextSet
from headwise.therapy.auto import choice_blocks, repair_automatically
from headwise.therapy.ill_heads import plan_ill_heads
from headwise.therapy.never_worse import require_validation

AUTO = "auto"
_UNVALIDATED = (
    "no validation text: about one document in twenty would be, and the corpus has too few. The "
    "patch will be the last state, and nothing here says whether it is better than stock"
)


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
    excluded: Sequence[str] = (),
    tracker: str | None = None,
    keep: TextSet | Sequence[str] | None = None,
    bos: bool | None = None,
    changes: Mapping[str, float] | None = None,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> RepairRun:
    """Repair in one mode and write `out/`; the model is left as it was, the result is the patch.

    Without a `recipe` one is fitted; `changes` come last. "auto" chooses per head (no plan: sick
    ones) and ends in an empty patch without a sure gain. `keep` texts hold it to what stock says.
    """
    loaded = loaded.reading(
        bos, *([] if plan is None else [(plan.bos, "the plan")]), progress=progress
    )
    require_plain(loaded.model)
    stage("tokenising the corpus", progress)
    blocks, chosen = cut_corpus(loaded, corpus, recipe, treatment, changes or {}, excluded)
    _require_possible(treatment, mode, blocks)
    _tell_recipe(chosen, loaded, blocks, progress if mode in TRAINED else silent)
    plan = plan or plan_ill_heads(loaded, blocks, chosen, progress=progress)
    budget(loaded.model, _work(chosen, plan, mode, treatment))
    work = (loaded, changed(plan, bos=loaded.bos), blocks, chosen)
    with one_writer(Path(out)):
        if treatment == AUTO:
            return repair_automatically(
                *work,
                out=Path(out),
                seed=seed,
                resume=resume,
                force=force,
                tracker=tracker,
                keep=keep,
                progress=progress,
            ).run
        return repair_heads(
            *work,
            out=Path(out),
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


def _require_possible(treatment: str | None, mode: Mode, corpus: Corpus) -> None:
    """Auto needs a mode that treats, and text to judge by."""
    if treatment == AUTO:
        require_treated_mode(mode)
        require_validation(corpus)


def _work(recipe: Recipe, plan: SurgeryPlan, mode: Mode, treatment: str | None) -> Work:
    """The steps, with their backward passes, the validations, and what auto tries before."""
    steps = recipe.steps if mode in TRAINED else 0
    validations = (1 + steps // recipe.validate_every) * recipe.validation_blocks
    blocks = validations + (choice_blocks(len(plan.target_heads)) if treatment == AUTO else 0)
    one = recipe.batch_size * recipe.block
    return Work(
        tokens=3 * steps * recipe.batch_tokens + blocks * recipe.block,
        batch=one,
        kept=one if steps else 0,
        trained=0 if plan.summary is None else plan.summary.trainable_weights,
        less="--steps, --block, --batch-size" + (", --plan" if treatment == AUTO else ""),
    )


def cut_corpus(
    loaded: LoadedModel,
    corpus: TextSet | Corpus | Sequence[str] | None,
    recipe: Recipe | None,
    treatment: str | None,
    changes: Mapping[str, float],
    excluded: Sequence[str] = (),
) -> tuple[Corpus, Recipe]:
    """The corpus in blocks, and the recipe that fits it if none is given."""
    given = recipe or known_recipe(loaded.id)
    start = fit_positions(
        changed(given or recipe_for(loaded, treatment), **changes), loaded.max_positions
    )
    if given is not None:
        return repair_corpus(corpus, loaded, start, excluded), start
    smallest = changed(start, batch_size=1, accumulation=1)
    blocks = repair_corpus(corpus, loaded, smallest, excluded)
    fitted = changed(fit_corpus(start, blocks.info.train_tokens), **changes)
    return blocks, fit_positions(fitted, loaded.max_positions)


def recipe_for(loaded: LoadedModel, treatment: str | None = None) -> Recipe:
    """The recipe if none is named: the model's own, or one that fits its width and positions."""
    found = known_recipe(loaded.id)
    if found is not None:
        return found
    width = int(loaded.model.config.get_text_config().hidden_size)
    parameters = loaded.model.num_parameters()
    return fitted_recipe(width, loaded.max_positions, parameters, treatment)


def _tell_recipe(recipe: Recipe, loaded: LoadedModel, corpus: Corpus, progress: Progress) -> None:
    """The recipe and what decided it, in one line."""
    width = int(loaded.model.config.get_text_config().hidden_size)
    positions = loaded.max_positions
    told = (
        f"recipe {recipe.name}: {recipe.steps} steps of {recipe.batch_tokens:,} tokens at lr "
        f"{recipe.lr:.2g}, blocks of {recipe.block} (width {width}, "
        f"{positions or 'any number of'} positions, {corpus.info.train_tokens:,} training tokens)"
    )
    stage(told, progress)
    if not corpus.validation and recipe.validation_blocks:
        stage(_UNVALIDATED, progress)
