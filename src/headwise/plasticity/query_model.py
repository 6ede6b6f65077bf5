"""What is assumed about a head's queries: a mean and a covariance for every query bucket.

A query at bucket b prefers key 1 over key 2 when q.d > 0, d = k1 - k2. If q is normal with mean
mu_b and covariance S_b, that happens with probability Phi(m / sqrt(v)), m = mu_b.d, v = d'S_b d.
The definitions differ only in mu_b and S_b, so each is a `QueryModel`: means and factors F_b with
S_b = F_b F_b'. The rotation that singles out the positional direction is folded into them, so keys
are never rotated.

Invariant: with a full covariance the numbers do not depend on orientation or rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Shaped
from scipy import linalg

from headwise.plasticity.reader import VectorTable
from headwise.plasticity.settings import Definition

_PART = 512  # rows turned at a time: a transpose is quick inside the cache


FLOOR = 1e-12  # the seed's epsilon: added to a covariance, and the least variance


@dataclass(frozen=True)
class Rotation:
    """One head's line q = alpha + beta t, and the reflection that turns e1 onto its slope.

    H = I - 2 v v', with the first column's sign turned if `flip` is -1.
    """

    alpha: Float[np.ndarray, " dim"]
    beta: Float[np.ndarray, " dim"]
    r2: Float[np.ndarray, " dim"]  # of each component on position
    v: Float[np.ndarray, " dim"]
    flip: float
    along_axis: Float[np.ndarray, " row"]
    along_v: Float[np.ndarray, " row"]

    @property
    def axis(self) -> Float[np.ndarray, " dim"]:
        """The positional direction: the first column of H."""
        return reflection_axis(self.v, self.flip)

    def line(self, position: Shaped[np.ndarray, " any"]) -> Float[np.ndarray, " any"]:
        """Where the fitted line is along the axis."""
        axis = self.axis
        return np.asarray(axis @ self.alpha + (axis @ self.beta) * position)

    def components(self, queries: VectorTable) -> Iterator[Float[np.ndarray, " row"]]:
        """Components in the rotated basis, one after another: the whole is never in memory."""
        for index, component in enumerate(queries.vectors.T):
            rotated = component - (2 * self.v[index]) * self.along_v
            yield self.flip * rotated if index == 0 else rotated


@dataclass(frozen=True)
class QueryModel:
    """Mean and covariance factor of each bucket; one factor alone is shared by all buckets."""

    means: Float[np.ndarray, "dim bucket"]
    factors: tuple[Float[np.ndarray, "dim dim"], ...]  # lower triangular
    keep_identical: bool  # whether a pair of equal keys counts (as 1) or is left out

    def factor(self, index: int) -> Float[np.ndarray, "dim dim"]:
        """The factor of one bucket."""
        return self.factors[index if len(self.factors) > 1 else 0]


def sort_queries(table: VectorTable, signs: Float[np.ndarray, " dim"]) -> VectorTable:
    """Sort by bucket, orient, and lay the vectors out so that components are contiguous."""
    order = np.argsort(table.bucket, kind="stable")
    single = signs.astype(np.float32)
    vectors = np.empty(table.vectors.shape[::-1], dtype=np.float32)
    for begin in range(0, len(order), _PART):
        part = np.take(table.vectors, order[begin : begin + _PART], axis=0) * single
        vectors[:, begin : begin + _PART] = np.ascontiguousarray(part.T)
    return VectorTable(
        vectors.T, table.position[order], table.bucket[order], table.example[order], table.window
    )


def along(
    queries: VectorTable, directions: Float[np.ndarray, "k dim"]
) -> Float[np.ndarray, "k row"]:
    """Every query's product with some directions, in one pass."""
    product = np.empty((len(directions), len(queries.vectors)))
    for begin in range(0, product.shape[1], _PART):
        part = queries.vectors.T[:, begin : begin + _PART].astype(np.float64)
        product[:, begin : begin + _PART] = directions @ part
    return product


def fit_components(
    queries: VectorTable,
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, " dim"], Float[np.ndarray, " dim"]]:
    """Intercept, slope and R2 of every component on the raw position.

    Constant positions give slope and R2 0.
    """
    centred_t = queries.position - queries.position.mean()
    spread = float(centred_t @ centred_t)
    mean, product, total = np.zeros((3, queries.vectors.shape[1]))
    for index, values in enumerate(queries.vectors.T):
        component = values.astype(np.float64)
        mean[index] = component.mean()
        component -= mean[index]
        product[index], total[index] = component @ centred_t, component @ component
    if spread <= 0:
        return mean, np.zeros_like(mean), np.zeros_like(mean)
    beta = product / spread
    residual = total - beta * beta * spread
    r2 = np.minimum(1.0 - residual / np.maximum(total, FLOOR), 1.0)
    return mean - beta * queries.position.mean(), beta, r2


def reflect_onto(
    beta: Float[np.ndarray, " dim"], *, public: bool
) -> tuple[Float[np.ndarray, " dim"], float]:
    """v and flip of a Householder reflection whose first column is the direction of `beta`.

    The public code always takes v along u - e1, which is rounding noise when u is near e1;
    otherwise the sign is chosen so that nothing cancels, and the first column is turned back.
    """
    none = np.zeros_like(beta), 1.0
    size = float(np.linalg.norm(beta))
    if size < FLOOR:
        return none
    u = beta / size
    v, flip = u.copy(), 1.0
    if public or u[0] <= 0:
        v[0] -= 1.0
    else:
        v[0] += 1.0
        flip = -1.0
    length = float(np.linalg.norm(v))
    return none if length < FLOOR else (v / length, flip)


