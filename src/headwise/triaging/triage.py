"""Triage: which of the heads sleeps, does harm, is parked, works, is empty or gives a constant.

Each head is measured under zero ablation, mean ablation, the key of its sink hidden, and with its
queries treated (`release`, and `centre`, the better handle under RoPE: the better of the two
counts), on documents in stages, until its class is decided or the documents are used up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float
from transformers import PreTrainedModel

from headwise.artefacts import versions
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ArtefactError, TextError
from headwise.forward.first_order import first_order_costs
from headwise.forward.guard import guard
from headwise.forward.interventions import (
    ZERO,
    Intervention,
    hidden_sink,
    mean_output,
    patched_queries,
)
from headwise.forward.mean_outputs import measure_means
from headwise.forward.variant_losses import head_costs
from headwise.heads import Head, format_heads, select_heads
from headwise.models.architectures import require_plain
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch
from headwise.progress import Budget, Progress, Work, silent, unlimited
from headwise.settings import changed
from headwise.staged import (
    Staged,
    discoveries,
    document_order,
    in_stages,
    looks_at,
    student_p,
)
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.sink_directions import LayerDirections, measure_directions
from headwise.surgery.treatments import Dose, treat
from headwise.texts.batches import batches, encode_for
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.triaging.settings import TriageSettings, TriageThresholds
from headwise.triaging.texts import triage_texts
from headwise.triaging.values import (
    HeadTriage,
    Triage,
    TriageProvenance,
    is_decided,
    triage_class,
)

HANDLES = ("release", "centre")  # query treatments, of which the better speaks for the head
INTERVENTIONS = 3 + len(HANDLES)  # zero, mean and unsink are the others

MAX_TEXTS = 64


@takes_model
def triage(
    loaded: LoadedModel,
    diagnosis: Diagnosis,
    texts: TextSet | Sequence[str] | None = None,
    *,
    heads: str = "sick",
    settings: TriageSettings | None = None,
    directions: Mapping[int, LayerDirections] | None = None,
    bos: bool | None = None,
    force: bool = False,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> Triage:
    """Judge the selected heads on text that is neither training nor evaluation text.

    `directions` are measured on the same text unless given (from training text, say). `budget`
    hears how much work it is, before it starts.
    """
    chosen = settings or TriageSettings()
    require_plain(loaded.model)
    earlier = diagnosis.provenance.settings
    known = [] if earlier is None else [(earlier.bos, "the diagnosis")]
    loaded = loaded.reading(bos, *known, progress=progress)
    if not force and weight_fingerprint(loaded.model) != diagnosis.model.fingerprint:
        raise ArtefactError(
            "the diagnosis is of other weights than these",
            where=diagnosis.model.id,
            fix="diagnose this model and try again, or use --force",
        )
    given = triage_texts(loaded.id) if texts is None else as_text_set(texts, loaded.id)
    wanted = selected_heads(diagnosis, heads)
    encoded = _documents(loaded, given, chosen)
    budget(loaded.model, _work(encoded, len(wanted)))
    guard(loaded, max(map(len, encoded)))
    plan = query_plan(diagnosis, wanted)
    rows, staged = triage_heads(
        loaded.model, plan, encoded, settings=chosen, directions=directions, progress=progress
    )
    provenance = _provenance(given, encoded, staged, chosen, heads, loaded.bos)
    return Triage(rows, chosen.thresholds, diagnosis, provenance)


def _work(encoded: list[list[int]], heads: int) -> Work:
    """Means and directions once; the interventions on each head, half the layers each."""
    tokens = sum(map(len, encoded))
    less = "--heads, --max-texts, --max-length"
    work = tokens * (2 + INTERVENTIONS * heads / 2)
    return Work(work, 4 * max(map(len, encoded)), less=less)


def triage_heads(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    encoded: list[list[int]],
    *,
    settings: TriageSettings | None = None,
    directions: Mapping[int, LayerDirections] | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, HeadTriage], Staged]:
    """Judge a plan's targets on documents of tokens, in their order, as far as is needed."""
    chosen, heads = settings or TriageSettings(), plan.target_heads
    interventions = _interventions(model, encoded, plan, chosen, directions)
    staged = _measured(model, encoded, heads, interventions, chosen.thresholds, progress)
    judged = triage_classes(heads, [kind.name for kind in interventions], staged, chosen.thresholds)
    return {str(head): row for head, row in zip(heads, judged, strict=True)}, staged


