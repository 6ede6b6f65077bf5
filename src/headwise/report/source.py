"""What a report is made of: the artefacts of a study, a run or a bare diagnosis, read once.

Everything is taken from files as they lie there; no model, no torch. A `Condition` is one state of
the model (stock, or one pass of one arm with one seed); a `Source` is all conditions of one folder.
What is missing is None or empty, and the tables say so in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from headwise.alarms import Alarm, merge_alarms
from headwise.artefacts import load_artefact, parse_json
from headwise.diagnosis.values import Diagnosis, diagnosis_from
from headwise.errors import ArtefactError
from headwise.intervals import Interval
from headwise.models.values import ModelInfo, model_name
from headwise.plasticity.values import PlasticitySummary, find_plasticity
from headwise.proof.compare import compare
from headwise.proof.completed_texts import Completions
from headwise.proof.origins import completions_origin, origin_of, stock_of_run
from headwise.proof.trajectories import run_maps
from headwise.proof.values import (
    Comparison,
    DocumentLosses,
    Evaluation,
    Recovery,
    identity_of,
)
from headwise.proof.zones import Map, Mask, Zones, zones_of
from headwise.provenance import STOCK, Origin, require_same_origin
from headwise.pruning.values import PRUNE, STREAM, NestedSets
from headwise.studies.study import started_study
from headwise.studies.summary import StudySummary
from headwise.surgery.plan import join_plans, plans_of
from headwise.surgery.run_state import RUN, read_trace
from headwise.surgery.values import PATCH, RunSettings
from headwise.therapy.values import THERAPY, Therapy
from headwise.triaging.values import Triage
from headwise.watch.film import FILM, Film

MASS, TRIAGE = "first_token_mass", "triage.json"
PRUNED, STREAMED = "prune", "stream"  # kinds of source, and folders of a check-up
Artefact = TypeVar("Artefact")


@dataclass(frozen=True)
class Condition:
    """One state of the model, with all that was measured in it."""

    arm: str
    seed: int | None = None
    number: int = 1  # which pass
    last: bool = True  # no later pass of this arm and seed was judged
    diagnosis: Diagnosis | None = field(default=None, repr=False)
    evaluation: Evaluation | None = field(default=None, repr=False)
    comparison: Comparison | None = field(default=None, repr=False)
    run: RunSettings | None = field(default=None, repr=False)
    steps_taken: int = 0  # optimizer steps in the trace
    # steps done: loss on the run's own validation documents
    validations: Mapping[int, float] = field(default_factory=dict, repr=False)
    steps: tuple[tuple[int, Map], ...] = field(default=(), repr=False)  # first-token mass by step
    plasticity: PlasticitySummary | None = field(default=None, repr=False)
    before: Map | None = field(default=None, repr=False)  # as `steps`, before the operation
    film: Film | None = field(default=None, repr=False)  # of a training run that was watched
    therapy: Therapy | None = field(default=None, repr=False)  # what `auto` found and chose
    # slices in the patch, such as L5H14.q, with their numbers of weights
    slices: Mapping[str, int] = field(default_factory=dict, repr=False)

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
        return "stock" if self.run is None else self.run.mode

    @property
    def maps(self) -> dict[str, Map]:
        """Every per-head measure of the diagnosis."""
        return {} if self.diagnosis is None else dict(self.diagnosis.maps)

    @property
    def sick(self) -> Mask | None:
        """Which heads are dead or sinks."""
        return None if self.diagnosis is None else self.diagnosis.sick

    @property
    def text_sets(self) -> dict[str, DocumentLosses]:
        """Losses by text set; empty without an evaluation."""
        return {} if self.evaluation is None else dict(self.evaluation.text_sets)

    @property
    def weights(self) -> int | None:
        """Weights of the patches: the slices, not the matrices they lie in."""
        if self.evaluation is None or not self.evaluation.patches:
            return None
        return sum(patch.num_weights or 0 for patch in self.evaluation.patches)

    @property
    def best_perplexity(self) -> float | None:
        """The lowest validation perplexity of the run."""
        losses = self.validations.values()
        return math.exp(min(losses)) if losses else None

    def ablation(self, head: str) -> Interval | None:
        """The cost of losing a head (or a joint set), with its interval."""
        found = None if self.evaluation is None else self.evaluation.heads.ablation_zero.get(head)
        return None if found is None else found.interval

    @cached_property
    def zones(self) -> Zones | None:
        """Operated, watched and outside heads, and which of them can move.

        All passes so far count, as the patches tell them: the control `random-heads` draws its own
        targets, and a second pass adds to the first.
        """
        if self.diagnosis is None:
            return None
        plans = plans_of(() if self.evaluation is None else self.evaluation.patches)
        if not plans and self.run is not None:
            plans = [self.run.plan]
        plan = join_plans(plans) if plans else None
        return zones_of(self.diagnosis.model, plan, whole_layers=self.mode == "lora")


@dataclass(frozen=True)
class Source:
    """All that one folder holds."""

    folder: Path
    kind: str  # study, run, film or measurement
    name: str
    stock: Condition | None
    runs: tuple[Condition, ...] = ()
    summary: StudySummary | None = field(default=None, repr=False)
    completions: Completions | None = field(default=None, repr=False)
    missing: tuple[str, ...] = ()  # arms that were asked for and are not finished
    triage: Triage | None = field(default=None, repr=False)  # of stock
    checkup: tuple[str, ...] = ()  # what a check-up in this folder says
    searches: tuple[NestedSets, ...] = ()  # of heads to take out, of groups to restrict

    @property
    def conditions(self) -> list[Condition]:
        """Stock first, then every judged pass of every run."""
        return [c for c in (self.stock, *self.runs) if c is not None]

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What every artefact here says against believing it."""
        kept: list[Alarm] = []
        for condition in self.conditions:
            parts = (condition.diagnosis, condition.evaluation, condition.comparison, condition.run)
            alarms = merge_alarms(*(part.alarms for part in parts if part is not None))
            known = {
                replace(alarm, condition=None) for alarm in kept
            }  # a comparison repeats stock's
            kept += [replace(a, condition=condition.label) for a in alarms if a not in known]
        return merge_alarms(kept, () if self.completions is None else self.completions.alarms)

    @property
    def model(self) -> ModelInfo | None:
        """The model as the first diagnosis describes it; a bare run does not know it."""
        measured = [c.diagnosis.model for c in self.conditions if c.diagnosis is not None]
        return next(iter([*measured, *(search.model for search in self.searches)]), None)

    @property
    def model_id(self) -> str:
        """The model's id, as a diagnosis or a run tells it."""
        if self.model is not None:
            return self.model.id
        return next((c.run.model for c in self.runs if c.run is not None), "unknown")

    @property
    def model_name(self) -> str:
        """The model's id as a title can carry it."""
        return model_name(self.model_id)

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
                texts = condition.diagnosis.provenance.texts
                told = None if texts is None else texts.name
                return told if told in names else (names[0] if names else None)
        return None

    def held_out(self, condition: Condition) -> Interval | None:
        """Perplexity of a condition on the judged text set."""
        losses = condition.text_sets.get(self.judged_set or "")
        return None if losses is None else losses.perplexity

    def against_stock(self, arm: str, text_set: str | None = None) -> Interval | None:
        """Paired change of held-out loss: over all seeds if summarised, else of the first run."""
        name = text_set or self.judged_set
        if name is None:
            return None
        if self.summary is not None and arm in self.summary.against_stock:
            over_seeds = self.summary.against_stock[arm].get(name)
            return None if over_seeds is None else over_seeds.interval
        comparison = self.of_arm(arm)[0].comparison
        paired = None if comparison is None else comparison.losses.get(name)
        return None if paired is None else paired.difference

    def stock_losses(self) -> DocumentLosses | None:
        """Of stock on the judged text set."""
        losses = {} if self.stock is None else self.stock.text_sets
        return losses.get(self.judged_set or "")

    def recoveries(self, arm: str) -> list[Recovery]:
        """What became of the treated heads of an arm, for every seed that says so."""
        if self.kind in (PRUNED, STREAMED):  # heads that are out do not recover
            return []
        evaluations = [c.evaluation for c in self.of_arm(arm)]
        return [e.recovery for e in evaluations if e is not None and e.recovery is not None]

    def stock_validation(self, condition: Condition) -> float | None:
        """Stock's loss on a run's validation text: step 0 of an arm that does not operate."""
        if condition.run is None:
            return None
        for other in self.runs:
            same = other.run is not None and other.run.corpus == condition.run.corpus
            if same and other.number == 1 and other.mode in ("gradient-only", "lora"):
                return other.validations.get(0)
        return None


