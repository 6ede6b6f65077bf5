"""A diagnosis as a value: maps, classes and what is made of them. No model, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from headwise.alarms import Alarm
from headwise.artefacts import load_artefact, save_artefact
from headwise.diagnosis.bimodality import ThresholdSweep, threshold_sweep
from headwise.diagnosis.roles import ROLES, role_grid
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.symptoms import SYMPTOMS, Symptom, heads_by_symptom
from headwise.heads import Head, heads_where
from headwise.models.values import ModelInfo
from headwise.provenance import Provenance
from headwise.values import (
    BucketArray,
    Empty,
    Finite,
    HeadArray,
    PooledArray,
    from_plain,
    plain_fields,
    to_plain,
)

if TYPE_CHECKING:
    import pandas as pd

HeadClass = Literal["healthy", "low_entropy", "sink", "dead"]
CLASSES: tuple[HeadClass, ...] = ("healthy", "low_entropy", "sink", "dead")
SICK: tuple[HeadClass, ...] = ("dead", "sink")
MASS = "first_token_mass"
BAND_SHARE = 0.3  # a head index belongs to the band if more than this share of layers is sick
Classes = tuple[tuple[HeadClass, ...], ...]  # [layer][head]


@dataclass(frozen=True)
class Profile:
    """First-token mass by query position: bucket b holds queries start[b] .. stop[b] - 1."""

    bucket_start: tuple[int, ...]
    bucket_stop: tuple[int, ...]
    num_queries: tuple[int, ...]
    first_token_mass: BucketArray = field(repr=False)


@dataclass(frozen=True)
class Pooled:
    """Each head's attention pooled into query x key buckets: a picture of any length."""

    bucket_start: tuple[int, ...]
    bucket_stop: tuple[int, ...]
    maps: PooledArray = field(repr=False)


@dataclass(frozen=True)
class SinkRate:
    """Share of (text, layer, head) above epsilon (Gu et al. 2410.10781)."""

    epsilon: Finite
    value: Finite


@dataclass(frozen=True)
class Dormancy:
    """Dormant MLP neurons by one rule."""

    rule: str
    share: Finite
    num_dormant: int
    num_neurons: int
    share_by_layer: tuple[Finite, ...] = field(repr=False)


@dataclass(frozen=True)
class Wakers:
    """How awake one head is: on the whole, by kind of token, by token, and along one text."""

    base: Finite  # mean of 1 - mass on the sink, over all queries but the first
    kinds: Mapping[str, Finite]
    tokens: tuple[tuple[str, Finite, int], ...] = field(repr=False)  # token, mean, times seen
    text: tuple[Finite, ...] = field(repr=False)


@dataclass(frozen=True)
class Waking:
    """What wakes each sick head, and the text along which it is shown."""

    tokens: tuple[str, ...] = field(repr=False)
    heads: Mapping[str, Wakers] = field(repr=False)


