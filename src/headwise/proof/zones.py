"""Zones of a comparison: operated, watched and outside heads, and what moved in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Bool, Float

from headwise.diagnosis.values import Diagnosis, HeadClass
from headwise.heads import Head, heads_where
from headwise.models.values import ModelInfo
from headwise.surgery.plan import SurgeryPlan
from headwise.values import Finite

DRIFT = 0.05
Map = Float[np.ndarray, "layer head"]
Mask = Bool[np.ndarray, "layer head"]


@dataclass(frozen=True)
class Zones:
    """Which heads were operated on, watched (in the band, frozen) or outside, and can move."""

    operated: Mask = field(repr=False)
    watched: Mask = field(repr=False)
    outside: Mask = field(repr=False)
    movable: Mask = field(repr=False)

    def named(self) -> dict[str, Mask]:
        """The three zones that share out the heads."""
        return {"operated": self.operated, "watched": self.watched, "outside": self.outside}


def zones_of(model: ModelInfo, plan: SurgeryPlan | None, *, whole_layers: bool = False) -> Zones:
    """The zones of a plan; `whole_layers`: the patch changes whole projections (lora)."""
    operated = head_mask([] if plan is None else plan.target_heads, model)
    watched = head_mask([] if plan is None else plan.watched_heads, model) & ~operated
    movable = np.ones(model.shape, dtype=bool)
    if operated.any():
        lowest = int(np.flatnonzero(operated.any(1))[0])
        movable[:lowest] = False
        movable[lowest] = operated[lowest] | whole_layers
    return Zones(operated, watched, ~(operated | watched), movable)


def head_mask(heads: list[Head], model: ModelInfo) -> Mask:
    """True at the given heads."""
    mask = np.zeros(model.shape, dtype=bool)
    for head in heads:
        mask[model.layer_numbers.index(head.layer), head.index] = True
    return mask


@dataclass(frozen=True)
class Transition:
    """How many heads went from one class to another."""

    before: HeadClass
    after: HeadClass
    heads: int


@dataclass(frozen=True)
class Transitions:
    """Class changes: the table, and the heads that fell ill or healed without treatment."""

    table: tuple[Transition, ...]
    counts_before: Mapping[str, int]
    counts_after: Mapping[str, int]
    iatrogenic: tuple[str, ...]
    iatrogenic_untreated: tuple[str, ...]
    self_healed: tuple[str, ...]
    treated_no_longer_sick: tuple[str, ...]
    still_sick: tuple[str, ...]
    sick_untreated_after: tuple[str, ...]


def transitions(before: Diagnosis, after: Diagnosis, operated: Mask) -> Transitions:
    """Class changes between two diagnoses of one model."""
    pairs = Counter(
        (x, y)
        for a, b in zip(before.classes, after.classes, strict=True)
        for x, y in zip(a, b, strict=True)
    )
    was, now = before.sick, after.sick
    names = partial(head_names, layers=before.model.layers)
    return Transitions(
        table=tuple(Transition(x, y, n) for (x, y), n in sorted(pairs.items())),
        counts_before=before.counts,
        counts_after=after.counts,
        iatrogenic=names(~was & now),
        iatrogenic_untreated=names(~was & now & ~operated),
        self_healed=names(was & ~now & ~operated),
        treated_no_longer_sick=names(was & ~now & operated),
        still_sick=names(was & now),
        sick_untreated_after=names(now & ~operated),
    )


_NO_ROLE = ("none", "first_token")  # resting on the first token is no work


def roles_played(
    before: Diagnosis, after: Diagnosis, heads: Mask
) -> dict[str, tuple[str, str]] | None:
    """What each of these heads does before and after, if anything; None where it is unknown."""
    if not before.roles or not after.roles:
        return None
    names = head_names(heads, before.model.layers)
    sides = (np.array(before.roles)[heads].tolist(), np.array(after.roles)[heads].tolist())
    pairs = {name: (was, now) for name, was, now in zip(names, *sides, strict=True)}
    return {
        name: ("" if was in _NO_ROLE else was, "" if now in _NO_ROLE else now)
        for name, (was, now) in pairs.items()
        if not {was, now} <= set(_NO_ROLE)
    }


def head_names(mask: Mask, layers: Sequence[int] | None = None) -> tuple[str, ...]:
    """The names of the heads in a mask, in order."""
    return tuple(str(head) for head in heads_where(mask, layers))


@dataclass(frozen=True)
class WorstHead:
    """The head that changed most."""

    head: str
    delta: Finite


@dataclass(frozen=True)
class ZoneDrift:
    """Change of first-token mass in one zone; means and worst are None of no head."""

    heads: int
    movable: int
    drifting: int
    mean_abs_delta: Finite | None
    mean_abs_delta_movable: Finite | None
    worst: WorstHead | None


@dataclass(frozen=True)
class DriftByZone:
    """Drift of the three zones, with the heads that can move counted apart."""

    threshold: Finite
    operated: ZoneDrift
    watched: ZoneDrift
    outside: ZoneDrift


def drift_by_zone(delta: Map, zones: Zones, layers: Sequence[int] | None = None) -> DriftByZone:
    """For each zone: heads with |delta| > 0.05, mean and worst, with the movable heads apart."""
    numbers = range(len(delta)) if layers is None else layers
    masks = (zones.operated, zones.watched, zones.outside)
    return DriftByZone(DRIFT, *(_drift(delta, mask, zones.movable, numbers) for mask in masks))


def _drift(delta: Map, zone: Mask, movable: Mask, layers: Sequence[int]) -> ZoneDrift:
    size, both = np.abs(delta), zone & movable
    row, index = np.unravel_index(int(np.argmax(np.where(zone, size, -1))), size.shape)
    worst = WorstHead(str(Head(layers[int(row)], int(index))), float(delta[row, index]))
    return ZoneDrift(
        heads=int(zone.sum()),
        movable=int(both.sum()),
        drifting=int((size[zone] > DRIFT).sum()),
        mean_abs_delta=float(size[zone].mean()) if zone.any() else None,
        mean_abs_delta_movable=float(size[both].mean()) if both.any() else None,
        worst=worst if zone.any() else None,
    )
