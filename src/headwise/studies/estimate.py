"""What a study will cost, before it runs: steps, tokens, minutes and megabytes of every run.

Minutes are arithmetic over a measured speed: floating-point operations by the usual counts (2 a
weight and token forward, 4 backward), divided by what this machine does on a matrix product. They
are right within a factor of about two on a CPU. Nothing is loaded but the model's configuration.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.models.architectures import geometry_of
from headwise.models.patient import PATIENTS, patient_dir
from headwise.models.slices import spans_of
from headwise.studies.study import PlanChoice, Study, StudyArm
from headwise.surgery.plan import make_plan

ASSUMED_SHARE = 0.4  # of the heads are sick, until the stock model has been diagnosed


_EFFICIENCY = 0.5  # of the speed of a large matrix product, over a whole training step


_PATCH_BYTES, _CHECKPOINT_BYTES = 8, 12  # a weight: before and after; master and two moments


@dataclass(frozen=True)
class Cost:
    """One arm with one seed. Minutes and megabytes are None where the model is not at hand."""

    arm: str
    seed: int
    mode: str
    corpus: str
    passes: int
    steps: int
    tokens: int
    minutes: float | None
    megabytes: float | None

    @property
    def row(self) -> list[object]:
        """For a table."""
        known = [None if x is None else round(x, 1) for x in (self.minutes, self.megabytes)]
        run = f"{self.arm} s{self.seed}" + f" ({self.mode})" * (self.mode != self.arm)
        return [run, self.corpus, self.passes, self.steps, self.tokens / 1e6, *known]


@dataclass(frozen=True)
class _Size:
    parameters: int
    heads: int
    weights_a_head: int
    stock: Diagnosis | None

    def operated(self, choice: PlanChoice) -> tuple[int, int]:
        """Heads and weights that a plan would touch; assumed until there is a diagnosis."""
        if self.stock is None:
            heads = round(ASSUMED_SHARE * self.heads)
            return heads, heads * self.weights_a_head
        plan = make_plan(self.stock, **choice.model_dump())
        assert plan.summary is not None
        return plan.summary.heads, plan.summary.trainable_weights


def estimate_study(study: Study, out: Path) -> list[Cost]:
    """Costs of all runs if none stops early; completions and further held-out sets come on top."""
    size = _size(study, out)
    speed = _operations_a_second() if size else 0.0
    return [_cost(study, arm, seed, size, speed) for arm, seed in study.runs()]


def _cost(study: Study, arm: StudyArm, seed: int, size: _Size | None, speed: float) -> Cost:
    recipe = study.recipe_of(arm)
    tokens = recipe.steps * recipe.batch_tokens * arm.passes
    minutes = megabytes = None
    if size is not None:
        operated, weights = size.operated(arm.plan or study.plan)
        kept = recipe.keep + 1 if recipe.steps else 0
        megabytes = arm.passes * weights * (_PATCH_BYTES + _CHECKPOINT_BYTES * kept) / 1e6
        judged = study.max_texts * study.max_length * arm.passes
        ablated = {"all": size.heads, "operated": operated, "none": 0}[study.ablate]
        validations = recipe.steps // recipe.validate_every * recipe.validation_blocks
        seen = validations * recipe.block * arm.passes
        # an ablation re-runs half the layers on average, once with zeros and once with means
        operations = size.parameters * (6 * tokens + 2 * seen + 2 * judged * (2 + ablated))
        minutes = operations / speed / 60
    return Cost(
        arm.name, seed, arm.mode, arm.corpus, arm.passes, recipe.steps, tokens, minutes, megabytes
    )


def _size(study: Study, out: Path) -> _Size | None:
    """The model's shape from its configuration, on the meta device; None if that is not at hand."""
    name = str(patient_dir()) if study.model in PATIENTS else study.model
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape = geometry_of(model)
    except (OSError, ValueError, HeadwiseError):
        return None
    heads = shape.num_layers * shape.num_heads
    slices = spans_of(model, [Head(0, 0)]).values()
    weights = sum(span.within(model.get_parameter(span.parameter)).numel() for span in slices)
    path = out / "stock" / "diagnosis.json"
    stock = Diagnosis.load(path) if path.exists() else None
    return _Size(model.num_parameters(), heads, weights, stock)


def _operations_a_second(size: int = 768, repeats: int = 12) -> float:
    left, right = torch.rand(size, size), torch.rand(size, size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return _EFFICIENCY * 2 * size**3 / sorted(times)[repeats // 2]