@dataclass(frozen=True)
class Diagnosis:
    """Every head's measures and class, with what produced them."""

    model: ModelInfo
    maps: Mapping[str, HeadArray] = field(repr=False)
    classes: Classes = field(repr=False)
    thresholds: Thresholds = field(default_factory=Thresholds)
    spread: Mapping[str, HeadArray] = field(default_factory=dict, repr=False)
    profile: Annotated[Profile | None, Empty] = field(default=None, repr=False)
    pooled: Annotated[Pooled | None, Empty] = field(default=None, repr=False)
    sink_rate: Annotated[SinkRate | None, Empty] = None
    mlp_dormancy: Dormancy | None = field(default=None, repr=False)
    waking: Waking | None = field(default=None, repr=False)  # of the sick heads
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    alarms: tuple[Alarm, ...] = ()

    def __post_init__(self) -> None:
        if MASS not in self.maps:
            raise ValueError(f"maps: {MASS} is missing")
        grids = [("maps", m) for m in self.maps.values()]
        grids += [("spread", m) for m in self.spread.values()]
        grids += [("profile", self.profile.first_token_mass)] if self.profile else []
        grids += [("pooled", self.pooled.maps)] if self.pooled else []
        shapes = [(name, grid.shape[:2]) for name, grid in grids]
        shapes += [("classes", (len(self.classes), len(row))) for row in self.classes or [()]]
        for name, shape in shapes:
            if shape != self.model.shape:
                raise ValueError(f"{name}: {shape} heads, the model has {self.model.shape}")

    def __repr__(self) -> str:
        counts, on = self.counts, self.provenance.basis
        sick = f"{counts['sick']} of {counts['total']} heads sick"
        return f"Diagnosis({self.model.short_name}, {sick}{on and f' on {on}'})"

    @property
    def counts(self) -> dict[str, int]:
        """Heads in each class, and `sick` = dead + sink, and `total`."""
        heads = Counter(name for row in self.classes for name in row)
        counts: dict[str, int] = {name: heads[name] for name in CLASSES}
        return {**counts, "sick": sum(counts[c] for c in SICK), "total": sum(counts.values())}

    @property
    def sick(self) -> Bool[np.ndarray, "layer head"]:
        """Which heads are dead or sinks."""
        return np.isin(np.array(self.classes), SICK)

    @property
    def sick_share_by_index(self) -> tuple[float, ...]:
        """For each head index, the share of layers in which that head is sick."""
        return tuple(float(share) for share in self.sick.mean(0))

    @property
    def band(self) -> tuple[int, ...]:
        """Head indices that are sick in more than 30% of the layers (the paper's code rule)."""
        shares = enumerate(self.sick_share_by_index)
        return tuple(index for index, share in shares if share > BAND_SHARE)

    @property
    def band_heads(self) -> list[Head]:
        """Heads of the band: its indices, in the layers from the first to the last sick one."""
        layers = np.flatnonzero(self.sick.any(1))
        mask = np.zeros_like(self.sick)
        if len(layers):
            mask[layers[0] : layers[-1] + 1, list(self.band)] = True
        return heads_where(mask, self.model.layers)

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """[layer][head] of the role each head plays most; empty where roles were not measured."""
        return role_grid(self.maps, self.thresholds.role)

    @property
    def threshold_sweep(self) -> ThresholdSweep:
        """How far the sick count depends on the threshold, and whether there is a valley at all."""
        return threshold_sweep(self.maps[MASS])

    def head_sets(self) -> dict[str, list[Head]]:
        """What the words of a selection mean for this model."""
        names = np.array(self.classes)
        layers = self.model.layers
        sets: dict[str, list[Head]] = {n: heads_where(names == n, layers) for n in CLASSES}
        if self.roles:
            played = np.array(self.roles)
            sets |= {role.name: heads_where(played == role.name, layers) for role in ROLES}
        sets |= {"sick": heads_where(self.sick, layers), "band": self.band_heads}
        symptoms = heads_by_symptom(self.maps, sets, layers)
        return {**sets, "ill": sorted({head for heads in symptoms.values() for head in heads})}

    @property
    def symptoms(self) -> dict[str, list[Head]]:
        """The heads with each symptom of the table in `symptoms.py`."""
        return self.with_symptoms(SYMPTOMS)

    def with_symptoms(self, rows: Sequence[Symptom]) -> dict[str, list[Head]]:
        """The heads with each of some symptoms."""
        return heads_by_symptom(self.maps, self.head_sets(), self.model.layers, rows)

    @property
    def sinks(self) -> dict[Head, int]:
        """Where each head with a sink that is not on the first token looks instead."""
        position = self.maps.get("strongest_position")
        rows = self.model.layer_numbers
        heads = self.symptoms.get("fixed sink", [])
        if position is None:
            return {}
        means = {head: position[rows.index(head.layer), head.index] for head in heads}
        return {head: max(1, round(mean - 0.01)) for head, mean in means.items()}  # 1.5 is 1

    def class_of(self, head: Head) -> HeadClass:
        """The class of one head."""
        return self.classes[self.model.layer_numbers.index(head.layer)][head.index]

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, class and every measure (needs pandas)."""
        from headwise.frames import head_frame

        return head_frame(self.maps, {"class": self.classes}, self.model.layer_numbers)

    def to_json(self) -> dict[str, Any]:
        """The body of `diagnosis.json`."""
        derived = {
            "counts": self.counts,
            "band": {
                "indices": self.band,
                "sick_share_by_index": self.sick_share_by_index,
                "rule": f"sick in more than {BAND_SHARE:.0%} of the layers",
            },
            "threshold_sweep": self.threshold_sweep,
            "max_logit": self.maps.get("max_logit"),
        }
        body = {**plain_fields(self), **to_plain(derived)}
        return {k: {} if v is None and k in _EMPTY else v for k, v in body.items()}

    def save(self, path: Path) -> Path:
        """Write `diagnosis.json`."""
        return save_artefact(path, "diagnosis", self.to_json())

    @staticmethod
    def load(path: Path) -> Diagnosis:
        """Read `diagnosis.json`."""
        return Diagnosis.from_json(load_artefact(path, "diagnosis"), path)

    @staticmethod
    def from_json(body: Mapping[str, Any], where: object = "a diagnosis") -> Diagnosis:
        """Rebuild a diagnosis from the body of its artefact."""
        return from_plain(Diagnosis, body, where)

    def _repr_html_(self) -> str:
        from headwise.diagnosis.view import grid_html

        return grid_html(self)


_EMPTY = ("profile", "pooled", "sink_rate")  # written as {} where a published map has none


def classify(
    first_token_mass: Float[np.ndarray, "layer head"],
    entropy: Float[np.ndarray, "layer head"] | None,
    thresholds: Thresholds,
) -> Classes:
    """dead, else sink, else low_entropy, else healthy; without entropy nobody is low_entropy."""
    names = np.full(first_token_mass.shape, "healthy", dtype=object)
    if entropy is not None:
        names[entropy < thresholds.low_entropy] = "low_entropy"
    names[first_token_mass > thresholds.sink] = "sink"
    names[first_token_mass > thresholds.dead] = "dead"
    return tuple(tuple(row) for row in names)


def diagnosis_from(
    *,
    model: ModelInfo,
    maps: Mapping[str, Float[np.ndarray, "layer head"]],
    thresholds: Thresholds,
    **rest: Any,
) -> Diagnosis:
    """A diagnosis from maps alone: `first_token_mass` is needed, `entropy` is welcome.

    What a learned sink takes counts with the first token's mass: both are attention that reads
    nothing.
    """
    mass = maps[MASS] + maps.get("learned_sink_share", 0.0)
    classes = classify(mass, maps.get("entropy"), thresholds)
    return Diagnosis(model=model, maps=maps, classes=classes, thresholds=thresholds, **rest)
