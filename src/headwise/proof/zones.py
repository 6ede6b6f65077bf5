"""Zones of a comparison: operated, watched and outside heads, and what moved in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.diagnosis.values import Diagnosis
from headwise.heads import Head, heads_where
from headwise.proof.trajectories import (
    Map,
    Mask,
)
from headwise.surgery.plan import SurgeryPlan

DRIFT = 0.05


def zone_masks(
    diagnosis: Diagnosis, plan: SurgeryPlan | None, *, whole_layers: bool = False
) -> dict[str, Mask]:
    """operated, watched (in the band, frozen), outside, and which heads could move at all."""
    shape = diagnosis.sick.shape
    masks = {name: np.zeros(shape, dtype=bool) for name in ("operated", "watched")}
    heads = {} if plan is None else {"operated": plan.target_heads, "watched": plan.watched_heads}
    for name, chosen in heads.items():
        for head in chosen:
            masks[name][head.layer, head.index] = True
    movable = np.ones(shape, dtype=bool)
    if plan is not None:
        lowest = min(head.layer for head in plan.target_heads)
        movable[:lowest] = False
        movable[lowest] = masks["operated"][lowest] | whole_layers
    outside = ~(masks["operated"] | masks["watched"])
    return {**masks, "outside": outside, "movable": movable}


def transitions(before: Diagnosis, after: Diagnosis, operated: Mask) -> dict[str, Any]:
    """Class changes: the table, and the heads that fell ill or healed without treatment."""
    pairs = [
        (x, y)
        for a, b in zip(before.classes, after.classes, strict=True)
        for x, y in zip(a, b, strict=True)
    ]
    table = Counter(pairs)
    was, now = before.sick, after.sick
    return {
        "table": [{"before": x, "after": y, "heads": n} for (x, y), n in sorted(table.items())],
        "counts_before": before.counts,
        "counts_after": after.counts,
        "iatrogenic": head_names(~was & now),
        "iatrogenic_untreated": head_names(~was & now & ~operated),
        "self_healed": head_names(was & ~now & ~operated),
        "treated_no_longer_sick": head_names(was & ~now & operated),
        "still_sick": head_names(was & now),
        "sick_untreated_after": head_names(now & ~operated),
    }


def head_names(mask: Mask) -> list[str]:
    """The names of the heads in a mask, in order."""
    return [str(head) for head in heads_where(mask)]


def drift_by_zone(delta: Map, zones: Mapping[str, Mask]) -> dict[str, Any]:
    """For each zone: heads with |delta| > 0.05, mean and worst, with the movable heads apart."""
    return {
        "threshold": DRIFT,
        **{
            name: _drift(delta, zones[name], zones["movable"])
            for name in ("operated", "watched", "outside")
        },
    }


def _drift(delta: Map, zone: Mask, movable: Mask) -> dict[str, Any]:
    size = np.abs(delta)
    both = zone & movable
    worst = Head(
        *(int(i) for i in np.unravel_index(np.argmax(np.where(zone, size, -1)), size.shape))
    )
    return {
        "heads": int(zone.sum()),
        "movable": int(both.sum()),
        "drifting": int((size[zone] > DRIFT).sum()),
        "mean_abs_delta": float(size[zone].mean()) if zone.any() else None,
        "mean_abs_delta_movable": float(size[both].mean()) if both.any() else None,
        "worst": {"head": str(worst), "delta": float(delta[worst.layer, worst.index])}
        if zone.any()
        else None,
    }