def read_source(
    folder: Path,
    before: Path | None = None,
    after: Path | None = None,
    triage: Path | None = None,
) -> Source:
    """Read a study, a run, or a folder of diagnose, evaluate, checkup, watch, prune or stream.

    The evaluations `before` and `after` of a run or of pruned heads are found beside it
    (`out/before`, `out/after`) if they do not lie in it and are not named; a triage of the same
    weights in the folder, in a study's `stock` or beside it (`out/triage`).
    """
    found = _read_folder(folder, before, after)
    return replace(found, triage=_triage(found, triage))


def _triage(source: Source, named: Path | None) -> Triage | None:
    """The triage that is named (a file or a folder), or one nearby of the same weights."""
    stock = None if source.stock is None else source.stock.diagnosis
    ours = None if stock is None else origin_of(stock, source.folder)
    if named is not None:
        triage = Triage.load(named if named.is_file() else named / TRIAGE)
        if ours is not None:
            fix = "pass the triage of the stock model"
            require_same_origin(ours, origin_of(triage, named), fix)
        return triage
    folder = source.folder
    for place in (folder, folder / "stock", folder.parent / "triage"):
        near = _optional(place / TRIAGE, Triage.load)
        if near is not None and ours and not ours.differs_from(origin_of(near, place)):
            return near
    return None


