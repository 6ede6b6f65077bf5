"""Recipes: how slices are trained. The paper's settings are a recipe; the patient has its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Doc

from headwise.errors import SettingsError
from headwise.models.patient import PATIENTS
from headwise.settings import changed, read_yaml, validated

MOST_STEPS = 10**9  # of anything that is counted: more is a slip of the hand


@dataclass(frozen=True)
class Saving:
    """How a run saves memory and time; it changes no bit of the patch, so machines may differ."""

    recomputed: int = 0  # layers from the lowest trained one on whose activations are made twice
    cached: bool = False  # what enters the lowest trained layer is kept on disk


class Recipe(BaseModel):
    """Everything that decides a training run, apart from the plan, the corpus and the seed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = "custom"
    steps: Annotated[int, Doc("Optimizer steps.")] = Field(default=400, ge=0, le=MOST_STEPS)
    epochs: Annotated[float | None, Doc("Passes over the corpus, instead of --steps.")] = Field(
        default=None, gt=0, le=MOST_STEPS
    )
    lr: Annotated[float, Doc("Peak learning rate.")] = Field(default=5e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=100, ge=0, le=MOST_STEPS)  # at most a quarter of the steps
    batch_size: Annotated[int, Doc("Blocks a forward pass.")] = Field(
        default=1, ge=1, le=MOST_STEPS
    )
    accumulation: int = Field(default=8, ge=1, le=MOST_STEPS)  # forward passes a step
    tokens_per_step: Annotated[
        int | None, Doc("Tokens a step, in as many forward passes as that takes.")
    ] = Field(default=None, ge=8, le=MOST_STEPS)
    clip: float = Field(default=1.0, gt=0)
    block: Annotated[int, Doc("Tokens a training block.")] = Field(default=512, ge=8, le=MOST_STEPS)
    checkpoint_layers: bool | Literal["auto"] = "auto"  # recompute activations, to save memory
    cache_prefix: bool | Literal["auto"] = "auto"  # keep the frozen layers' outputs on disk
    validate_every: int = Field(default=50, ge=1)
    validation_blocks: Annotated[
        int, Doc("Blocks of validation text; 0: no validation, no early stopping.")
    ] = Field(default=32, ge=0)
    patience: int = Field(default=6, ge=1)  # validations without a better loss before stopping
    save_every: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)  # checkpoints kept besides the best
    checkpoint_every: Annotated[
        Annotated[int, Field(ge=1)] | Literal["epoch"] | None,
        Doc("Keep all checkpoints of every N-th step, or of each `epoch`."),
    ] = None
    hold_weight: float = Field(default=1.0, ge=0)  # of KL to stock, if there is text to keep
    hold_blocks: int = Field(default=4, ge=1)  # blocks of that text a step
    map_every: int = Field(default=10, ge=1)  # steps between head maps

    @property
    def batch_tokens(self) -> int:
        """Tokens per step, at most."""
        return self.block * self.batch_size * self.accumulation

    def with_changes(self, **changes: int | float | str | bool) -> Recipe:
        """The recipe with some fields changed, checked again."""
        return changed(self, **changes)


_PATIENT_WIDTH, _PAPER_WIDTH, _PAPER_RATE = 192, 2048, 5e-5
_TREATED_RATE = 1e-3  # of heads that were treated, at the patient's width
_STEP_TOKENS = 4096
_SMALL = 30_000_000  # parameters up to which 16 blocks a pass fit a laptop's memory
_EPOCHS = 3


RECIPES: dict[str, Recipe] = {
    # 541K tokens in 512-token blocks are 132 steps of 8 an epoch; the best epoch was the third.
    "bloom-1b7-pass1": Recipe(name="bloom-1b7-pass1", steps=396, validate_every=44, save_every=44),
    "patient": Recipe(
        name="patient",
        steps=300,
        lr=3e-3,
        warmup=20,
        batch_size=16,
        accumulation=1,
        block=256,
        validate_every=50,
        save_every=50,
        map_every=10,
    ),
}


def _base_of(name: str, base: object, seen: tuple[str, ...]) -> dict[str, object]:
    """What a recipe starts from; one that leads back to itself is refused."""
    if base is None:
        return {}
    if not isinstance(base, str) or base in (name, *seen):
        raise SettingsError(
            f"the base {str(base)[:80]!r} leads back to the recipe, or is no name",
            where=name,
            fix=f"name one of {', '.join(RECIPES)}, or another .yaml file",
        )
    return _recipe(base, (*seen, name)).model_dump()


def recipe_and_changes(name: str | None) -> tuple[Recipe | None, dict[str, Any]]:
    """What `--recipe NAME` means: a whole recipe, or changes to the one that fits.

    A YAML file without a `base` names some values; those that it does not name stay fitted.
    """
    if name is None:
        return None, {}
    recipe = recipe_named(name)
    body = {} if name in RECIPES else read_yaml(Path(name))
    if name in RECIPES or "base" in body:
        return recipe, {}
    return None, {"name": recipe.name, **body}