def most_promising(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    encoded: list[list[int]],
    directions: Mapping[int, LayerDirections],
    most: int,
    *,
    progress: Progress = silent,
) -> list[Head]:
    """The targets that may sleep or be empty, to first order: half gain most, half cost least.

    Gain: by the better query treatment. Cost: of taking the head away, in either direction.
    """
    heads = plan.target_heads
    costs = _estimates(model, plan, encoded, directions, progress).sum(2)
    by_gain = np.argsort(costs[:, 1:].min(1), kind="stable")
    by_cost = np.argsort(np.abs(costs[:, 0]), kind="stable")
    order = dict.fromkeys(np.stack([by_gain, by_cost], 1).ravel().tolist())
    return sorted(heads[at] for at in list(order)[:most])


def suspects(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    encoded: list[list[int]],
    directions: Mapping[int, LayerDirections],
    *,
    progress: Progress = silent,
) -> tuple[list[Head], list[Head]]:
    """The targets that to first order gain by a query treatment, and those by being taken away.

    Most first. The estimate is above what a head really gains (LOG), so it must be clearly worth a
    treatment; whether it is, exact costs say.
    """
    costs = _estimates(model, plan, encoded, directions, progress)
    return _surely_less(plan, encoded, costs[:, 1:]), _surely_less(plan, encoded, costs[:, :1])


def _surely_less(
    plan: SurgeryPlan, encoded: list[list[int]], costs: Float[np.ndarray, "head kind document"]
) -> list[Head]:
    tokens = np.array([len(ids) - 1 for ids in encoded])
    means = costs.sum(2) / tokens.sum()  # (head, kind)
    best = means.argmin(1)
    rows = costs[np.arange(len(costs)), best]
    p_values = [min(1.0, costs.shape[1] * student_p(row, tokens)) for row in rows]
    sure = discoveries(np.array(p_values)) & (means.min(1) < -TriageThresholds().negligible)
    order = np.argsort(means.min(1), kind="stable")
    return [plan.target_heads[at] for at in order if sure[at]]


def _estimates(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    encoded: list[list[int]],
    directions: Mapping[int, LayerDirections],
    progress: Progress,
) -> Float[np.ndarray, "head kind document"]:
    """First-order change by taking each target away, then by each query treatment."""
    treated = _treated(model, plan, 1.0, directions)
    return first_order_costs(model, encoded, plan.target_heads, [ZERO, *treated], progress=progress)


def selected_heads(diagnosis: Diagnosis, selection: str) -> list[Head]:
    """The heads that a selection means for a diagnosis; none is an empty triage, not an error."""
    return select_heads(
        selection,
        num_layers=diagnosis.model.num_layers,
        num_heads=diagnosis.model.num_heads,
        sets=diagnosis.head_sets(),
        maps=diagnosis.maps,
        layers=diagnosis.model.layers,
    )


def _documents(loaded: LoadedModel, texts: TextSet, settings: TriageSettings) -> list[list[int]]:
    """The documents in the order in which they are used."""
    order = document_order(len(texts.texts), settings.seed)[: settings.max_texts]
    if len(order) < 2:
        raise TextError("triage needs two documents at least", where=texts.name, fix="add text")
    return encode_for(loaded, [texts.texts[i] for i in order], max_length=settings.max_length)


def _interventions(
    model: PreTrainedModel,
    encoded: list[list[int]],
    plan: SurgeryPlan,
    settings: TriageSettings,
    directions: Mapping[int, LayerDirections] | None,
) -> list[Intervention]:
    """What triage does to each head: nothing, the mean, no first key, and treated queries."""
    heads = plan.target_heads
    if not heads:
        return []
    blocks = list(batches(encoded, 4, model=model))
    sinks = plan.sink_positions
    layers = sorted({head.layer for head in heads})
    directions = directions or measure_directions(model, blocks, layers, sinks)
    treated = _treated(model, plan, settings.dose, directions)
    return [ZERO, mean_output(model, measure_means(model, blocks)), hidden_sink(sinks), *treated]


def query_plan(diagnosis: Diagnosis, heads: Sequence[Head]) -> SurgeryPlan:
    """A plan that touches the queries of these heads alone; it may have no targets."""
    every = make_plan(diagnosis, heads="all", kv_policy="queries-only")
    return changed(every, targets=format_heads(heads), summary=None)