def _read_folder(folder: Path, before: Path | None, after: Path | None) -> Source:
    if folder.is_file() and folder.suffix == ".json":
        folder = folder.parent
    if not folder.is_dir():
        raise ArtefactError(
            "no such folder", where=folder, fix="pass the --out of a study, repair or diagnose"
        )
    if (folder / "study.json").exists():
        return _read_study(folder)
    if (folder / RUN).exists():
        return _read_run(folder, before, after)
    if (folder / FILM).exists():
        return _read_film(folder)
    if any((folder / name).exists() for name in ("diagnosis.json", "evaluation.json")):
        stock = _read_condition(folder, arm="model")
        measured = stock.evaluation or stock.diagnosis
        ours = None if measured is None else origin_of(measured, folder)
        completions = _completions(folder, ours)
        return Source(
            folder,
            "measurement",
            folder.name,
            stock,
            completions=completions,
            checkup=_checkup_lines(folder, ours),
            searches=_searches(folder / PRUNED, folder / STREAMED, ours=ours),
        )
    if searches := _searches(folder):
        return _read_search(folder, searches, before, after)
    raise ArtefactError(
        "nothing to report: no study.json, run.json, watch.jsonl, diagnosis.json, "
        "evaluation.json, prune.json or stream.json",
        where=folder,
        fix="pass the folder that `headwise study`, `repair`, `watch`, `diagnose`, `evaluate`, "
        "`prune` or `stream` wrote",
    )


def _searches(*folders: Path, ours: Origin | None = None) -> tuple[NestedSets, ...]:
    """What prune and stream found, of the same weights."""
    paths = [folder / name for folder in folders for name in (PRUNE, STREAM)]
    read = {path: NestedSets.load(path) for path in paths if path.exists()}
    for path, search in read.items():
        if ours is not None:
            require_same_origin(replace(ours, patch=None), search.origin(path))
    return tuple(read.values())


def _read_search(
    folder: Path, searches: tuple[NestedSets, ...], before: Path | None, after: Path | None
) -> Source:
    """A search, with the evaluations of its patch and of stock where both are known."""
    first = searches[0]
    ours = first.origin(folder)
    judged = _evaluation(folder, after, "after", ours)
    stock_side = _evaluation(folder, before, "before", replace(ours, patch=STOCK))
    if judged is None or stock_side is None:
        return Source(folder, first.kind, folder.name, None, searches=searches)
    stock = Condition("stock", diagnosis=stock_side.diagnosis, evaluation=stock_side)
    compared = compare(stock_side, judged)
    pruned = Condition(
        first.kind, diagnosis=judged.diagnosis, evaluation=judged, comparison=compared
    )
    return Source(folder, first.kind, folder.name, stock, (pruned,), searches=searches)


def _checkup_lines(folder: Path, ours: Origin | None) -> tuple[str, ...]:
    """The answer of a check-up of the same weights, line by line."""
    path = folder / "checkup.json"
    if not path.exists():
        return ()
    body = load_artefact(path, "checkup")
    if ours is not None:
        theirs = Origin(str(path), body["model"]["id"], body["model"]["fingerprint"])
        require_same_origin(replace(ours, patch=None), theirs, "run the check-up again")
    return tuple(str(line) for line in body["lines"])


