"""Which recipe a request means for a model and a corpus: one answer for library, verb and study."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from headwise.errors import SettingsError
from headwise.intervals import FEWEST
from headwise.models.architectures import max_positions
from headwise.models.loaded_model import LoadedModel
from headwise.models.rope import length_class
from headwise.settings import changed
from headwise.surgery.recipe import (
    Recipe,
    count_epochs,
    fill_step,
    fit_corpus,
    fit_positions,
    fitted_recipe,
    known_recipe,
)
from headwise.surgery.settings import TRAINED, RepairRequest
from headwise.texts.corpus import Corpus, build_corpus, split_blocks
from headwise.texts.text_sets import TextSet, as_text_set, default_corpus


def first_recipe(name: str, model: PreTrainedModel, request: RepairRequest) -> Recipe:
    """The named recipe, the model's own, or one that fits its width; then the changes.

    One that is fitted still gets its steps and batch from the corpus, in `fit_request`.
    """
    width = int(model.config.get_text_config().hidden_size)
    positions = max_positions(model)
    start = _given(name, request) or fitted_recipe(
        width, positions, model.num_parameters(), request.treatment
    )
    return fill_step(fit_positions(_changed(name, start, request), positions))


def _changed(name: str, recipe: Recipe, request: RepairRequest) -> Recipe:
    """The changes on top; a batch that was asked for is a whole step of a fitted recipe."""
    recipe = changed(recipe, **request.changes)
    whole = "batch_size" in request.changes and "accumulation" not in request.changes
    return changed(recipe, accumulation=1) if whole and not _given(name, request) else recipe


def _given(name: str, request: RepairRequest) -> Recipe | None:
    """A recipe that somebody chose, which no corpus changes."""
    return request.recipe or known_recipe(name)


def fit_request(
    loaded: LoadedModel,
    request: RepairRequest,
    corpus: TextSet | Corpus | Sequence[str] | None,
    excluded: Sequence[str] = (),
    *,
    judged: bool = False,
) -> tuple[Recipe, Corpus]:
    """The recipe of a run, and the corpus in its blocks without the `excluded` texts.

    With `judged` a small corpus gives up to half of its documents for a verdict.
    """
    if request.changes.get("steps") is not None and request.changes.get("epochs") is not None:
        raise SettingsError("both steps and epochs are given", fix="say how long in one of them")
    recipe = first_recipe(loaded.id, loaded.model, request)
    fitted = _given(loaded.id, request) is None
    # a fitted batch follows from the tokens, so the corpus need not fill the one of the start
    smallest = changed(recipe, batch_size=1, accumulation=1) if fitted else recipe
    if isinstance(corpus, Corpus):
        blocks = split_blocks(corpus, length_class(loaded.model))
    else:
        blocks = build_corpus(
            loaded,
            default_corpus(loaded.id) if corpus is None else as_text_set(corpus, loaded.id),
            block=smallest.block,
            batch_tokens=smallest.batch_tokens,
            fewest_validation=FEWEST * judged,
            excluded=excluded,
        )
    if fitted:
        recipe = changed(fit_corpus(recipe, blocks.info.train_tokens), **request.changes)
        recipe = fit_positions(recipe, loaded.max_positions)
    recipe = count_epochs(recipe, len(blocks.train))
    return (recipe if request.mode in TRAINED else changed(recipe, steps=0)), blocks
