"""What a run was asked to do and what came of it: `run.json`, written and read here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from headwise.alarms import Alarm
from headwise.artefacts import content_hash, load_artefact, save_artefact, to_json, versions
from headwise.errors import ArtefactError
from headwise.intervals import Interval
from headwise.models.values import model_name
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.plan_settings import AUTO, Mode
from headwise.surgery.recipe import Recipe, Saving
from headwise.surgery.run_state import RUN
from headwise.surgery.settings import RepairRequest
from headwise.texts.corpus_info import CorpusInfo
from headwise.values import Finite, from_plain, plain_fields

Outcome = Literal["", "trained", "sham", "unchanged", "empty"]  # of the patch; "" until finished


PATCH = "patch.safetensors"


_CHOSEN = ("checkpoint_layers", "cache_prefix")
_DIGITS = 16  # of a run's identity
THEN = ", then "  # between the versions of a run that went on under another


@dataclass(frozen=True)
class RunSettings:
    """The request, what was made of it on this machine, and the outcome once it is finished."""

    request: RepairRequest
    model: str
    fingerprint: str  # of the weights that were operated on
    plan: SurgeryPlan = field(repr=False)  # as carried out: treated, drawn, or written by auto
    recipe: Recipe = field(repr=False)  # as carried out: fitted, without steps if none are trained
    corpus: CorpusInfo = field(repr=False)
    threads: int = 0  # 0: an older run did not say
    versions: Mapping[str, str] = field(default_factory=versions, repr=False)
    finished: bool = False
    patch: str = ""  # hash of what its slices became, once finished
    outcome: Outcome = ""  # sham: the best validated state was the untrained operation
    stock_loss: Finite | None = None  # on the validation text, before the operation
    # by text: what auto's patch was judged on
    against_stock: Mapping[str, Interval] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    trace_rows: int = 0  # that the finished run left; files with fewer have lost their end
    map_rows: int = 0
    saving: Saving | None = None  # as it was chosen at the start; None: an older run did not say

    def __repr__(self) -> str:
        done = self.outcome or "not finished"
        return f"RunSettings({self.name} of {model_name(self.model)}, seed {self.seed}: {done})"

    @property
    def mode(self) -> Mode:
        """Surgery, or the control that it was."""
        return self.request.mode

    @property
    def seed(self) -> int:
        """Of data order and random heads."""
        return self.request.seed

    @cached_property
    def identity(self) -> str:
        """A hash of what decides the run: its checkpoints, trace and maps carry it."""
        return content_hash([to_json(self.decisive)])[:_DIGITS]

    @property
    def name(self) -> str:
        """What a person calls the run: auto, the treatment if all heads got the same, its mode."""
        if self.request.auto:
            return AUTO
        given = list(self.plan.treatments)
        return given[0] if self.mode == "surgery" and len(given) == 1 else self.mode

    @cached_property
    def lowest(self) -> int:
        """The lowest layer with a head to train: nothing below can change."""
        return min(head.layer for head in self.plan.target_heads)

    @property
    def decisive(self) -> dict[str, object]:
        """What must be the same in a run that goes on."""
        # what a recipe leaves unsaid was no key before it could be said
        recipe = self.recipe.model_dump(mode="json", exclude_none=True)
        # `auto` was False before it existed, and the identity of a run shall not change with it
        recipe |= {key: False for key in _CHOSEN if recipe[key] == "auto"}
        return {
            "model": {"id": self.model, "fingerprint": self.fingerprint},
            "plan": self.plan.model_dump(mode="json"),
            "recipe": recipe,
            "mode": self.mode,
            "seed": self.seed,
            "corpus": plain_fields(self.corpus),
            "kept": self.request.kept,
            **({} if self.request.also is None else {"also": self.request.also.sha256}),
        }

    def to_json(self) -> dict[str, Any]:
        """The body of `run.json`."""
        body = plain_fields(self)
        body["model"] = {"id": self.model, "fingerprint": body.pop("fingerprint")}
        body["provenance"] = {"versions": body.pop("versions"), "threads": body.pop("threads")}
        return body

    def save(self, run: Path) -> Path:
        """Write `run.json` into a run directory."""
        return save_artefact(run / RUN, "run", {**self.to_json(), "identity": self.identity})

    @staticmethod
    def load(run: Path) -> RunSettings:
        """Read the `run.json` of a run directory."""
        path = run / RUN
        body = load_artefact(path, "run")
        model, provenance = body.pop("model", None), body.pop("provenance", None)
        if not isinstance(model, dict) or not isinstance(provenance, dict):
            raise ArtefactError("no model or provenance in the settings of a run", where=path)
        if "request" not in body:  # an older run told its mode and seed alone
            body["request"] = {key: body[key] for key in ("mode", "seed") if key in body}
        whole = {**body, **provenance, "model": model.get("id")}
        return from_plain(RunSettings, {**whole, "fingerprint": model.get("fingerprint")}, path)


def _has_begun(run: Path) -> bool:
    """Whether there is anything to lose: a run that made no step may start again, as it likes."""
    if not (run / RUN).exists():
        return False
    return (run / PATCH).exists() or any((run / "checkpoints").glob("step-*.safetensors"))


def chosen_before(asked: RunSettings, run: Path) -> Saving | None:
    """How the run that is to go on saved memory and time; None if there is nothing to go on."""
    if not (run / RUN).exists():
        return None
    before = RunSettings.load(run)
    if before.identity != asked.identity or not _has_begun(run):
        return None
    return before.saving or Saving()


def resumed_versions(asked: RunSettings, run: Path) -> RunSettings:
    """The settings of a run that goes on: versions that changed stand behind those before."""
    if not _has_begun(run):
        return asked
    versions = dict(RunSettings.load(run).versions)
    for name, now in asked.versions.items():
        before = versions.get(name)
        if before is None or before.split(THEN)[-1] != now:
            versions[name] = now if before is None else f"{before}{THEN}{now}"
    return replace(asked, versions=versions)


def is_finished(asked: RunSettings, run: Path, *, resume: bool) -> bool:
    """Whether there is nothing left to do; a run directory with other settings is refused."""
    if not _has_begun(run):
        return False
    if not resume:
        raise ArtefactError(
            "there is a run here already", where=run, fix="add --resume, or choose another --out"
        )
    before = RunSettings.load(run)
    old, new = _compared(before), _compared(asked)
    for key, value in new.items():
        if old[key] != value:
            raise ArtefactError(
                f"cannot resume: {key} differs from the run that was started here",
                where=run,
                fix="use the same settings, or choose another --out",
            )
    return before.finished and (run / PATCH).exists()


def _compared(settings: RunSettings) -> dict[str, object]:
    """What decides a run; of auto, which writes its own plan, the plan that it was given."""
    given = settings.request.plan if settings.request.auto else settings.plan
    plan = None if given is None else given.model_dump(mode="json")
    return {**settings.decisive, "plan": plan, "treatment": settings.request.auto}