def recipe_named(name: str) -> Recipe:
    """A bundled recipe by name, or one from a YAML file."""
    return _recipe(name, ())


def _recipe(name: str, seen: tuple[str, ...]) -> Recipe:
    """The recipe that a name means; `seen` are those that build on it."""
    if name in RECIPES:
        return RECIPES[name]
    if Path(name).suffix in (".yaml", ".yml"):
        body = read_yaml(Path(name))
        start = _base_of(name, body.pop("base", None), seen)
        return validated(Recipe, {**start, "name": Path(name).stem, **body}, name)
    raise SettingsError(
        f"no recipe is called {name!r}", fix=f"choose {', '.join(RECIPES)} or a .yaml file"
    )


def known_recipe(model_name: str) -> Recipe | None:
    """The recipe that was made for this very model, if there is one."""
    if model_name in PATIENTS:
        return RECIPES["patient"]
    name = model_name.rstrip("/").rsplit("/", 1)[-1]
    return RECIPES["bloom-1b7-pass1"] if name == "bloom-1b7" else None


def default_recipe(model_name: str) -> Recipe:
    """The recipe for a model if none is named and nothing but its name is known."""
    return known_recipe(model_name) or fitted_recipe(_PAPER_WIDTH, None, _SMALL)


def fitted_recipe(
    width: int, positions: int | None, parameters: int, treatment: str | None = None
) -> Recipe:
    """A recipe for any model: block by its positions, rate by its width, batch by its size.

    The two recipes that were tried, the patient's and the paper's, have 4,096 tokens a step; the
    rate lies on the line between them (log rate over log width). Treated heads have their own.
    """
    base = RECIPES["patient"] if treatment in (None, "reinitialise") else None
    if base is None:
        return fit_positions(treatment_recipe(width, positions), positions)
    block = min(256, positions or 256)
    blocks = max(1, _STEP_TOKENS // block)
    batch = max(1, min(blocks, round(16 * _SMALL / max(parameters, _SMALL))))
    slope = math.log(base.lr / _PAPER_RATE) / math.log(_PAPER_WIDTH / _PATIENT_WIDTH)
    return base.model_copy(
        update={
            "name": "fitted",
            "block": block,
            "batch_size": batch,
            "accumulation": max(1, blocks // batch),
            "lr": float(f"{min(base.lr, base.lr * (_PATIENT_WIDTH / width) ** slope):.2g}"),
        }
    )


def fit_positions(recipe: Recipe, positions: int | None) -> Recipe:
    """A recipe whose blocks are no longer than what the model was made for."""
    return changed(recipe, block=min(recipe.block, positions or recipe.block))


def fit_corpus(recipe: Recipe, tokens: int) -> Recipe:
    """Steps for at most three passes over the corpus, and a batch that a small one can fill."""
    accumulation = max(1, min(recipe.accumulation, tokens // (recipe.block * recipe.batch_size)))
    batch = max(1, min(recipe.batch_size, tokens // recipe.block))
    fitted = changed(recipe, accumulation=accumulation, batch_size=batch)
    steps = max(1, min(recipe.steps, round(_EPOCHS * tokens / fitted.batch_tokens)))
    every = max(1, min(recipe.validate_every, steps // 4))
    return changed(
        fitted, steps=steps, warmup=min(recipe.warmup, steps // 10), validate_every=every
    )


def fill_step(recipe: Recipe) -> Recipe:
    """The recipe with as many forward passes a step as its `tokens_per_step` takes."""
    if recipe.tokens_per_step is None:
        return recipe
    blocks = max(1, round(recipe.tokens_per_step / recipe.block))
    batch = min(recipe.batch_size, blocks)
    return changed(recipe, batch_size=batch, accumulation=max(1, round(blocks / batch)))


def count_epochs(recipe: Recipe, blocks: int) -> Recipe:
    """The recipe with what it counts in epochs counted in steps; an epoch has so many blocks."""
    a_step = recipe.batch_size * recipe.accumulation
    if recipe.epochs is not None:
        recipe = changed(recipe, steps=max(1, round(recipe.epochs * blocks / a_step)))
    if recipe.checkpoint_every == "epoch":
        recipe = changed(recipe, checkpoint_every=max(1, round(blocks / a_step)))
    return recipe


def treatment_recipe(width: int, positions: int | None) -> Recipe:
    """The recipe for treated heads if none is named: the patient's, at a rate that suits the width.

    A treated head starts near what it was, and a high rate forgets that: on 107,000 tokens of
    stories15M a rate of 2e-3 brings back 82% of what sleep cost, 7e-4 91% (LOG).
    """
    base = RECIPES["patient"]
    rate = min(_TREATED_RATE, _TREATED_RATE * _PATIENT_WIDTH / width)
    block = min(base.block, positions or base.block)
    return base.model_copy(update={"name": "treatment", "lr": rate, "block": block})


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then cosine to 0. Step 0 already moves (the paper's first step has lr 0)."""
    warmup = min(recipe.warmup, recipe.steps // 4)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))
