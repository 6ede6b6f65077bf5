"""Intervals: the bootstrap over documents, for means and for paired differences.

Tokens of one document are not independent, so documents are what is drawn. A loss per token is a
ratio (sum of losses / number of tokens), and the draw resamples both, so long documents weigh what
they weigh. Percentile intervals, a fixed number of draws, seeded: the same inputs, the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from headwise.values import Finite

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    value: Finite
    low: Finite
    high: Finite

    def to_json(self) -> dict[str, float]:
        """For an artefact."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def exp(self) -> Interval:
        """From mean loss to perplexity."""
        return Interval(math.exp(self.value), math.exp(self.low), math.exp(self.high))


def draw_documents(
    num_documents: int, *, seed: int, draws: int = DRAWS
) -> Int[np.ndarray, "draw document"]:
    """How often each document is drawn in each bootstrap sample."""
    generator = np.random.default_rng([seed, num_documents])
    return generator.multinomial(num_documents, np.full(num_documents, 1 / num_documents), draws)


def mean_interval(
    sums: Float[np.ndarray, "document"],
    counts: Float[np.ndarray, "document"] | Int[np.ndarray, "document"],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> Interval:
    """The ratio sum(sums) / sum(counts) with its bootstrap interval over documents.

    For a paired difference pass the differences of the sums: both conditions saw the same tokens.
    """
    weights = draw_documents(len(sums), seed=seed, draws=draws)
    ratios = (weights @ sums) / np.maximum(weights @ counts, 1e-12)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def mean_intervals(
    sums: Float[np.ndarray, "row document"], counts: Int[np.ndarray, "document"], *, seed: int = 0
) -> list[Interval]:
    """One interval a row, all from the same draws."""
    weights = draw_documents(sums.shape[1], seed=seed)
    ratios = (sums @ weights.T) / np.maximum(weights @ counts, 1e-12)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    values = sums.sum(1) / counts.sum()
    return [
        Interval(float(v), float(a), float(b)) for v, a, b in zip(values, low, high, strict=True)
    ]
