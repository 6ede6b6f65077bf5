"""What each artefact is of, as `Origin`: the one way in which verbs ask whose numbers they read."""

from __future__ import annotations

from dataclasses import replace

from headwise.diagnosis.values import Diagnosis
from headwise.models.values import PatchInfo
from headwise.plasticity.values import PlasticitySummary
from headwise.proof.completed_texts import Completions
from headwise.proof.values import Comparison, Evaluation
from headwise.provenance import STOCK, Origin
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.values import RunSettings
from headwise.triaging.values import Triage

Artefact = (
    RunSettings
    | Evaluation
    | Comparison
    | Diagnosis
    | Triage
    | SurgeryPlan
    | Completions
    | PlasticitySummary
)


def origin_of(artefact: Artefact, name: object) -> Origin:
    """What an artefact says of itself; `name` is how a message calls it (its path)."""
    name = str(name)
    if isinstance(artefact, RunSettings):
        patch = artefact.patch or None  # not before it is finished
        return Origin(
            name,
            artefact.model,
            artefact.fingerprint,
            patch,
            artefact.seed,
            run=artefact.identity,
        )
    if isinstance(artefact, Evaluation):
        return Origin(name, artefact.model.id, artefact.model.fingerprint, last_patch(artefact))
    if isinstance(artefact, Comparison):
        patch, made_from = artefact.provenance.patch, artefact.provenance.identity or None
        base = artefact.model
        return Origin(name, base.id, base.fingerprint, patch, evaluations=made_from)
    if isinstance(artefact, Completions):
        model = artefact.provenance.model
        return Origin(name) if model is None else Origin(name, model.id, model.fingerprint)
    if isinstance(artefact, PlasticitySummary):
        about = artefact.model
        return Origin(name, about["id"], about.get("fingerprint"), about.get("patch"))
    return Origin(name, artefact.model.id, artefact.model.fingerprint)


def stock_of_run(run: RunSettings, name: object) -> Origin:
    """What an evaluation of stock must be of to stand before a run."""
    return replace(origin_of(run, name), patch=STOCK)


def completions_origin(completions: Completions, condition: str, name: object) -> Origin:
    """What one condition of completions is of."""
    patches = completions.provenance.patches or {}
    whole = origin_of(completions, f"{condition} of {name}")
    return replace(whole, patch=patches.get(condition))


def last_patch(evaluation: Evaluation) -> str | None:
    """The hash of the last patch, `STOCK` without one; older files do not say."""
    last: PatchInfo | None = evaluation.patches[-1] if evaluation.patches else None
    return STOCK if last is None else last.sha256
