"""What a report is made of: the artefacts of a study, a run or a bare diagnosis, read once.

Everything is taken from the JSON files as they lie there; no model, no torch. A `Condition` is one
state of the model (stock, or one pass of one arm with one seed); a `Source` is all conditions of
one folder. What is missing is None or empty, and the tables say so in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headwise.artefacts import load_artefact, read_lines
from headwise.errors import ArtefactError
from headwise.heads import select_heads
from headwise.plasticity.values import PlasticitySummary, find_plasticity
from headwise.proof.trajectories import run_maps

Map = Float[np.ndarray, "layer head"]


Mask = Bool[np.ndarray, "layer head"]


Body = Mapping[str, Any]


MASS = "first_token_mass"


SICK = ("dead", "sink")


@dataclass(frozen=True)
class Condition:
    """One state of the model, with all that was measured in it."""

    arm: str
    seed: int | None = None
    number: int = 1  # which pass
    last: bool = True  # no later pass of this arm and seed was judged
    diagnosis: Body | None = field(default=None, repr=False)
    evaluation: Body | None = field(default=None, repr=False)
    comparison: Body | None = field(default=None, repr=False)
    run: Body | None = field(default=None, repr=False)
    trace: tuple[Body, ...] = field(default=(), repr=False)
    steps: tuple[tuple[int, Map], ...] = field(default=(), repr=False)  # first-token mass by step
    plasticity: PlasticitySummary | None = field(default=None, repr=False)
    before: Map | None = field(default=None, repr=False)  # as `steps`, before the operation

    @property
    def key(self) -> str:
        """A short unique name: `stock`, `surgery-s0`, `surgery-s0-pass2`."""
        name = self.arm if self.seed is None else f"{self.arm}-s{self.seed}"
        return name if self.number == 1 else f"{name}-pass{self.number}"

    @property
    def label(self) -> str:
        """The name for people."""
        name = self.arm if self.seed is None else f"{self.arm}, seed {self.seed}"
        return name if self.number == 1 else f"{name}, pass {self.number}"

    @property
    def mode(self) -> str:
        """surgery, sham, ...; `stock` for the untouched model."""
        return "stock" if self.run is None else str(self.run["mode"])

    @property
    def maps(self) -> dict[str, Map]:
        """Every per-head measure of the diagnosis."""
        found = {} if self.diagnosis is None else self.diagnosis["maps"]
        return {name: np.array(values, dtype=float) for name, values in found.items()}

    @property
    def sick(self) -> Mask | None:
        """Which heads are dead or sinks."""
        if self.diagnosis is None:
            return None
        return np.isin(np.array(self.diagnosis["classes"]), SICK)

    @property
    def text_sets(self) -> Body:
        """Losses by text set; empty without an evaluation."""
        found: Body = {} if self.evaluation is None else self.evaluation["text_sets"]
        return found

    @property
    def weights(self) -> int | None:
        """Weights of the patches: the slices, not the matrices they lie in."""
        if self.evaluation is None or not self.evaluation.get("patches"):
            return None
        return sum(int(patch["num_weights"]) for patch in self.evaluation["patches"])

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, loss) on the run's own validation documents."""
        return [
            (int(row["validated_at"]), float(row["validation_loss"]))
            for row in self.trace
            if "validation_loss" in row
        ]

    def ablation(self, head: str, kind: str = "zero") -> Body | None:
        """The cost of losing a head (or a joint set), with its interval."""
        if self.evaluation is None:
            return None
        found: Body | None = self.evaluation["heads"][f"ablation_{kind}"].get(head)
        return found

    def zone(self, name: str) -> Mask | None:
        """`operated`, `watched` (in the zone, never operated on) or `outside` heads.

        All passes so far count, as the patches tell them: the control `random-heads` draws its own
        targets, and a second pass adds to the first.
        """
        if self.diagnosis is None:
            return None
        shape = np.array(self.diagnosis["classes"]).shape
        patches = [] if self.evaluation is None else self.evaluation.get("patches") or []
        plans = [patch["plan"] for patch in patches if patch.get("plan")]
        if not plans and self.run is not None:
            plans = [self.run["plan"]]
        operated = _mask_of([plan["targets"] for plan in plans], shape)
        watched = _mask_of([plan["watched"] for plan in plans], shape) & ~operated
        zones: dict[str, Mask] = {
            "operated": operated,
            "watched": watched,
            "outside": ~(operated | watched),
        }
        return zones[name]

    def movable(self) -> Mask | None:
        """Heads whose attention the operation can change: those above its lowest layer."""
        operated = self.zone("operated")
        if operated is None or not operated.any():
            return operated
        lowest = int(np.flatnonzero(operated.any(1))[0])
        mask = np.ones_like(operated)
        mask[:lowest] = False
        mask[lowest] = operated[lowest] | (self.mode == "lora")  # lora changes whole projections
        return mask


