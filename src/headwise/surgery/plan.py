"""Plans: which heads are operated on and how, as a small YAML that a person can edit.

A plan is made from a diagnosis alone; no model is loaded. It states the exact number of weights it
would train (slices, not the matrices they lie in) and, with grouped-query attention, what happens
to keys and values that heads share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import yaml
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_serializer, model_validator

from headwise.artefacts import write_text
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ArtefactError, SelectionError
from headwise.frames import frame
from headwise.heads import Head, format_heads, named_ranges, select_heads
from headwise.models.values import ModelInfo, PatchInfo, model_name
from headwise.provenance import TextInfo
from headwise.settings import changed, read_yaml, validated
from headwise.surgery.plan_settings import Compensate, Init, KvPolicy, Preset
from headwise.tables import Table, table, tables_html
from headwise.values import MOST_HEADS, Count, Empty

if TYPE_CHECKING:
    import pandas as pd

    from headwise.triaging.values import Triage

PLAN_SCHEMA = "headwise.plan/1"


_STATE_BYTES = 16  # float32 master, gradient and two AdamW moments a trained weight


class PlannedModel(BaseModel):
    """The model a plan was made for; its shape decides what the selection means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    fingerprint: str
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    layers: tuple[NonNegativeInt, ...] | None = None  # of a hybrid: the layers with attention

    @model_validator(mode="after")
    def _is_a_model(self) -> PlannedModel:
        if self.num_heads % self.num_kv_heads or self.num_layers * self.num_heads > MOST_HEADS:
            raise ValueError("no model has such counts of layers and heads")
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(f"layers: {len(self.layers)} numbers for {self.num_layers} layers")
        return self

    @property
    def shape(self) -> dict[str, Any]:
        """What the names of a selection are read by."""
        return {name: getattr(self, name) for name in ("num_layers", "num_heads", "layers")}

    @model_serializer
    def _without_all_layers(self) -> dict[str, object]:
        body = dict(self)
        return body if self.layers else {k: v for k, v in body.items() if k != "layers"}


def planned_model(model: ModelInfo) -> PlannedModel:
    """What a plan says of the model that it is for."""
    return PlannedModel(**{key: getattr(model, key) for key in PlannedModel.model_fields})


