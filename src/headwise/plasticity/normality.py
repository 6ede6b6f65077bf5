"""How normal the queries are: skew, excess kurtosis, and two Kolmogorov-Smirnov tests.

The seed standardises a sample by its own mean and deviation and then asks scipy for the p-value of
a *given* normal; that p is far too large (it hardly ever rejects). The same distance D is kept and
a second, valid p-value is put beside it: Lilliefors' test, which allows for the two estimates.
Both assume independent rows; tokens of one document are not, so read p as a lower bound on doubt.

Invariant: `ks_distance` is the exact distance, though it evaluates few normal CDFs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr
from scipy.stats import kstwo

# Upper quantiles of D (sqrt(n) - 0.01 + 0.85 / sqrt(n)) under the null with estimated mean and
# deviation; Stephens (1974) found this scaling free of n. 10^6 samples of n = 200,
# numpy default_rng(20240601); his table has 0.819, 0.895, 0.955, 1.035 at p = 0.1 ... 0.01.
_LILLIEFORS_P = (
    *(0.999, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15),
    *(0.1, 0.05, 0.025, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001),
)


_LILLIEFORS_D = (
    *(0.318, 0.367, 0.4208, 0.4545, 0.5008, 0.5383, 0.5732, 0.6084, 0.6461, 0.6894, 0.7436, 0.7788),
    *(0.826, 0.898, 0.9661, 1.0482, 1.1051, 1.1766, 1.2267, 1.2759, 1.3348, 1.3747),
)


# Beyond the table p falls like exp(-D^2 / 2s), s = 1/4 - 1/(2 pi) the variance at the median.
_TAIL = 1 / (2 * (0.25 - 1 / (2 * np.pi)))


_COARSE = 32  # every 32nd point is looked at first


# Too few rows or components to describe: nothing speaks against a normal.
NO_NOISE = {
    "q_noise_med_abs_skew": 0.0,
    "q_noise_med_abs_kurt": 0.0,
    "q_noise_med_ks_p": 1.0,
    "q_noise_frac_ks_p_lt_alpha": 0.0,
    "q_noise_med_lilliefors_p": 1.0,
    "q_noise_frac_lilliefors_p_lt_alpha": 0.0,
}


def describe_sample(
    values: Float[np.ndarray, " row"], *, distance: bool = True
) -> tuple[float, float, float]:
    """Skew and excess kurtosis (both bias-corrected), and KS distance, of one standardised sample.

    A constant one is (nan, nan, 0.5 or more); a distance that is not asked for is nan.
    """
    centred = values - values.mean()
    n = len(centred)
    deviation = np.sqrt(centred @ centred / (n - 1))
    z = centred / (deviation if deviation > 0 else 1.0)
    squares = z * z
    m2, m3, m4 = squares.mean(), squares @ z / n, squares @ squares / n
    skew = kurtosis = float("nan")
    if m2 > 0:
        skew = float(m3 / m2**1.5 * np.sqrt(n * (n - 1)) / (n - 2)) if n > 2 else float(m3)
        kurtosis = float(m4 / m2**2 - 3)
        if n > 3:
            kurtosis = ((n + 1) * (kurtosis + 3) - 3 * (n - 1)) * (n - 1) / ((n - 2) * (n - 3))
    return skew, kurtosis, ks_distance(np.sort(z)) if distance else float("nan")


def ks_distance(ordered: Float[np.ndarray, " row"]) -> float:
    """The largest gap between the sample's step function and the normal CDF; input ascending.

    Both functions rise, so a stretch of points cannot beat the bound made from its two ends; only
    stretches whose bound exceeds the best gap seen at the coarse points are looked at in full.
    """
    n = len(ordered)
    coarse = np.append(np.arange(0, n - 1, _COARSE), n - 1)
    cdf = ndtr(ordered[coarse])
    best = _gap(cdf, coarse, n)
    low, high = coarse[:-1], coarse[1:]
    bound = np.maximum((high + 1) / n - cdf[:-1], cdf[1:] - low / n)
    open_ = np.flatnonzero(bound > best)
    if len(open_) == 0:
        return best
    points = (low[open_][:, None] + np.arange(_COARSE)).ravel()
    points = points[points < n]
    return max(best, _gap(ndtr(ordered[points]), points, n))


def _gap(cdf: Float[np.ndarray, " point"], rank: np.ndarray, n: int) -> float:
    return float(max(((rank + 1) / n - cdf).max(), (cdf - rank / n).max()))


def ks_p_values(
    distance: Float[np.ndarray, " sample"], num_rows: int
) -> Float[np.ndarray, " sample"]:
    """The seed's p: exact two-sided KS, as if mean and deviation had been known."""
    return np.asarray(np.clip(kstwo.sf(np.asarray(distance), num_rows), 0.0, 1.0))


def lilliefors_p_values(
    distance: Float[np.ndarray, " sample"], num_rows: int
) -> Float[np.ndarray, " sample"]:
    """Valid p for a normal of unknown mean and deviation, from a simulated table."""
    root = np.sqrt(num_rows)
    scaled = np.asarray(distance) * (root - 0.01 + 0.85 / root)
    p = np.exp(np.interp(scaled, _LILLIEFORS_D, np.log(_LILLIEFORS_P), left=0.0))
    last = _LILLIEFORS_D[-1]
    return np.asarray(np.where(scaled > last, p * np.exp(-_TAIL * (scaled**2 - last**2)), p))


def describe_noise(
    components: Iterable[Float[np.ndarray, " row"]],
    *,
    num_dims: int,
    num_rows: int,
    max_dims: int,
    alpha: float,
    seed: int,
) -> dict[str, float]:
    """Columns about `num_dims` semantic components; at most `max_dims` of them are tested.

    Medians over components, and shares of components that a test rejects.
    """
    if num_rows < 3 or num_dims < 1:
        return NO_NOISE
    count = min(max_dims, num_dims)
    tested = set(np.random.default_rng(seed).choice(num_dims, count, replace=False).tolist())
    shapes = [describe_sample(row, distance=i in tested) for i, row in enumerate(components)]
    distance = np.array([shapes[i][2] for i in sorted(tested)])
    ks, lilliefors = ks_p_values(distance, num_rows), lilliefors_p_values(distance, num_rows)
    return {
        "q_noise_med_abs_skew": _median([abs(skew) for skew, _, _ in shapes]),
        "q_noise_med_abs_kurt": _median([abs(kurtosis) for _, kurtosis, _ in shapes]),
        "q_noise_med_ks_p": float(np.median(ks)),
        "q_noise_frac_ks_p_lt_alpha": float(np.mean(ks < alpha)),
        "q_noise_med_lilliefors_p": float(np.median(lilliefors)),
        "q_noise_frac_lilliefors_p_lt_alpha": float(np.mean(lilliefors < alpha)),
    }


def _median(values: list[float]) -> float:
    """The median of what is defined: a constant component has no skew."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.median(defined)) if defined else float("nan")
