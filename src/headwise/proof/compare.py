"""Compare two conditions: what changed, where, and whether it could have.

Transitions between classes (iatrogenic: healthy before, sick after; self-healed: sick before, not
operated on, not sick after), drift by zone, columns over checkpoints, paired losses. Heads in
layers that the operation cannot reach are counted apart: their change is zero by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from headwise.alarms import Alarm, cure_alarms, merge_alarms
from headwise.artefacts import read_json, versions
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ArtefactError
from headwise.intervals import FEWEST, Interval
from headwise.plasticity.values import PlasticitySummary, find_plasticity
from headwise.proof.lm_eval import paired_tasks
from headwise.proof.origins import last_patch, origin_of, stock_of_run
from headwise.proof.trajectories import (
    column_trends,
    run_maps,
    step_deltas,
    trajectory_shapes,
    two_phenomena,
)
from headwise.proof.values import (
    Comparison,
    ComparisonProvenance,
    DocumentLosses,
    Evaluation,
    PairedLoss,
    PlasticityChange,
    identity_of,
)
from headwise.proof.zones import (
    Map,
    Zones,
    drift_by_zone,
    roles_played,
    transitions,
    zones_of,
)
from headwise.provenance import STOCK, Origin, require_same_origin
from headwise.surgery.plan import SurgeryPlan, join_plans, plans_of
from headwise.surgery.values import RunSettings
from headwise.triaging.values import Triage
from headwise.values import to_plain

_IDENTITY = ("model_type", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Snapshot:
    """One side of a comparison: a diagnosis, and its evaluation and plasticity, if any."""

    diagnosis: Diagnosis
    evaluation: Evaluation | None = None
    plasticity: PlasticitySummary | None = field(default=None, repr=False)
    triage: Triage | None = field(default=None, repr=False)
    path: str = ""  # where it was read from


def read_snapshot(path: Path) -> Snapshot:
    """A diagnosis.json, a triage.json, an evaluation.json, or a folder that holds one of them.

    A plasticity.json in the folder, or in its subfolder `plasticity`, comes along.
    """
    plasticity = None
    if path.is_dir():
        plasticity = find_plasticity(path)
        names = ("evaluation.json", "triage.json", "diagnosis.json")
        found = [path / name for name in names if (path / name).exists()]
        if not found:
            raise ArtefactError("no evaluation.json or diagnosis.json here", where=path)
        path = found[0]
    schema = read_json(path).get("schema")
    if schema == "headwise.evaluation/1":
        evaluation = Evaluation.load(path)
        return Snapshot(evaluation.diagnosis, evaluation, plasticity, path=str(path))
    if schema == "headwise.triage/1":
        triage = Triage.load(path)
        return Snapshot(triage.diagnosis, None, plasticity, triage, str(path))
    return Snapshot(Diagnosis.load(path), None, plasticity, path=str(path))


def snapshot_of(side: Snapshot | Evaluation | Diagnosis | Path) -> Snapshot:
    """One side of a comparison from a value, a file or a folder."""
    if isinstance(side, Snapshot):
        return side
    if isinstance(side, Evaluation):
        return Snapshot(side.diagnosis, side)
    return Snapshot(side) if isinstance(side, Diagnosis) else read_snapshot(Path(side))


def compare(
    before: Snapshot | Evaluation | Diagnosis | Path,
    after: Snapshot | Evaluation | Diagnosis | Path,
    *,
    plan: SurgeryPlan | None = None,
    run: Path | None = None,
    checkpoints: Sequence[tuple[int, Map]] = (),
    whole_layers: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare two conditions; `run` is the directory of the run that lies between them.

    `checkpoints` are the run's (step, first-token mass) maps; changes are from its own map before
    the operation (step -1), read on the same text. `whole_layers`: the patch changes whole
    projections (lora), not only the planned heads. `seed` is the bootstrap's.
    """
    before, after = snapshot_of(before), snapshot_of(after)
    _require_comparable(before, after)
    for side in (before, after):
        if side.plasticity is not None:
            name = f"the plasticity.json beside {side.path or 'it'}"
            require_same_origin(_origin(side), origin_of(side.plasticity, name))
    if plan is not None:
        require_same_origin(_origin(before), origin_of(plan, "the plan"))
    if run is not None:
        settings = RunSettings.load(run)
        require_same_origin(_origin(before), stock_of_run(settings, run))
        if after.evaluation is not None:
            require_same_origin(origin_of(after.evaluation, after.path), origin_of(settings, run))
        checkpoints, whole_layers = run_maps(run), settings.mode == "lora"
    plan = plan or _plan_of(after)
    _require_shapes(before.diagnosis, plan, checkpoints)
    zones = zones_of(before.diagnosis.model, plan, whole_layers=whole_layers)
    delta = _deltas(before.diagnosis, after.diagnosis)
    steps = step_deltas(checkpoints, before.diagnosis.maps["first_token_mass"])
    moved = delta["first_token_mass"]
    sides = [side.evaluation for side in (before, after) if side.evaluation is not None]
    return Comparison(
        model=before.diagnosis.model,
        plan=plan,
        transitions=transitions(before.diagnosis, after.diagnosis, zones.operated),
        drift=drift_by_zone(moved, zones, before.diagnosis.model.layers),
        delta=delta,
        columns=column_trends(steps or [(0, moved)], zones.watched),
        trajectories=trajectory_shapes(steps, zones.watched, before.diagnosis.model.layers),
        two_phenomena=two_phenomena(steps, zones),
        plasticity=plasticity_change(before, after, zones),
        losses=paired_losses(before.evaluation, after.evaluation, seed),
        recovery=None if after.evaluation is None else after.evaluation.recovery,
        roles=roles_played(
            before.diagnosis,
            after.diagnosis,
            zones.operated if zones.operated.any() else zones.outside,
        ),
        tasks=_task_changes(before.evaluation, after.evaluation, seed),
        provenance=ComparisonProvenance(
            versions(),
            {"seed": seed},
            before.diagnosis.provenance,
            after.diagnosis.provenance,
            "" if len(sides) < 2 else identity_of(sides),
            None if after.evaluation is None else last_patch(after.evaluation),
        ),
        alarms=_alarms(before.evaluation, after.evaluation),
    )