def _read_film(folder: Path) -> Source:
    """A watched training run: its last reading is the condition, the film its steps."""
    film = Film.load(folder)
    if not film.readings:
        raise ArtefactError("the film has no reading yet", where=folder, fix="let it train on")
    steps = tuple((reading.step, reading.maps[MASS]) for reading in film.readings)
    stock = Condition("training", diagnosis=film.diagnosis(), steps=steps, film=film)
    return Source(folder, "film", folder.name, stock)


def _read_study(folder: Path) -> Source:
    path = folder / "study.json"
    study = started_study(path)
    runs: list[Condition] = []
    missing: list[str] = []
    for arm, seed in study.runs():
        found = _read_passes(folder / "runs" / f"{arm.name}-s{seed}", arm.name, seed)
        runs += found
        if not found:
            missing.append(f"{arm.name} seed {seed}")
    stock = _read_condition(folder / "stock", arm="stock")
    if stock.diagnosis is None:
        raise ArtefactError(
            "this study has not diagnosed its stock model yet",
            where=folder,
            fix="run `headwise study` again: it goes on where it stopped",
        )
    summary = _optional(folder / "summary.json", StudySummary.load)
    ours = replace(origin_of(stock.evaluation or stock.diagnosis, folder / "stock"), patch=None)
    for run in runs:
        if run.evaluation is not None:
            where = folder / "runs" / run.key / "evaluation.json"
            require_same_origin(ours, origin_of(run.evaluation, where))
        if run.comparison is not None:
            pair = _made_from(f"the evaluations of {run.label}", [stock, run])
            require_same_origin(pair, origin_of(run.comparison, f"the comparison of {run.label}"))
    finals = [run for arm in study.arms for run in runs if run.last and run.arm == arm.name]
    if summary is not None and not missing:
        every = _made_from(f"the evaluations in {folder}", [stock, *finals])
        told = Origin(str(folder / "summary.json"), evaluations=summary.identity or None)
        require_same_origin(every, told)
    completions = _completions(folder, ours)
    if completions is not None:
        first = {run.arm: run for run in reversed(finals)}  # of each arm the first seed
        for run in first.values():
            _require_completed(completions, run, folder)
    return Source(
        folder,
        "study",
        study.name,
        stock,
        tuple(runs),
        summary,
        completions,
        tuple(missing),
    )


def _made_from(name: str, conditions: Sequence[Condition]) -> Origin:
    """The origin of what is made from the evaluations of these conditions, if all have one."""
    made = [c.evaluation for c in conditions if c.evaluation is not None]
    whole = len(made) == len(conditions)
    return Origin(name, evaluations=identity_of(made) if whole else None)


def _require_completed(completions: Completions, run: Condition, folder: Path) -> None:
    """Refuse completions whose condition of this name is of another patch."""
    if run.run is not None and run.arm in completions.conditions:
        ours = replace(origin_of(run.run, run.label), base=None, seed=None, run=None)
        path = folder / "completions.json"
        require_same_origin(ours, completions_origin(completions, run.arm, path))


def _read_passes(folder: Path, arm: str, seed: int) -> list[Condition]:
    """Every pass of a run that has been judged."""
    folders = [folder, folder / "pass2"]
    judged = [(n, f) for n, f in enumerate(folders, 1) if (f / "evaluation.json").exists()]
    return [
        _read_condition(f, arm=arm, seed=seed, number=n, last=n == judged[-1][0]) for n, f in judged
    ]


def _read_run(folder: Path, before: Path | None, after: Path | None) -> Source:
    run = RunSettings.load(folder)
    arm = "auto" if (folder / THERAPY).exists() else run.name
    condition = _read_condition(folder, arm=arm, seed=run.seed)
    ours = origin_of(run, folder / RUN)
    judged = condition.evaluation or _evaluation(folder, after, "after", ours)
    stock_side = _evaluation(folder, before, "before", stock_of_run(run, folder / RUN))
    if judged is not None:
        condition = replace(condition, diagnosis=judged.diagnosis, evaluation=judged)
    if judged is None or stock_side is None:
        stock = stock_of(condition)
    else:
        stock = Condition("stock", diagnosis=stock_side.diagnosis, evaluation=stock_side)
        comparison = condition.comparison or compare(stock_side, judged, run=folder)
        condition = replace(condition, comparison=comparison)
    completions = _completions(folder, ours)
    if completions is not None:
        names = [name for name in completions.conditions if name != "stock"]
        theirs = [completions_origin(completions, n, folder / "completions.json") for n in names]
        if all(replace(ours, run=None, seed=None).differs_from(one) for one in theirs):
            for one in theirs[:1]:  # of stock alone they may be of any run
                require_same_origin(ours, one)
    return Source(folder, "run", folder.name, stock, (condition,), completions=completions)