@dataclass(frozen=True)
class Source:
    """All that one folder holds."""

    folder: Path
    kind: str  # study, run or measurement
    name: str
    stock: Condition | None
    runs: tuple[Condition, ...] = ()
    study: Body | None = field(default=None, repr=False)
    summary: Body | None = field(default=None, repr=False)
    completions: Body | None = field(default=None, repr=False)
    missing: tuple[str, ...] = ()  # arms that were asked for and are not finished

    @property
    def conditions(self) -> list[Condition]:
        """Stock first, then every judged pass of every run."""
        return [c for c in (self.stock, *self.runs) if c is not None]

    @property
    def model(self) -> Body:
        """The model as the first diagnosis describes it, or the little a run knows."""
        for condition in self.conditions:
            if condition.diagnosis is not None:
                found: Body = condition.diagnosis["model"]
                return found
        for condition in self.runs:
            if condition.run is not None:
                return {**condition.run["plan"]["model"], **condition.run["model"]}
        return {"id": "unknown"}

    @property
    def model_name(self) -> str:
        """The model's id as a title can carry it."""
        return str(self.model["id"]).rstrip("/").rsplit("/", 1)[-1]

    @property
    def finals(self) -> list[Condition]:
        """The last judged pass of every run."""
        return [condition for condition in self.runs if condition.last]

    def arms(self) -> list[str]:
        """Arm names in order, each once."""
        return list(dict.fromkeys(condition.arm for condition in self.runs))

    def of_arm(self, arm: str) -> list[Condition]:
        """The last pass of every seed of an arm."""
        return [condition for condition in self.finals if condition.arm == arm]

    @property
    def judged_set(self) -> str | None:
        """The text set on which heads were judged: the first."""
        for condition in self.conditions:
            names = list(condition.text_sets)
            if condition.evaluation is not None and condition.diagnosis is not None:
                told = condition.diagnosis["provenance"].get("texts", {}).get("name")
                return told if told in names else (names[0] if names else None)
        return None


def _mask_of(selections: Sequence[str], shape: tuple[int, ...]) -> Mask:
    mask = np.zeros(shape, dtype=bool)
    for selection in filter(None, selections):
        for head in select_heads(selection, num_layers=shape[0], num_heads=shape[1]):
            mask[head.layer, head.index] = True
    return mask


def read_source(folder: Path) -> Source:
    """Read a study, a run, or a folder with a diagnosis or an evaluation."""
    if not folder.is_dir():
        raise ArtefactError(
            "no such folder", where=folder, fix="pass the --out of a study, repair or diagnose"
        )
    if (folder / "study.json").exists():
        return _read_study(folder)
    if (folder / "run.json").exists():
        return _read_run(folder)
    if any((folder / name).exists() for name in ("diagnosis.json", "evaluation.json")):
        stock = _read_condition(folder, arm="model")
        return Source(folder, "measurement", folder.name, stock, completions=_completions(folder))
    raise ArtefactError(
        "nothing to report: no study.json, run.json, diagnosis.json or evaluation.json",
        where=folder,
        fix="pass the folder that `headwise study`, `repair`, `diagnose` or `evaluate` wrote",
    )