def _origin(side: Snapshot) -> Origin:
    """What one side is of: an evaluation also knows its patch."""
    name = side.path or "one side of the comparison"
    return origin_of(side.diagnosis if side.evaluation is None else side.evaluation, name)


def _task_changes(
    before: Evaluation | None, after: Evaluation | None, seed: int
) -> dict[str, dict[str, Interval]] | None:
    """What lm-eval tasks say of both, paired by item; None if they did not run on both."""
    if before is None or after is None or not before.task_items or not after.task_items:
        return None
    return paired_tasks(before.task_items, after.task_items, seed)


def _alarms(before: Evaluation | None, after: Evaluation | None) -> tuple[Alarm, ...]:
    """The alarms of both sides, and a "cure" of a text set that stock could not read at all."""
    sides = [side for side in (before, after) if side is not None]
    kept = [alarm for side in sides for alarm in side.alarms]
    if before is None or after is None:
        return merge_alarms(kept)
    unread, still = (_unread(side) for side in (before, after))
    cured = [
        alarm
        for name in before.text_sets
        if name in unread and name in after.text_sets and name not in still
        for alarm in cure_alarms(
            before.text_sets[name].loss.value, after.text_sets[name].loss.value
        )
    ]
    return merge_alarms(kept, cured)


def _unread(evaluation: Evaluation) -> set[str | None]:
    """Text sets that raised an alarm over their loss."""
    return {alarm.texts for alarm in evaluation.alarms if alarm.kind.startswith("loss-above")}


def _plan_of(after: Snapshot) -> SurgeryPlan | None:
    """What the evaluated patches say they operated on."""
    plans = plans_of([] if after.evaluation is None else after.evaluation.patches)
    return join_plans(plans) if plans else None


def _deltas(before: Diagnosis, after: Diagnosis) -> dict[str, Map]:
    """The change of every measure that both have."""
    names = sorted(set(before.maps) & set(after.maps))
    return {name: after.maps[name] - before.maps[name] for name in names}


