"""Intervals over documents: of a mean loss, and of the paired difference that a verdict rests on.

Tokens of one document are not independent, so documents are what is drawn. A loss per token is a
ratio (sum of losses / number of tokens), and the draw resamples both, so long documents weigh what
they weigh. A fixed number of draws, seeded: the same inputs, the same bytes.

`mean_interval` is the percentile bootstrap: it describes a loss or a perplexity. It is too narrow
for few documents, so whatever is called better or worse with 95% confidence rests on
`paired_interval` instead. How often each is wrong is in docs/method.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from headwise.values import Finite

DRAWS = 2000
LEVEL = 0.95
ERROR = 1 - LEVEL

# Documents below which nothing is called better or worse. With 4 of a skewed kind Student's
# interval says "better" falsely in 12% of cases, and the one below is six times as wide as with 16.
FEWEST = 8


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


def paired_interval(
    differences: Float[np.ndarray, "document"],
    tokens: Float[np.ndarray, "document"] | Int[np.ndarray, "document"],
    *,
    seed: int = 0,
    error: float = ERROR,
) -> Interval:
    """A difference per token that a verdict may rest on: see `paired_intervals`."""
    return paired_intervals(differences[None], tokens, seed=seed, error=error)[0]


def paired_intervals(
    differences: Float[np.ndarray, "row document"],
    tokens: Float[np.ndarray, "document"] | Int[np.ndarray, "document"],
    *,
    seed: int = 0,
    error: float = ERROR,
) -> list[Interval]:
    """Differences of summed loss between two conditions on the same tokens, one interval a row.

    On either side the wider of Student's t and the studentised bootstrap, in jackknife standard
    errors: documents differ in length, and a long one has more say than the linear formula knows.
    `error` is the chance to miss on both sides together. With fewer than FEWEST documents the
    interval is stretched to hold 0, so that no verdict can come of it.
    """
    count, total = len(tokens), tokens.sum()
    values = differences.sum(1) / total
    if count < 2:
        return [Interval(float(v), min(float(v), 0.0), max(float(v), 0.0)) for v in values]
    from scipy.stats import t as student  # late: slow to load

    residuals = differences - values[:, None] * tokens
    deviations = np.sqrt(
        np.square(residuals / np.maximum(total - tokens, 1)).sum(1) * (count - 1) / count
    )
    quantile = student.ppf(1 - error / 2, count - 1)
    low, high = _bootstrap_t(residuals, tokens, seed, error)
    lows = values - np.maximum(high, quantile) * deviations
    highs = values + np.maximum(-low, quantile) * deviations
    if count < FEWEST:
        lows, highs = np.minimum(lows, 0), np.maximum(highs, 0)
    return [
        Interval(float(v), float(a), float(b)) for v, a, b in zip(values, lows, highs, strict=True)
    ]


def _bootstrap_t(
    residuals: Float[np.ndarray, "row document"], tokens: np.ndarray, seed: int, error: float
) -> Float[np.ndarray, "2 row"]:
    """Both quantiles of t over bootstrap samples: the sample's own ratio over its own error."""
    count = len(tokens)
    weights = draw_documents(count, seed=seed)
    weights = weights[weights.max(1) < count].astype(float)  # one document alone has no error
    drawn = weights @ tokens
    ratios = (residuals @ weights.T) / drawn
    # sum of w (e - ratio c)^2, expanded: three products instead of rows x draws x documents
    power = np.square(residuals) @ weights.T
    power += np.square(ratios) * (weights @ np.square(tokens))
    power -= 2 * ratios * ((residuals * tokens) @ weights.T)
    deviations = np.sqrt(np.maximum(power, 0) * count / (count - 1)) / drawn
    # where the drawn documents agree exactly (one changed, the others not), t would be infinite
    least = 0.01 * np.sqrt(np.square(residuals).sum(1, keepdims=True)) / tokens.sum()
    scores = ratios / np.maximum(deviations, np.maximum(least, np.finfo(float).tiny))
    quantiles: Float[np.ndarray, "2 row"] = np.quantile(scores, [error / 2, 1 - error / 2], axis=1)
    return quantiles