def _read_study(folder: Path) -> Source:
    study: dict[str, Any] = load_artefact(folder / "study.json", "study")["study"]
    runs: list[Condition] = []
    missing: list[str] = []
    for arm in study["arms"]:
        for seed in arm["seeds"] or study["seeds"]:
            found = _read_passes(folder / "runs" / f"{arm['name']}-s{seed}", arm["name"], seed)
            runs += found
            if not found:
                missing.append(f"{arm['name']} seed {seed}")
    stock = _read_condition(folder / "stock", arm="stock")
    if stock.diagnosis is None:
        raise ArtefactError(
            "this study has not diagnosed its stock model yet",
            where=folder,
            fix="run `headwise study` again: it goes on where it stopped",
        )
    return Source(
        folder,
        "study",
        str(study["name"]),
        stock,
        tuple(runs),
        study,
        _optional(folder / "summary.json", "study-summary"),
        _completions(folder),
        tuple(missing),
    )


def _read_passes(folder: Path, arm: str, seed: int) -> list[Condition]:
    """Every pass of a run that has been judged."""
    folders = [folder, folder / "pass2"]
    judged = [(n, f) for n, f in enumerate(folders, 1) if (f / "evaluation.json").exists()]
    return [
        _read_condition(f, arm=arm, seed=seed, number=n, last=n == judged[-1][0]) for n, f in judged
    ]


def _read_run(folder: Path) -> Source:
    run = load_artefact(folder / "run.json", "run")
    condition = _read_condition(folder, arm=str(run["mode"]), seed=int(run["seed"]))
    stock = None if condition.comparison is None else _before(condition)
    return Source(folder, "run", folder.name, stock, (condition,), completions=_completions(folder))


def _before(after: Condition) -> Condition | None:
    """The stock side of a comparison, got back from the changes it holds."""
    comparison, diagnosis = after.comparison, after.diagnosis
    if comparison is None or diagnosis is None:
        return None
    delta = {name: np.array(values) for name, values in comparison["delta"].items()}
    maps = {n: (np.array(diagnosis["maps"][n]) - delta[n]) for n in delta}
    cuts = diagnosis["thresholds"]
    classes = np.full(maps[MASS].shape, "healthy", dtype=object)
    if "entropy" in maps:
        classes[maps["entropy"] < cuts["low_entropy"]] = "low_entropy"
    classes[maps[MASS] > cuts["sink"]] = "sink"
    classes[maps[MASS] > cuts["dead"]] = "dead"
    body = {
        "model": comparison["model"],
        "maps": {name: values.tolist() for name, values in maps.items()},
        "spread": {},
        "classes": classes.tolist(),
        "counts": comparison["transitions"]["counts_before"],
        "thresholds": cuts,
        "profile": {},
        "provenance": comparison["provenance"]["before"],
    }
    return Condition("stock", diagnosis=body)


def _read_condition(
    folder: Path, *, arm: str, seed: int | None = None, number: int = 1, last: bool = True
) -> Condition:
    evaluation = _optional(folder / "evaluation.json", "evaluation")
    diagnosis = _optional(folder / "diagnosis.json", "diagnosis")
    if diagnosis is None and evaluation is not None:
        diagnosis = evaluation["diagnosis"]
    maps = run_maps(folder, folder.parent if number > 1 else folder)
    before = next((mass for step, mass in maps if step < 0), None)
    steps = tuple((step, mass) for step, mass in maps if step >= 0)
    return Condition(
        arm,
        seed,
        number,
        last,
        diagnosis,
        evaluation,
        _optional(folder / "comparison.json", "comparison"),
        _optional(folder / "run.json", "run"),
        tuple(read_lines(folder / "trace.jsonl")),
        steps,
        find_plasticity(folder, *([folder.parent] if folder.name == "stock" else [])),
        before,
    )


def _completions(folder: Path) -> dict[str, Any] | None:
    return _optional(folder / "completions.json", "completions")


def _optional(path: Path, kind: str) -> dict[str, Any] | None:
    return load_artefact(path, kind) if path.exists() else None