def _require_comparable(before: Snapshot, after: Snapshot) -> None:
    left, right = before.diagnosis, after.diagnosis
    for key in _IDENTITY:
        if getattr(left.model, key) != getattr(right.model, key):
            raise ArtefactError(
                f"these are different models: {key} is {getattr(left.model, key)} and "
                f"{getattr(right.model, key)}",
                where=f"{left.model.id} and {right.model.id}",
                fix="compare two conditions of one model",
            )
    if before.evaluation is not None and after.evaluation is not None:
        stock = origin_of(before.evaluation, before.path or "the evaluation before")
        treated = origin_of(after.evaluation, after.path or "the evaluation after")
        require_same_origin(
            replace(stock, patch=None),  # two patches of one base may be compared
            replace(treated, patch=None),
            fix="evaluate the same base with and without --patch",
        )
        if treated.patch == STOCK != stock.patch:
            raise ArtefactError(
                f"the two sides are swapped: {stock.name} is of a patched model and "
                f"{treated.name} of stock",
                where=left.model.id,
                fix="pass stock first, the patched model second",
            )
    hashes = [None if (t := d.provenance.texts) is None else t.sha256 for d in (left, right)]
    if hashes[0] != hashes[1]:
        raise ArtefactError(
            "the two conditions were measured on different text sets",
            where=f"text hashes {str(hashes[0])[:12]} and {str(hashes[1])[:12]}",
            fix="run both with the same --texts",
        )
    settings = [to_plain(d.provenance.settings) or {} for d in (left, right)]
    one, other = settings
    differing = [key for key in one | other if one.get(key) != other.get(key)]
    if differing:
        told = "; ".join(f"{key}: {one.get(key)} and {other.get(key)}" for key in differing)
        raise ArtefactError(
            f"the two conditions were measured with different settings: {told}",
            where=f"{left.model.id} and {right.model.id}",
            fix="run both with the same --max-length, --skip-queries and --bos",
        )


def _require_shapes(
    diagnosis: Diagnosis, plan: SurgeryPlan | None, checkpoints: Sequence[tuple[int, Map]]
) -> None:
    shape = diagnosis.sick.shape
    others = {"run": {mass.shape for _, mass in checkpoints}}
    if plan is not None:
        others["plan"] = {(plan.model.num_layers, plan.model.num_heads)}
    for name, shapes in others.items():
        if shapes - {shape}:
            raise ArtefactError(
                f"the {name} is for a model of (layers, heads) = {min(shapes - {shape})}, "
                f"the diagnoses have {shape}",
                where=diagnosis.model.id,
                fix=f"pass the {name} of this model",
            )


def plasticity_change(before: Snapshot, after: Snapshot, zones: Zones) -> PlasticityChange | None:
    """Change of attention plasticity by head and its mean by zone, where both were captured."""
    left, right = before.plasticity, after.plasticity
    if left is None or right is None:
        return None
    if not left.measured_like(right):
        raise ArtefactError(
            "the two plasticities were measured with different settings",
            fix="run `headwise plasticity` alike on both captures",
        )
    start, end = (np.array(found.maps["plasticity"], dtype=float) for found in (left, right))
    shape = before.diagnosis.maps["first_token_mass"].shape
    if start.shape != shape or end.shape != shape:
        raise ArtefactError(
            f"plasticity maps of {start.shape} and {end.shape} heads beside {shape}",
            fix="capture all layers and heads of both conditions",
        )
    delta = end - start
    measured = np.isfinite(delta)
    return PlasticityChange(
        delta=tuple(tuple(None if np.isnan(x) else float(x) for x in row) for row in delta),
        mean_delta={
            name: float(delta[mask & measured].mean())
            for name, mask in zones.named().items()
            if (mask & measured).any()
        },
    )


def paired_losses(
    before: Evaluation | None, after: Evaluation | None, seed: int = 0
) -> dict[str, PairedLoss]:
    """Change of mean loss on every text set both saw, paired by document."""
    if before is None or after is None:
        return {}
    both = [name for name in before.text_sets if name in after.text_sets]
    return {name: _paired(before.text_sets[name], after.text_sets[name], seed) for name in both}


def _paired(left: DocumentLosses, right: DocumentLosses, seed: int) -> PairedLoss:
    interval = right.minus(left, seed)
    return PairedLoss(
        left.loss,
        right.loss,
        left.perplexity,
        right.perplexity,
        interval,
        _verdict(interval, left.documents),
    )


def _verdict(interval: Interval, documents: int) -> str:
    if documents < FEWEST:
        return f"no verdict on {documents} of at least {FEWEST} documents"
    if interval.high < 0:
        return "lower with 95% confidence"
    return "higher with 95% confidence" if interval.low > 0 else "no difference shown"
