"""Study files: arms x seeds on one model, as YAML that is checked before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from headwise.artefacts import is_there, load_artefact, write_text
from headwise.bundled import DATA
from headwise.errors import ArtefactError, SettingsError
from headwise.models.patient import PATIENTS, patient_texts
from headwise.settings import read_yaml, validated
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.plan_settings import Mode, PlanSettings
from headwise.surgery.recipe import Recipe, default_recipe, recipe_and_changes
from headwise.surgery.settings import RepairRequest
from headwise.texts.text_sets import TextSet, default_corpus, default_texts, read_texts

STUDIES = DATA / "studies"


_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StudyArm(BaseModel):
    """One condition; what is not given comes from the study."""

    model_config = _STRICT

    name: str = Field(pattern=r"^[\w-][\w.-]*$", max_length=100)  # a folder's name
    mode: Mode = "surgery"
    treatment: str | None = None  # a row of the treatments, or auto; None: reinitialise
    dose: float | None = None
    keep: list[str] = []  # sources of text on which the model is held to what stock says
    corpus: str = "train"
    plan: PlanSettings | None = None
    passes: int = Field(default=1, ge=1, le=2)  # 2: a second pass on what is still, or newly, sick
    recipe: dict[str, Any] = {}  # changes to the study's recipe
    seeds: list[NonNegativeInt] | None = None


class Study(BaseModel):
    """A whole study: validated, resumable, and reported from its artefacts alone."""

    model_config = _STRICT

    name: str = Field(pattern=r"^[\w-][\w.-]*$", max_length=100)  # a folder's name
    description: str = ""
    model: str = "patient"
    dtype: str | None = None
    device_map: str | None = None
    bos: bool | None = None  # a BOS before every text, or none; by default decided at loading
    texts: list[str] = []  # held-out texts; empty: the model's default
    corpora: dict[str, list[str]] = {}  # name -> sources; `train` has a default for the patient
    plan: PlanSettings = PlanSettings(preset="pass1")
    recipe: str | None = None
    changes: dict[str, Any] = {}  # changes to that recipe
    # Learning rate: one for all arms; a grid, of which each arm takes its own best on the corpus's
    # validation text, never on held-out text; None: each arm has that of its recipe.
    rate: PositiveFloat | list[PositiveFloat] | None = None
    arms: list[StudyArm] = Field(min_length=1)
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    max_length: int = Field(default=512, ge=2)
    max_texts: int = Field(default=64, ge=2)  # held-out texts on which heads are judged
    batch_size: int = Field(default=8, ge=1)
    ablate: Literal["all", "operated", "none"] = "all"  # heads that are ablated one by one
    completions: int = Field(default=10, ge=0)  # prompts by each arm of the first seed

    @property
    def rate_rule(self) -> str:
        """At which learning rates its arms are compared, in words."""
        if self.rate is None:
            return "every arm at the rate of its own recipe"
        if isinstance(self.rate, float):
            return f"all arms at one rate, {self.rate:g}"
        grid = ", ".join(f"{rate:g}" for rate in self.rate)
        return f"every arm at its best of {grid} on the corpus's validation text"

    def request(self, arm: StudyArm, seed: int, plan: SurgeryPlan | None = None) -> RepairRequest:
        """What one run of an arm asks of `repair`; a contradiction is refused."""
        recipe, own = recipe_and_changes(self.recipe)
        return RepairRequest(
            plan=plan,
            mode=arm.mode,
            treatment=arm.treatment,
            dose=arm.dose,
            recipe=recipe,
            changes={
                **own,
                **self.changes,
                **arm.recipe,
                **({"lr": self.rate} if isinstance(self.rate, float) else {}),
            },
            seed=seed,
        )

    def recipe_of(self, arm: StudyArm) -> Recipe:
        """The recipe of one arm as far as it is known without its model."""
        request = self.request(arm, 0)
        base = request.recipe or default_recipe(self.model)
        body = {**base.model_dump(), **request.changes}
        return validated(Recipe, body, f"recipe of arm {arm.name}")

    def runs(self) -> list[tuple[StudyArm, int]]:
        """Every (arm, seed), in order."""
        return [(arm, seed) for arm in self.arms for seed in arm.seeds or self.seeds]

    def corpus_texts(self, name: str) -> TextSet:
        """The texts of a named corpus."""
        if name in self.corpora:
            return TextSet(name, read_texts(self.corpora[name]).texts)
        if self.model in PATIENTS and name in ("train", "second"):
            if name == "second":
                return TextSet("patient-second", tuple(patient_texts("second")))
            return default_corpus(self.model)
        raise SettingsError(
            f"no corpus is called {name!r}", where=self.name, fix=f"known: {sorted(self.corpora)}"
        )

    def heldout_texts(self) -> list[TextSet]:
        """Held-out text sets; heads are judged on the first."""
        if self.texts:
            return [TextSet("heldout", read_texts(self.texts).texts)]
        if self.model not in PATIENTS:
            return [default_texts(self.model)]
        domains = ("scripture", "union")
        parts = [TextSet(f"heldout-{d}", tuple(patient_texts("heldout", d))) for d in domains]
        return [default_texts(self.model), *parts]


_NEW = """\
# A study: arms x seeds on one model. `headwise study THIS.yaml --dry-run` says what it would cost.
model: {model}
# bos: true             # a BOS before every text, or none; by default decided at loading
# texts: [heldout/]     # held-out texts on which everything is judged; by default a bundled set
corpora:
  train: [my_texts/]    # files (.txt, .jsonl, .parquet) or folders; held-out texts are left out