def _evaluation(folder: Path, named: Path | None, side: str, ours: Origin) -> Evaluation | None:
    """An evaluation that is named (a file or a folder), or one beside the run that is of it.

    A default is never taken by its folder's name alone: it must say the same base and patch.
    """
    if named is not None:
        path = named if named.is_file() else named / "evaluation.json"
        evaluation = Evaluation.load(path)
        require_same_origin(ours, origin_of(evaluation, path), f"pass this run's --{side}")
        return evaluation
    path = folder.parent / side / "evaluation.json"
    if not path.exists():
        return None
    evaluation = Evaluation.load(path)
    theirs = origin_of(evaluation, path)
    sure = ours.patch is not None and theirs.patch is not None
    return evaluation if sure and not ours.differs_from(theirs) else None


def stock_of(after: Condition) -> Condition | None:
    """The stock side of a comparison, got back from the changes it holds."""
    comparison, diagnosis = after.comparison, after.diagnosis
    if comparison is None or diagnosis is None:
        return None
    stock = diagnosis_from(
        model=comparison.model,
        maps={name: diagnosis.maps[name] - delta for name, delta in comparison.delta.items()},
        thresholds=diagnosis.thresholds,
        provenance=comparison.provenance.before,
    )
    return Condition("stock", diagnosis=stock)


def _read_condition(
    folder: Path, *, arm: str, seed: int | None = None, number: int = 1, last: bool = True
) -> Condition:
    evaluation = _optional(folder / "evaluation.json", Evaluation.load)
    comparison = _optional(folder / "comparison.json", Comparison.load)
    diagnosis = _optional(folder / "diagnosis.json", Diagnosis.load)
    run = RunSettings.load(folder) if (folder / RUN).exists() else None
    ours = None if run is None else origin_of(run, folder / RUN)
    if ours is not None:
        # a second pass starts from a patched model: its base is not the evaluation's
        ours = ours if number == 1 else replace(ours, base=None)
        require_same_origin(Origin(f"the study's {folder}", seed=seed), ours)
        diagnosis = None  # that of its evaluation counts
    elif diagnosis is not None:
        ours = replace(origin_of(diagnosis, folder / "diagnosis.json"), patch=None)
    for name, artefact in (("evaluation.json", evaluation), ("comparison.json", comparison)):
        if ours is not None and artefact is not None:
            require_same_origin(ours, origin_of(artefact, folder / name))
    therapy = _optional(folder / THERAPY, lambda path: Therapy.load(path.parent))
    if therapy is not None and ours is not None:
        require_same_origin(ours, therapy.origin(folder / THERAPY))
    plasticity = find_plasticity(folder, *([folder.parent] if folder.name == "stock" else []))
    # what the evaluation is of, if there is one: it knows whether a patch is on
    measured = ours if evaluation is None else origin_of(evaluation, folder / "evaluation.json")
    if plasticity is not None and measured is not None:
        require_same_origin(measured, origin_of(plasticity, f"the plasticity.json of {folder}"))
    maps = run_maps(folder, folder.parent if number > 1 else folder)
    trace, validations = read_trace(folder)
    return Condition(
        arm,
        seed,
        number,
        last,
        diagnosis=diagnosis or (None if evaluation is None else evaluation.diagnosis),
        evaluation=evaluation,
        comparison=comparison,
        run=run,
        steps_taken=len(trace),
        validations=validations,
        steps=tuple((step, mass) for step, mass in maps if step >= 0),
        plasticity=plasticity,
        before=next((mass for step, mass in maps if step < 0), None),
        therapy=therapy,
        slices=_optional(folder / PATCH, patch_slices) or {},
    )


def patch_slices(path: Path) -> dict[str, int]:
    """The slices of a patch and their sizes, from the file's header alone: no torch."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ArtefactError("not a safetensors file", where=path)
        header = parse_json(file.read(length).decode("utf-8", "replace"), path)
    return {
        name.removesuffix(".after"): math.prod(entry["shape"])
        for name, entry in header.items()
        if name.endswith(".after")
    }


def _completions(folder: Path, ours: Origin | None = None) -> Completions | None:
    completions = _optional(folder / "completions.json", Completions.load)
    if completions is not None and ours is not None:
        require_same_origin(ours, origin_of(completions, folder / "completions.json"))
    return completions


def _optional(path: Path, load: Callable[[Path], Artefact]) -> Artefact | None:
    return load(path) if path.exists() else None