def reflection_axis(v: Float[np.ndarray, " dim"], flip: float) -> Float[np.ndarray, " dim"]:
    """The first column of the reflection."""
    first: np.ndarray = -2 * v * v[0]
    first[0] += 1.0
    return first * flip


def reflection_matrix(v: Float[np.ndarray, " dim"], flip: float) -> Float[np.ndarray, "dim dim"]:
    """The reflection written out, one basis vector per column."""
    basis: np.ndarray = np.eye(len(v)) - 2 * np.outer(v, v)
    basis[:, 0] *= flip
    return basis


def bucket_moments(
    queries: VectorTable, index: int
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, "dim dim"]]:
    """Mean and covariance (n - 1) of one bucket's queries; a single query has covariance 0."""
    inside = queries.vectors.T[:, queries.rows(index)].astype(np.float64)
    mean = inside.mean(axis=1)
    inside -= mean[:, None]
    return mean, inside @ inside.T / max(inside.shape[1] - 1, 1)


def rotate_queries(queries: VectorTable, *, public: bool) -> Rotation:
    """Fit positions and turn the first axis onto the slope."""
    alpha, beta, r2 = fit_components(queries)
    v, flip = reflect_onto(beta, public=public)
    along_axis, along_v = along(queries, np.stack([reflection_axis(v, flip), v]))
    return Rotation(alpha, beta, r2, v, flip, along_axis, along_v)


def build_model(definition: Definition, queries: VectorTable, rotation: Rotation) -> QueryModel:
    """Means and covariance factors of every query bucket under one definition."""
    if definition == "linear-diagonal":
        return _linear_diagonal(queries, rotation)
    if definition == "full":
        moments = [bucket_moments(queries, index) for index in range(len(queries.buckets))]
        means = np.stack([mean for mean, _ in moments], axis=1)
        factors = tuple(factor_of(covariance) for _, covariance in moments)
        return QueryModel(means, factors, keep_identical=False)
    model = _seed(queries, rotation)
    return model if definition == "seed" else replace(model, keep_identical=False)


def _seed(queries: VectorTable, rotation: Rotation) -> QueryModel:
    """Along the positional axis the line and one variance; across it the bucket's own moments."""
    axis = rotation.axis
    residual = rotation.along_axis - rotation.line(queries.position)
    variance = float(residual.var(ddof=1)) if len(residual) > 1 else 1.0
    across = np.eye(len(axis)) - np.outer(axis, axis)
    means, factors = np.outer(axis, rotation.line(queries.mean_positions)), []
    for index in range(len(queries.buckets)):
        mean, covariance = bucket_moments(queries, index)
        means[:, index] += mean - axis * (axis @ mean)
        semantic = across @ covariance @ across + FLOOR * across
        factors.append(factor_of(semantic + variance * np.outer(axis, axis)))
    return QueryModel(means, tuple(factors), keep_identical=True)


def _linear_diagonal(queries: VectorTable, rotation: Rotation) -> QueryModel:
    """The public code: one line and one variance for each rotated component, for all buckets."""
    num_rows = len(queries.vectors)
    alpha, beta = rotation.alpha, rotation.beta
    basis = reflection_matrix(rotation.v, rotation.flip)
    variance = np.ones(len(beta))
    if num_rows > 1:
        lines = zip(basis.T @ alpha, basis.T @ beta, strict=True)
        variance = np.array(
            [
                (component - (a + b * queries.position)).var(ddof=1)
                for component, (a, b) in zip(rotation.components(queries), lines, strict=True)
            ]
        )
    scale = np.sqrt(np.where(variance > 0, variance, FLOOR))
    means = alpha[:, None] + np.outer(beta, queries.mean_positions)
    return QueryModel(means, (triangular(basis * scale),), keep_identical=False)


def factor_of(covariance: Float[np.ndarray, "dim dim"]) -> Float[np.ndarray, "dim dim"]:
    """Lower triangular F with F F' = covariance; by eigenvalues if it is singular."""
    try:
        return np.asarray(linalg.cholesky(covariance, lower=True, check_finite=False))
    except linalg.LinAlgError:
        values, vectors = linalg.eigh(covariance, check_finite=False)
        return triangular(vectors * np.sqrt(np.maximum(values, 0.0)))


def triangular(factor: Float[np.ndarray, "dim dim"]) -> Float[np.ndarray, "dim dim"]:
    """The lower triangular matrix with the same F F'; products with it cost half."""
    upper: np.ndarray = linalg.qr(factor.T, mode="r", check_finite=False)[0]
    return upper.T


def predict_positions(queries: VectorTable, rotation: Rotation) -> dict[str, float]:
    """Columns on how well the projection onto the slope tells log2(position + 1), by regression.

    The ratio is the projection's error over that of always saying the mean; 1 if both are 0.
    """
    target = np.log2(queries.position + 1.0)
    centred = target - target.mean()
    baseline = float(np.abs(centred).mean())
    size = float(np.linalg.norm(rotation.beta))
    projection = np.zeros(len(target))
    if size >= FLOOR:
        projection = rotation.along_axis - rotation.along_axis.mean()
    elif size > 0:  # too short to rotate onto, but still a direction
        projection = along(queries, rotation.beta[None] / size)[0]
        projection -= projection.mean()
    spread, total = float(projection @ projection), float(centred @ centred)
    r2, error = 0.0, baseline
    if spread > 0 and total > 0:
        left = centred - projection * (float(projection @ centred) / spread)
        r2, error = 1.0 - float(left @ left) / total, float(np.abs(left).mean())
    return {
        "q_R2_scalar": r2,
        "q_mae_baseline": baseline,
        "q_mae_proj": error,
        "q_mae_ratio": error / baseline if baseline > 0 else 1.0,
    }