def treated_queries(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    dose: float,
    directions: Mapping[int, LayerDirections],
) -> dict[str, Patch]:
    """Every target's queries under each query treatment; a variant takes those of its heads."""
    doses = {name: dict.fromkeys(plan.target_heads, Dose(name, dose)) for name in HANDLES}
    return {name: treat(model, plan, given, directions=directions) for name, given in doses.items()}


def _treated(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    dose: float,
    directions: Mapping[int, LayerDirections],
) -> list[Intervention]:
    patches = treated_queries(model, plan, dose, directions)
    return [patched_queries(model, name, patch) for name, patch in patches.items()]


def _measured(
    model: PreTrainedModel,
    encoded: list[list[int]],
    heads: Sequence[Head],
    interventions: Sequence[Intervention],
    thresholds: TriageThresholds,
    progress: Progress,
) -> Staged:
    kinds = [kind.name for kind in interventions]
    tokens = np.array([len(ids) - 1 for ids in encoded])

    def measure(rows: Sequence[int], documents: Sequence[int]) -> Float[np.ndarray, "r k d"]:
        some = [encoded[i] for i in documents]
        wanted = [heads[row] for row in rows]
        return head_costs(model, some, wanted, interventions, progress=progress)

    def undecided(staged: Staged) -> Bool[np.ndarray, "row"]:
        judged = triage_classes(heads, kinds, staged, thresholds)
        return np.array([not is_decided(found, thresholds) for found in judged])

    looks = looks_at(len(encoded))
    return in_stages(looks, tokens, (len(heads), len(kinds)), measure, undecided)


def triage_classes(
    heads: Sequence[Head],
    kinds: Sequence[str],
    staged: Staged,
    thresholds: TriageThresholds,
) -> tuple[HeadTriage, ...]:
    """Costs, evidence and class of every head from what was measured of it."""
    if not heads:
        return ()
    unit = {kind: np.eye(len(kinds))[at] for at, kind in enumerate(kinds)}
    handles = [kind for kind in kinds if kind in HANDLES]
    best = [_least(staged, row, unit, handles) for row in range(len(heads))]
    costs = _found(staged, [unit["zero"]] * len(heads), +1, 1, thresholds)
    gains = _found(staged, [unit[name] for name in best], -1, len(handles), thresholds)
    without = [_least(staged, row, unit, ("zero", "mean")) for row in range(len(heads))]
    harms = _found(staged, [unit[name] for name in without], -1, 2, thresholds)
    parking = unit["unsink"] - thresholds.parked_ratio * unit["zero"]
    rows = []
    for row in range(len(heads)):
        found = HeadTriage(
            staged.interval(row, unit["zero"]),
            staged.interval(row, unit["mean"]),
            staged.interval(row, unit["unsink"]),
            staged.interval(row, unit[best[row]]),
            staged.interval(row, parking),
            best[row],
            bool(costs[row]),
            bool(gains[row]),
            int(staged.documents[row]),
            bool(harms[row]),
        )
        rows.append(replace(found, class_=triage_class(found, thresholds)))
    return tuple(rows)


def _least(staged: Staged, row: int, unit: Mapping[str, np.ndarray], kinds: Sequence[str]) -> str:
    """The intervention under which the loss is least."""
    return min(kinds, key=lambda name: staged.interval(row, unit[name]).value)


def _found(
    staged: Staged,
    weights: Sequence[np.ndarray],
    sign: int,
    tries: int,
    thresholds: TriageThresholds,
) -> Bool[np.ndarray, "row"]:
    """Which rows change the loss in one direction, at the false discovery rate over all rows.

    The better of several `tries` must be that much clearer (Bonferroni).
    """
    p_values = [min(1.0, tries * staged.p_value(row, w)) for row, w in enumerate(weights)]
    right = [sign * staged.interval(row, w).value > 0 for row, w in enumerate(weights)]
    clear = discoveries(np.array(p_values), thresholds.false_discovery_rate)
    found: Bool[np.ndarray, "row"] = clear & np.array(right)
    return found


def _provenance(
    texts: TextSet,
    encoded: list[list[int]],
    staged: Staged,
    settings: TriageSettings,
    selection: str,
    bos: bool,
) -> TriageProvenance:
    return TriageProvenance(
        texts=texts.describe(sum(len(ids) for ids in encoded)),
        selection=selection,
        max_texts=settings.max_texts,
        max_length=settings.max_length,
        bos=bos,
        dose=settings.dose,
        seed=settings.seed,
        decisions=staged.decisions(),
        versions=versions(),
    )