class PlanSummary(BaseModel):
    """Exact weight counts, memory and, for GQA, what happens to shared keys and values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int
    layers: int
    lowest_layer: int
    trainable_weights: int
    trainable_share: float | None
    training_state_bytes: int
    kv_groups: int
    kv_note: str | None = None
    compensation: str | None = None

    @property
    def told(self) -> dict[str, str]:
        """The summary as a person reads it."""
        share = self.trainable_share
        weights = f"{self.trainable_weights:,} weights" + (
            f" ({share:.2%} of the model)" if share else ""
        )
        return {
            "heads": f"{self.heads} in {self.layers} layers, the lowest {self.lowest_layer}",
            "to train": f"{weights}; {self.training_state_bytes / 1e6:,.1f} MB of training state",
            "keys and values": self.kv_note or "",
            "compensation": self.compensation or "",
        }

    @model_serializer(mode="wrap")
    def _without_empty_notes(
        self, handler: Callable[[object], dict[str, object]]
    ) -> dict[str, object]:
        body = handler(self)
        notes = ("kv_note", "compensation")
        return {key: value for key, value in body.items() if value is not None or key not in notes}


class SurgeryPlan(BaseModel):
    """Targets are operated on and trained; watched heads are frozen but reported on."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )

    schema_: Literal["headwise.plan/1"] = "headwise.plan/1"
    model: PlannedModel
    targets: str
    watched: str = ""
    healthy: str = ""  # where the control `random-heads` may choose from
    selection: str = ""
    init: Init = "xavier_normal"
    compensate: Literal["none", "mean"] = "none"
    kv_policy: KvPolicy = "whole-group"
    seed: NonNegativeInt = 42
    treatments: dict[str, str] = {}  # treatment: its heads; targets not named are reinitialised
    doses: dict[str, float] = {}  # amounts by head or by treatment, else the treatment's own
    bos: bool | None = None  # whether texts start with a BOS, as in the diagnosis
    sick: str = ""  # in the diagnosis: other texts and lengths may count other heads
    sinks: dict[str, NonNegativeInt] = {}  # where a head looks, if its sink is not the first token
    texts: TextInfo | None = None  # that it was made on
    summary: Annotated[PlanSummary | None, Empty] = None

    @model_serializer(mode="wrap")
    def _without_unknown_diagnosis(
        self, handler: Callable[[object], dict[str, object]]
    ) -> dict[str, object]:
        return {k: v for k, v in handler(self).items() if v or k not in ("sick", "sinks", "texts")}

    def __repr__(self) -> str:
        count = len(self.target_heads)
        heads = f"{count} head{'s' * (count != 1)}{self.targets and f': {self.targets[:60]}'}"
        return f"SurgeryPlan({model_name(self.model.id)}, {heads})"

    __str__ = __repr__

    @property
    def diagnosed(self) -> str:
        """Which count of sick heads the plan rests on; empty if it does not say."""
        if self.texts is None:
            return ""
        sick = len(self.heads_of(self.sick)) if self.sick else 0
        return (
            f"{sick} sick head{'s' * (sick != 1)} on {self.texts.name} ({self.texts.count} texts)"
        )

    @property
    def target_heads(self) -> list[Head]:
        """The heads that are operated on; none in the plan of an empty patch."""
        return self.heads_of(self.targets) if self.targets else []

    @property
    def watched_heads(self) -> list[Head]:
        """Frozen heads of the band that are reported on."""
        return self.heads_of(self.watched) if self.watched else []

    @property
    def healthy_heads(self) -> list[Head]:
        """Heads that the diagnosis found healthy and the plan does not touch."""
        return self.heads_of(self.healthy) if self.healthy else []

    @property
    def sink_positions(self) -> dict[Head, int]:
        """Where heads look whose sink is not the first token."""
        return {Head.parse(name): at for name, at in self.sinks.items()}

    def heads_of(self, selection: str) -> list[Head]:
        """The heads that a selection of layers and indices means in this model."""
        return select_heads(selection, **self.model.shape)

    def kv_groups(self) -> list[tuple[int, int]]:
        """(layer, key/value head) pairs whose k and v are operated on."""
        return operated_groups(
            self.target_heads, self.model.num_heads // self.model.num_kv_heads, self.kv_policy
        )

    def table(self) -> Table:
        """Targets, watched heads and what the plan would train."""
        named = (("targets", self.targets), ("watched", self.watched))
        rows = [(name, heads.replace(",", ", ")) for name, heads in named]  # lines break at blanks
        told = {} if self.summary is None else self.summary.told
        rows.append(("diagnosis", self.diagnosed))
        kept = [(name, value) for name, value in [*rows, *told.items()] if value]
        return table(f"plan for {model_name(self.model.id)}", ("", ""), kept)

    def to_frame(self) -> pd.DataFrame:
        """One row per target or watched head (needs pandas)."""
        return frame(
            [
                {"head": str(head), "layer": head.layer, "index": head.index, "role": role}
                for role, heads in (("target", self.target_heads), ("watched", self.watched_heads))
                for head in heads
            ]
        )

    def _repr_html_(self) -> str:
        return tables_html([self.table()])

    def save(self, path: Path) -> Path:
        """Write `plan.yaml`."""
        body = self.model_dump(by_alias=False)
        body = {"schema": body.pop("schema_"), **body}
        return write_text(path, yaml.safe_dump(body, sort_keys=False, allow_unicode=True))

    @staticmethod
    def load(path: Path) -> SurgeryPlan:
        """Read `plan.yaml`; an unknown key is an error that names the nearest known one."""
        body = read_yaml(path)
        if body.get("schema") != PLAN_SCHEMA:
            raise ArtefactError(f"not a plan: expected schema {PLAN_SCHEMA}", where=path)
        body["schema_"] = body.pop("schema")
        plan = validated(SurgeryPlan, body, path)
        _ = plan.target_heads, plan.watched_heads  # a wrong selection is told here, not later
        return plan


