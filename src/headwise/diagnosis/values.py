"""A diagnosis as a value: maps, classes and what is made of them. No model, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import gaussian_kde

from headwise.artefacts import load_artefact, save_artefact
from headwise.heads import Head, HeadMap, heads_where

CLASSES = ("healthy", "low_entropy", "sink", "dead")


SWEEP = (0.40, 0.50, 0.60)


MODE_SHARE = 0.05  # a mode holds at least this share of the heads


BAND_SHARE = 0.3  # a head index belongs to the band if more than this share of layers is sick


@dataclass(frozen=True)
class Thresholds:
    """Where the classes begin: mass of the first token, and entropy in nats."""

    dead: float = 0.95
    sink: float = 0.50
    low_entropy: float = 0.50


@dataclass(frozen=True)
class Diagnosis:
    """Every head's measures and class, with what produced them."""

    model: Mapping[str, Any]
    maps: Mapping[str, Float[np.ndarray, "layer head"]] = field(repr=False)
    classes: tuple[tuple[str, ...], ...] = field(repr=False)
    thresholds: Thresholds = field(default_factory=Thresholds)
    spread: Mapping[str, Float[np.ndarray, "layer head"]] = field(default_factory=dict, repr=False)
    profile: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pooled: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sink_rate: Mapping[str, Any] = field(default_factory=dict)
    mlp_dormancy: Mapping[str, Any] | None = field(default=None, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """Heads in each class, and `sick` = dead + sink, and `total`."""
        found = Counter(name for row in self.classes for name in row)
        counts = {name: found[name] for name in CLASSES}
        return {**counts, "sick": counts["dead"] + counts["sink"], "total": sum(counts.values())}

    @property
    def sick(self) -> Bool[np.ndarray, "layer head"]:
        """Which heads are dead or sinks."""
        return np.isin(np.array(self.classes), ("dead", "sink"))

    @property
    def band(self) -> dict[str, Any]:
        """Head indices that are sick in more than 30% of the layers (the paper's code rule)."""
        share = self.sick.mean(0)
        return {
            "indices": [int(i) for i in np.flatnonzero(share > BAND_SHARE)],
            "sick_share_by_index": [float(value) for value in share],
            "rule": f"sick in more than {BAND_SHARE:.0%} of the layers",
        }

    @property
    def band_heads(self) -> list[Head]:
        """Heads of the band: its indices, in the layers from the first to the last sick one."""
        layers = np.flatnonzero(self.sick.any(1))
        mask = np.zeros_like(self.sick)
        if len(layers):
            mask[layers[0] : layers[-1] + 1, self.band["indices"]] = True
        return heads_where(mask)

    @property
    def threshold_sweep(self) -> dict[str, Any]:
        """How far the sick count depends on the threshold, and whether there is a valley at all."""
        return threshold_sweep(self.maps["first_token_mass"])

    def head_sets(self) -> dict[str, list[Head]]:
        """What the words of a selection mean for this model."""
        names = np.array(self.classes)
        sets = {name: heads_where(names == name) for name in CLASSES}
        return {**sets, "sick": heads_where(self.sick), "band": self.band_heads}

    def map(self, name: str) -> HeadMap:
        """One measure as a `HeadMap`."""
        return HeadMap(name, self.maps[name])

    def to_json(self) -> dict[str, Any]:
        """The body of `diagnosis.json`."""
        return {
            "model": dict(self.model),
            "maps": {name: value.tolist() for name, value in self.maps.items()},
            "spread": {name: value.tolist() for name, value in self.spread.items()},
            "profile": dict(self.profile),
            "pooled": dict(self.pooled),
            "classes": [list(row) for row in self.classes],
            "counts": self.counts,
            "thresholds": asdict(self.thresholds),
            "threshold_sweep": self.threshold_sweep,
            "sink_rate": dict(self.sink_rate),
            "band": self.band,
            "mlp_dormancy": self.mlp_dormancy,
            "provenance": dict(self.provenance),
        }

    def save(self, path: Path) -> Path:
        """Write `diagnosis.json`."""
        return save_artefact(path, "diagnosis", self.to_json())

    @staticmethod
    def load(path: Path) -> Diagnosis:
        """Read `diagnosis.json`."""
        return Diagnosis.from_json(load_artefact(path, "diagnosis"))

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Diagnosis:
        """Rebuild a diagnosis from the body of its artefact."""
        return Diagnosis(
            model=body["model"],
            maps={name: np.array(value, dtype=float) for name, value in body["maps"].items()},
            classes=tuple(tuple(row) for row in body["classes"]),
            thresholds=Thresholds(**body["thresholds"]),
            spread={name: np.array(value) for name, value in body["spread"].items()},
            profile=body["profile"],
            pooled=body.get("pooled", {}),
            sink_rate=body["sink_rate"],
            mlp_dormancy=body["mlp_dormancy"],
            provenance=body["provenance"],
        )

    def _repr_html_(self) -> str:
        from headwise.diagnosis.notebook import grid_html

        return grid_html(self)


def classify(
    first_token_mass: Float[np.ndarray, "layer head"],
    entropy: Float[np.ndarray, "layer head"] | None,
    thresholds: Thresholds,
) -> tuple[tuple[str, ...], ...]:
    """dead, else sink, else low_entropy, else healthy; without entropy nobody is low_entropy."""
    names = np.full(first_token_mass.shape, "healthy", dtype=object)
    if entropy is not None:
        names[entropy < thresholds.low_entropy] = "low_entropy"
    names[first_token_mass > thresholds.sink] = "sink"
    names[first_token_mass > thresholds.dead] = "dead"
    return tuple(tuple(row) for row in names)


def diagnosis_from(
    *,
    model: Mapping[str, Any],
    maps: Mapping[str, Float[np.ndarray, "layer head"]],
    thresholds: Thresholds,
    **rest: Any,
) -> Diagnosis:
    """A diagnosis from maps alone: `first_token_mass` is needed, `entropy` is welcome."""
    classes = classify(maps["first_token_mass"], maps.get("entropy"), thresholds)
    return Diagnosis(model=model, maps=maps, classes=classes, thresholds=thresholds, **rest)


def threshold_sweep(mass: Float[np.ndarray, "layer head"]) -> dict[str, Any]:
    """Sick counts at 0.40, 0.50 and 0.60, the share between, and the valley of the histogram."""
    return {
        "counts": {f"{cut:.2f}": int((mass > cut).sum()) for cut in SWEEP},
        "share_between_0.4_and_0.6": float(((mass > 0.4) & (mass <= 0.6)).mean()),
        "valley": _valley(mass.ravel()),
    }


def _valley(values: Float[np.ndarray, head]) -> dict[str, Any]:
    """Deepest dip of a kernel density below the highest points on both sides: 1 empty, 0 no dip.

    Each side must hold 5% of the heads, or one stray head in a tail would pass for a mode.
    """
    none: dict[str, Any] = {"depth": 0.0, "position": None, "modes": []}
    if values.std() < 1e-6:
        return none
    grid = np.linspace(0, 1, 201)
    density = gaussian_kde(values)(grid)
    left = np.maximum.accumulate(density)
    right = np.maximum.accumulate(density[::-1])[::-1]
    below = (values[None] <= grid[:, None]).mean(1)
    sided = np.minimum(below, 1 - below) >= MODE_SHARE
    depth = np.where(sided, 1 - density / np.maximum(np.minimum(left, right), 1e-12), 0.0)
    lowest = int(np.argmax(depth))
    if depth[lowest] <= 0:
        return none
    modes = [grid[np.argmax(density[:lowest])], grid[lowest + np.argmax(density[lowest:])]]
    return {
        "depth": float(depth[lowest]),
        "position": float(grid[lowest]),
        "modes": [float(mode) for mode in modes],
    }
