"""Alarms of a film: a head's trend with a confidence, and when it will cross its limit.

A measure is read as a random walk with a drift that may itself grow, on a scale where growth is
straight (log-odds of a mass, logarithm of a logit). A window of readings gives the drift at its end
and, from how unevenly the walk goes, its standard error; a smooth but driftless walk is no trend. A
head is an alarm if its drift is above zero with the asked confidence over *all* heads (Bonferroni),
and if even the lower end of the drift carries it over its limit within `horizon` windows, though it
does not accelerate further. One reading never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.alarms import Alarm
from headwise.values import Count, Finite

HeadValues = Float[np.ndarray, "layer head"]


@dataclass(frozen=True)
class TrendRule:
    """One row: which measure, on which scale, over which limit, judged on how many readings."""

    kind: str
    measure: str
    scale: str  # log-odds or log
    limit: Finite
    floor: Finite = 0.0  # below it growth is no news
    readings: Count = 8  # of a window
    confidence: Finite = 0.99  # that no head of a reading is called by chance
    horizon: Finite = 2.0  # windows ahead


RULES = (
    TrendRule("collapse", "first_token_mass", "log-odds", limit=0.5),
    TrendRule("runaway-max-logit", "max_logit", "log", limit=100.0, floor=20.0),  # QK-clip's limit
)


@dataclass(frozen=True)
class HeadAlarm:
    """One head on its way over a limit: where it is, how fast it goes, how sure that is."""

    kind: str
    head: str
    step: int
    value: Finite
    slope: Finite  # of the measure itself, per 100 steps
    confidence: Finite  # that the drift is above zero, all heads considered
    limit: Finite
    expected_step: int  # at which it crosses the limit if it goes on so

    @property
    def alarm(self) -> Alarm:
        """The sentence for people."""
        measure = "first-token mass" if self.kind == "collapse" else "largest logit"
        return Alarm(
            self.kind,
            f"{self.head} at step {self.step}: {measure} {self.value:.3g}, {self.slope:+.2g} per "
            f"100 steps (confidence {self.confidence:.4f}); over {self.limit:g} by step "
            f"{self.expected_step} if it goes on",
        )


def scaled(values: Float[np.ndarray, "*any"], scale: str) -> Float[np.ndarray, "*any"]:
    """A measure where growth is straight; what cannot be there is held at the edge."""
    if scale == "log-odds":
        held = np.clip(values, 1e-4, 1 - 1e-4)
        return np.asarray(np.log(held) - np.log1p(-held))
    return np.asarray(np.log(np.clip(values, 1e-2, None)))


def drift_of(
    steps: Sequence[int], walk: Float[np.ndarray, "reading layer head"]
) -> tuple[HeadValues, HeadValues, HeadValues]:
    """Drift per step at the last reading of walks read at uneven steps, its error and p-value.

    Moves per step are fitted by a straight line over steps, each weighted by the steps it took: of
    a walk their variance is the diffusion over that number.
    """
    gaps = np.diff(steps).astype(float)
    rates = np.diff(walk, axis=0).reshape(len(gaps), -1) / gaps[:, None]
    middle = np.cumsum(gaps) - gaps / 2
    design = np.stack([np.ones_like(middle), middle - gaps.sum()], 1)
    inverse = np.linalg.inv(design.T @ (design * gaps[:, None]))
    fitted = inverse @ (design.T @ (rates * gaps[:, None]))
    left = gaps[:, None] * np.square(rates - design @ fitted)
    free = len(gaps) - 2
    error = np.sqrt(left.sum(0) / free * inverse[0, 0]) + 1e-12
    shape = walk.shape[1:]
    from scipy.stats import t as student  # late: slow to load

    p_value = student.sf(fitted[0] / error, free)
    return fitted[0].reshape(shape), error.reshape(shape), p_value.reshape(shape)


def rule_alarms(
    rule: TrendRule,
    steps: Sequence[int],
    values: Float[np.ndarray, "reading layer head"],
    names: Sequence[Sequence[str]],
) -> list[HeadAlarm]:
    """The heads that a rule calls at the last reading."""
    if len(steps) < rule.readings:
        return []
    walk, limit = scaled(values, rule.scale), float(scaled(np.array(rule.limit), rule.scale))
    slope, error, p_value = drift_of(steps, walk)
    chance = np.minimum(1.0, p_value * p_value.size)  # Bonferroni over heads
    from scipy.stats import t as student  # late: slow to load

    # Below the limit now, drifting up for sure, and over the limit soon even at the slowest drift.
    slowest = slope - float(student.ppf(0.95, len(steps) - 3)) * error
    ahead = rule.horizon * (steps[-1] - steps[0])
    called = (walk[-1] + slowest * ahead > limit) & (walk[-1] <= limit)
    called &= (chance < 1 - rule.confidence) & (values[-1] >= rule.floor)
    per_step = (values[-1] - values[0]) / (steps[-1] - steps[0])
    return [
        HeadAlarm(
            rule.kind,
            names[row][head],
            steps[-1],
            float(values[-1, row, head]),
            float(100 * per_step[row, head]),
            float(1 - chance[row, head]),
            rule.limit,
            steps[-1] + int(np.ceil((limit - walk[-1, row, head]) / slope[row, head])),
        )
        for row, head in np.argwhere(called)
    ]