def operated_groups(targets: Iterable[Head], group: int, policy: KvPolicy) -> list[tuple[int, int]]:
    """Key/value heads that belong to the operation: all of their query heads are targets."""
    chosen = set(targets)
    if policy == "queries-only":
        return []
    groups = sorted({(head.layer, head.index // group) for head in chosen})
    return [
        (layer, kv)
        for layer, kv in groups
        if all(Head(layer, kv * group + i) in chosen for i in range(group))
    ]


def make_plan(
    source: Diagnosis | Triage,
    *,
    heads: str | None = None,
    preset: Preset | None = None,
    column: int | None = None,
    init: Init = "xavier_normal",
    compensate: Compensate = "none",
    kv_policy: KvPolicy = "whole-group",
    seed: int = 42,
    measures: Mapping[str, Float[np.ndarray, "layer head"]] | None = None,
) -> SurgeryPlan:
    """A plan from a diagnosis, or a triage with its classes: either a selection or a preset.

    `measures` are maps that the selection may name besides those of the diagnosis.
    """
    diagnosis = source if isinstance(source, Diagnosis) else source.diagnosis
    if heads and preset and preset != "pass2":
        raise SelectionError("both heads and a preset are given", fix="choose one of them")
    selection = heads or preset_selection(diagnosis, preset, column)
    model = diagnosis.model
    planned = planned_model(model)
    shape, sets = planned.shape, source.head_sets()
    if model.positions != "alibi":
        _refuse_band(selection, model)
    maps = {**diagnosis.maps, **(measures or {})}
    targets = select_heads(selection, **shape, sets=sets, maps=maps)
    if not targets:
        raise SelectionError(
            f"no head matches {selection!r}",
            where=model.id,
            fix=f"the diagnosis counts {diagnosis.counts['sick']} sick heads; "
            "leave a healthy model alone, or choose heads by a measure",
        )
    zone = named_ranges(selection, **shape) or (sets["band"] if model.positions == "alibi" else [])
    watched = [] if preset == "pass2" else [h for h in zone if h not in set(targets)]
    groups = operated_groups(targets, model.group, kv_policy)
    body = {
        "model": planned,
        "targets": format_heads(targets),
        "watched": format_heads(watched),
        "healthy": format_heads(set(sets["healthy"]) - set(targets)),
        "selection": selection,
        "init": init,
        "compensate": compensate,
        "kv_policy": kv_policy,
        "seed": seed,
        "bos": None if (found := diagnosis.provenance.settings) is None else found.bos,
        "sick": format_heads(sets["sick"]),
        "sinks": {str(head): at for head, at in diagnosis.sinks.items()},
        "texts": diagnosis.provenance.texts,
        "summary": _summary(model, targets, groups, compensate),
    }
    return validated(SurgeryPlan, body, "the given options")


def _refuse_band(selection: str, model: ModelInfo) -> None:
    if re.search(r"\bband\b", selection):
        raise SelectionError(
            f"`band` means nothing with {model.positions} positions: only ALiBi gives a head index "
            "the same slope in every layer",
            where=model.id,
            fix="use --heads sick",
        )


def preset_selection(diagnosis: Diagnosis, preset: Preset | None, column: int | None) -> str:
    """What a preset selects in this diagnosis."""
    if preset is None:
        raise SelectionError("no heads chosen", fix="pass --heads SELECTION or --preset pass1")
    if preset != "column":
        banded = preset == "pass1" and diagnosis.model.positions == "alibi"
        return "band & sick" if banded else "sick"
    if column is None:
        raise SelectionError("the preset `column` needs a head index", fix="add --column 5")
    layers = sorted({head.layer for head in diagnosis.head_sets()["sick"]})
    if not layers:
        raise SelectionError("no sick layer: the preset `column` has nothing to go by")
    band = "band & sick" if diagnosis.model.positions == "alibi" else "sick"
    return f"({band}), L{layers[0]}-{layers[-1]}H{column}"


def _summary(
    model: ModelInfo, targets: list[Head], groups: list[tuple[int, int]], compensate: str
) -> PlanSummary:
    weights = trainable_weights(model, len(targets), len(groups))
    total = model.num_parameters
    whole = model.group * len(groups)
    kv_note = (
        f"{whole} of {len(targets)} targets lie in whole groups: their keys and values are "
        f"operated on too; the other {len(targets) - whole} change queries and output only"
    )
    folded = "the heads' mean outputs are folded into the output bias"
    return PlanSummary(
        heads=len(targets),
        layers=len({head.layer for head in targets}),
        lowest_layer=min(head.layer for head in targets),
        trainable_weights=weights,
        trainable_share=None if not total else weights / total,
        training_state_bytes=weights * _STATE_BYTES,
        kv_groups=len(groups),
        kv_note=kv_note if model.group > 1 else None,
        compensation=folded if compensate == "mean" else None,
    )


def trainable_weights(model: ModelInfo, heads: int, groups: int) -> int:
    """Weights of the slices: q and o of every head, k and v of every operated group."""
    if model.head_dim is None or model.hidden_size is None:
        raise SelectionError(
            "the diagnosis does not say how wide the heads are",
            where=model.id,
            fix="diagnose the model itself; a published map of unknown size cannot be planned on",
        )
    if model.slice_weights is not None:
        q, k, v, o = model.slice_weights
        return heads * (q + o) + groups * (k + v)
    row = model.head_dim * model.hidden_size
    bias = model.head_dim if model.qkv_bias else 0
    return heads * (2 * row + bias) + groups * 2 * (row + bias)


def plans_of(patches: Iterable[PatchInfo]) -> list[SurgeryPlan]:
    """The plans that descriptions of patches carry, pass by pass; an empty patch has none."""
    plans = [validated(SurgeryPlan, patch.plan, "a patch") for patch in patches if patch.plan]
    return [plan for plan in plans if plan.targets]


def operated_heads(patches: Iterable[PatchInfo]) -> list[Head]:
    """The targets of all plans in a list of patch descriptions."""
    return sorted({head for plan in plans_of(patches) for head in plan.target_heads})


def join_plans(plans: Sequence[SurgeryPlan]) -> SurgeryPlan:
    """One plan for the zones of several passes: a head operated on in any pass is operated on."""
    targets = {head for plan in plans for head in plan.target_heads}
    watched = set(plans[0].watched_heads) - targets
    return changed(plans[-1], targets=format_heads(targets), watched=format_heads(watched))