plan: {{heads: sick}}     # or e.g. 'first_token_mass > 0.9 & layer >= 4'
# recipe: patient       # by default one that fits the model; changes to it:
# changes: {{steps: 300, lr: 0.001}}
# rate: [0.0003, 0.001, 0.003]  # every arm at its own best of these; a number: all at that one
seeds: [0, 1, 2]
arms:
  - {{name: surgery, mode: surgery}}
  - {{name: sham, mode: sham}}                    # the operation without training
  - {{name: gradient-only, mode: gradient-only}}  # training without the operation
"""


def new_study(model: str, path: Path) -> Path:
    """Write a commented study file for a model; an existing one is not touched."""
    if path.exists():
        raise SettingsError("there is such a file already", where=path, fix="choose another name")
    return write_text(path, _NEW.format(model=json.dumps(model)))


def started_study(path: Path) -> Study:
    """The study that a `study.json` says was started."""
    body = load_artefact(path, "study").get("study")
    if not isinstance(body, dict):
        raise ArtefactError("it does not say which study", where=path, fix="use another --out")
    return validated(Study, body, path)


def load_study(name: str) -> Study:
    """A study from a YAML file, or a bundled one by name."""
    path = Path(name)
    if not is_there(path) and is_there(STUDIES / f"{path.stem}.yaml"):
        path = STUDIES / f"{path.stem}.yaml"
    if not is_there(path):
        bundled = ", ".join(sorted(file.stem for file in STUDIES.glob("*.yaml")))
        raise SettingsError(
            "no such study", where=name, fix=f"pass a YAML file, or one of {bundled}"
        )
    body = read_yaml(path)
    study = validated(Study, {"name": path.stem, **body}, path)
    names = [arm.name for arm in study.arms]
    if len(set(names)) < len(names):
        raise SettingsError("two arms have the same name", where=path)
    for arm in study.arms:
        study.recipe_of(arm)
        if study.model in PATIENTS or arm.corpus in study.corpora:
            continue
        raise SettingsError(
            f"arm {arm.name} uses the corpus {arm.corpus!r}, which is not listed",
            where=path,
            fix=f"add it under corpora: {sorted(study.corpora)}",
        )
    return study
