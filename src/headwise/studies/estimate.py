"""What a study will cost, before it runs: steps, tokens, minutes and megabytes of every run.

Minutes are the work of repair and evaluation at an assumed speed. Nothing is loaded but the model's
configuration.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headwise.cost import assumed_seconds_per_token
from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.keywords import keywords_of
from headwise.models.architectures import geometry_of
from headwise.models.patient import PATIENTS, patient_dir
from headwise.models.slices import spans_of
from headwise.proof.evaluate import judging_passes
from headwise.settings import changed
from headwise.studies.study import Study, StudyArm
from headwise.surgery.fitting import first_recipe
from headwise.surgery.plan import make_plan
from headwise.surgery.settings import TRAINED
from headwise.tables import Entry, Table, table
from headwise.therapy.repair import repair_work

ASSUMED_SHARE = 0.4  # of the heads are sick, until the stock model has been diagnosed


_LETTERS = 4  # a token, about
_PATCH_BYTES, _CHECKPOINT_BYTES = 8, 12  # a weight: before and after; master and two moments


def estimate_study(study: Study, out: Path) -> Table:
    """What all runs cost in CPU minutes if none stops early; completions come on top.

    Minutes and megabytes are None where the model is not at hand.
    """
    model = _empty_model(study.model)
    seconds = assumed_seconds_per_token(model.num_parameters()) if model else 0.0
    path = out / "stock" / "diagnosis.json"
    stock = Diagnosis.load(path) if path.exists() else None
    rows = [_cost(study, arm, seed, model, stock, seconds) for arm, seed in study.runs()]
    if model is not None:  # stock is judged first, on the heads of all arms together
        heads, _ = _operated(study, study.arms[0], model, stock)
        judged = _judging(study, model, heads, len(study.arms))
        rows = [["stock", None, None, None, None, judged * seconds / 60, 0.0], *rows]
    columns = "run; corpus; passes; steps; M tokens; CPU minutes [.1f]; MB [.1f]"
    return table(f"study {study.name}", columns, rows)


def _cost(
    study: Study,
    arm: StudyArm,
    seed: int,
    model: PreTrainedModel | None,
    stock: Diagnosis | None,
    seconds: float,
) -> list[Entry]:
    request = study.request(arm, seed)
    recipe = study.recipe_of(arm) if model is None else first_recipe(study.model, model, request)
    recipe = recipe if arm.mode in TRAINED else changed(recipe, steps=0)
    tokens = recipe.steps * recipe.batch_tokens * arm.passes
    name = f"{arm.name} s{seed}" + f" ({arm.mode})" * (arm.mode != arm.name)
    run: list[Entry] = [name, arm.corpus, arm.passes, recipe.steps, tokens / 1e6]
    if model is None:
        return [*run, None, None]
    heads, weights = _operated(study, arm, model, stock)
    kept = recipe.keep + 1 if recipe.steps else 0
    megabytes = arm.passes * weights * (_PATCH_BYTES + _CHECKPOINT_BYTES * kept) / 1e6
    work = repair_work(recipe, heads, weights, auto=request.auto).tokens
    if isinstance(study.rate, list) and arm.mode in TRAINED:
        work *= len(study.rate) + 1  # a whole run at each, then that of the best
    minutes = arm.passes * (work + _judging(study, model, heads, 1)) * seconds / 60
    return [*run, minutes, megabytes]


def _judging(study: Study, model: PreTrainedModel, operated: int, sets: int) -> float:
    """Tokens of an evaluation: all held-out texts, and on some heads and sets of them ablated."""
    texts = {text for one in study.heldout_texts() for text in one.texts}
    shape = geometry_of(model)
    every = shape.num_layers * shape.num_heads
    ablated = {"all": every, "operated": operated, "none": 0}[study.ablate]
    judged = study.max_texts * judging_passes(2 * ablated, sets)  # not staged: with means too
    lengths = [min(study.max_length, len(text) / _LETTERS) for text in texts]
    return sum(lengths) + judged * sum(lengths) / len(lengths)


def _operated(
    study: Study, arm: StudyArm, model: PreTrainedModel, stock: Diagnosis | None
) -> tuple[int, int]:
    """Heads and weights that a plan would touch; assumed until there is a diagnosis."""
    if stock is not None:
        plan = make_plan(stock, **keywords_of(arm.plan or study.plan))
        assert plan.summary is not None
        return plan.summary.heads, plan.summary.trainable_weights
    shape = geometry_of(model)
    heads = round(ASSUMED_SHARE * shape.num_layers * shape.num_heads)
    slices = spans_of(model, [Head(0, 0)]).values()
    one = sum(span.within(model.get_parameter(span.parameter)).numel() for span in slices)
    return heads, heads * one


def _empty_model(name: str) -> PreTrainedModel | None:
    """The model's shape from its configuration, on the meta device; None if that is not at hand."""
    folder = str(patient_dir()) if name in PATIENTS else name
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        geometry_of(model)
    except (OSError, ValueError, HeadwiseError):
        return None
    return model
