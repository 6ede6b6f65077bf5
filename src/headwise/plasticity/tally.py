"""Plasticity of each cell (query bucket, key bucket), of a head, and their standard errors.

A pair's plasticity is 4 p (1 - p), p the probability that a query of the bucket prefers the first
key: 1 if the queries are split, 0 if they agree. A cell is the mean over its pairs.

Standard errors are those of a bootstrap over documents. It is not simulated: each document's
influence on a cell (through its key pairs, and through the bucket moments of its queries) is
computed, and the variance of a sum of influences under resampling is known. Above `MAX_DOCUMENTS`
documents and `GRADIENT_PAIRS` pairs an even subset estimates that variance. The line fitted over
all positions (`linear-diagonal`, and the positional part of `seed`) is taken as given.

Invariant: the numbers of a head do not depend on which other heads are scored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int, Int64
from scipy.linalg.blas import dtrmm
from scipy.special import ndtr

from headwise.plasticity.key_pairs import PairBatch
from headwise.plasticity.query_model import FLOOR, QueryModel
from headwise.plasticity.reader import VectorTable
from headwise.plasticity.settings import Definition
from headwise.plasticity.values import Cell, DistanceBin, defined

MAX_DOCUMENTS = 128
GRADIENT_PAIRS = 256
DISTANCE_BINS = 32  # powers of two tokens


def open_cells(
    queries: VectorTable, keys: VectorTable, *, window_in_buckets: bool
) -> Bool[np.ndarray, "bucket key_bucket"]:
    """Which key buckets lie before a query bucket and inside its sliding window.

    A window of W tokens reaches a key bucket if some query is less than W tokens after some key.
    The public code took W for a number of buckets.
    """
    q_bucket, k_bucket = queries.buckets[:, None], keys.buckets[None, :]
    before: np.ndarray = (k_bucket < q_bucket) & (q_bucket > 0)
    window = queries.window
    if window is None:
        return before
    if window_in_buckets:
        return before & (k_bucket >= q_bucket - max(window, 1))
    first_query = np.minimum.reduceat(queries.position, queries.start[:-1])
    last_key = np.maximum.reduceat(keys.position, keys.start[:-1])
    return before & (first_query[:, None] - last_key[None, :] < window)


def choose_documents(*examples: Int64[np.ndarray, " _"]) -> tuple[np.ndarray, int]:
    """At most `MAX_DOCUMENTS` evenly chosen documents, ascending, and how many there are."""
    documents = np.unique(np.concatenate(examples))
    step = -(-len(documents) // MAX_DOCUMENTS)
    return documents[::step], len(documents)


def document_index(
    example: Int64[np.ndarray, " row"], documents: Int64[np.ndarray, " document"]
) -> Int64[np.ndarray, " row"]:
    """Each row's place among the chosen documents; one past the end for the others."""
    place = np.searchsorted(documents, example)
    inside = documents[np.minimum(place, len(documents) - 1)] == example
    return np.where(inside, place, len(documents))


def make_probes(
    definition: Definition,
    queries: VectorTable,
    axis: Float[np.ndarray, " dim"],
    documents: Int64[np.ndarray, " document"],
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Centred queries of the chosen documents, by bucket: they carry the moments' influence."""
    if definition not in ("seed", "full"):
        return ()
    probes = []
    place = document_index(queries.example, documents)
    for index in range(len(queries.buckets)):
        rows = queries.rows(index)
        inside = place[rows] < len(documents)
        vectors = queries.vectors.T[:, rows]
        chosen = np.ascontiguousarray((vectors[:, inside] - vectors.mean(axis=1, keepdims=True)).T)
        if definition == "seed":  # the positional part comes from the line, not from the bucket
            single = axis.astype(np.float32)
            chosen -= np.outer(chosen @ single, single)
        probes.append((chosen, place[rows][inside]))
    return tuple(probes)


def pair_moments(
    batch: PairBatch, model: QueryModel, columns: Int[np.ndarray, " column"]
) -> tuple[Float[np.ndarray, "column pair"], Float[np.ndarray, "column pair"]]:
    """Mean and variance of q.d for every pair and each of the query buckets."""
    base, split = batch.base, len(batch.base)
    mean = np.empty((len(columns), split + len(batch.first)))
    mean[:, :split] = model.means[:, columns].T @ base.T
    mean[:, split:] = mean[:, batch.first] - mean[:, batch.second]
    variance = np.empty_like(mean)
    shared = len(model.factors) == 1
    for row, column in enumerate(columns[:1] if shared else columns):
        spread = _times_factor(base, model.factor(int(column)))
        variance[row, :split] = np.vecdot(spread, spread)
        apart = np.take(spread, batch.first, axis=0)  # quicker than indexing
        apart -= np.take(spread, batch.second, axis=0)
        variance[row, split:] = np.vecdot(apart, apart)
    if shared:
        variance[1:] = variance[0]
    variance[:, batch.identical] = 0.0
    return mean, variance


def _times_factor(
    base: Float[np.ndarray, "base dim"], factor: Float[np.ndarray, "dim dim"]
) -> Float[np.ndarray, "base dim"]:
    """base @ factor for a lower triangular factor, at half the work."""
    # BLAS is column-major: base' is what it sees, and factor' base' = (base factor)'.
    product = dtrmm(1.0, factor, base.T, side=0, lower=1, trans_a=1)
    return np.asarray(product).T


def plasticity_of(
    mean: Float[np.ndarray, "*pair"], variance: Float[np.ndarray, "*pair"]
) -> Float[np.ndarray, "*pair"]:
    """4 p (1 - p) with p = Phi(mean / sqrt(variance)), from the tail that does not cancel."""
    tail = ndtr(-np.abs(mean) / np.sqrt(np.where(variance > 0, variance, FLOOR)))
    return np.asarray(4.0 * tail * (1.0 - tail))


def preference_gradient(
    batch: PairBatch, model: QueryModel, columns: Int[np.ndarray, " column"], pick: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Derivative of the mean plasticity of some pairs by each bucket's mean and covariance."""
    chosen = batch.picked(pick)
    differences = chosen.base
    mean, variance = pair_moments(chosen, model, columns)
    deviation = np.sqrt(np.where(variance > 0, variance, FLOOR))
    z = mean / deviation
    slope = 4.0 * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * (1.0 - 2.0 * ndtr(z))
    slope[variance <= 0] = 0.0
    single = differences.astype(np.float32)
    by_mean = (slope / deviation).astype(np.float32) @ single / len(pick)
    weights = (-slope * z / (2.0 * deviation**2)).astype(np.float32) / np.float32(len(pick))
    return [
        (linear, (single * weight[:, None]).T @ single)
        for linear, weight in zip(by_mean, weights, strict=True)
    ]


@dataclass
class Tally:
    """One query head against its keys: what scores their pairs, and the running sums."""

    definition: Definition
    keys: VectorTable
    buckets: Int64[np.ndarray, " bucket"]
    counts: Int64[np.ndarray, " bucket"]
    tau: Float[np.ndarray, " bucket"]
    open: Bool[np.ndarray, "bucket key_bucket"]  # which cells exist
    min_queries: int
    model: QueryModel
    queries: VectorTable | None  # kept only for `empirical`: they are most of a head's memory
    documents: Int64[np.ndarray, " document"]  # those that carry the standard error
    num_documents: int
    probes: tuple[tuple[np.ndarray, np.ndarray], ...]  # per bucket: centred queries, document
    total: np.ndarray = field(init=False)  # (bucket, key bucket): summed plasticity
    count: np.ndarray = field(init=False)  # (bucket, key bucket): pairs
    influence: np.ndarray = field(init=False)  # (bucket, key bucket, document)
    distance_sum: np.ndarray = field(init=False)
    distance_count: np.ndarray = field(init=False)
    _by_document: np.ndarray = field(init=False)  # (bucket, document): sums of this key bucket
    _pairs_by_document: np.ndarray = field(init=False)
    _moment_influence: np.ndarray = field(init=False)  # (bucket, document)

    def __post_init__(self) -> None:
        shape = self.open.shape
        self.total, self.count = np.zeros(shape), np.zeros(shape)
        self.influence = np.zeros((*shape, len(self.documents)))
        self.distance_sum = np.zeros((DISTANCE_BINS, DISTANCE_BINS))
        self.distance_count = np.zeros((DISTANCE_BINS, DISTANCE_BINS))
        self._clear()

    @property
    def weighted(self) -> bool:
        """Whether a cell counts by its queries and keys; the public code counts cells alike."""
        return self.definition != "linear-diagonal"

    def columns(self, key_index: int) -> Int[np.ndarray, " column"]:
        """The query buckets that can be scored against one key bucket."""
        return np.flatnonzero(self.open[:, key_index] & (self.counts >= self.min_queries))

    def _clear(self) -> None:
        shape = (len(self.buckets), len(self.documents) + 1)
        self._by_document, self._pairs_by_document = np.zeros(shape), np.zeros(shape)
        self._moment_influence = np.zeros(shape)

    def add(
        self,
        key_index: int,
        batch: PairBatch,
        columns: Int[np.ndarray, " column"],
        values: Float[np.ndarray, "column pair"],
    ) -> None:
        """Add the plasticity of the batch's pairs, as seen from some query buckets."""
        if not self.model.keep_identical and batch.identical.any():
            keep = ~batch.identical
            values = values[:, keep]
            batch = replace(  # the vectors are left alone: they are scored already
                batch,
                example=batch.example[keep],
                distance=batch.distance[keep],
                middle=batch.middle[keep],
                identical=batch.identical[keep],
            )
        place = document_index(batch.example, self.documents)
        size = len(self.documents) + 1
        pairs = np.bincount(place, minlength=size)
        far = np.frexp(np.maximum(batch.distance, 1.0))[1] * DISTANCE_BINS
        for column, row in zip(columns, values, strict=True):
            self.total[column, key_index] += row.sum()
            self.count[column, key_index] += len(row)
            self._by_document[column] += np.bincount(place, weights=row, minlength=size)
            self._pairs_by_document[column] += pairs
            lag = np.frexp(np.maximum(self.tau[column] - batch.middle, 1.0))[1]
            self._add_distances(far + lag, row)

    def _add_distances(self, bins: np.ndarray, row: Float[np.ndarray, " pair"]) -> None:
        size = DISTANCE_BINS * DISTANCE_BINS
        self.distance_sum += np.bincount(bins, row, size).reshape(self.distance_sum.shape)
        self.distance_count += np.bincount(bins, minlength=size).reshape(self.distance_count.shape)

    def add_moment_influence(
        self, column: int, by_mean: np.ndarray, by_covariance: np.ndarray, share: float
    ) -> None:
        """Spread a gradient over the documents whose queries make up the bucket's moments."""
        probe, place = self.probes[column]
        effect = probe @ by_mean + np.vecdot(probe @ by_covariance, probe)
        self.add_query_influence(column, effect.astype(np.float64), place, share)

    def add_query_influence(
        self, column: int, effect: np.ndarray, place: np.ndarray, share: float
    ) -> None:
        """Add each query's effect on the cell's mean, centred, to its document."""
        if len(effect) == 0:
            return
        summed = np.bincount(
            place, weights=effect - effect.mean(), minlength=len(self.documents) + 1
        )
        self._moment_influence[column] += share * summed / self.counts[column]

    def close(self, key_index: int) -> None:
        """All batches of one key bucket are in: turn its sums into influences."""
        for column in np.flatnonzero(self.count[:, key_index] > 0):
            count = self.count[column, key_index]
            value = self.total[column, key_index] / count
            keys_part = (
                self._by_document[column] - value * self._pairs_by_document[column]
            ) / count
            self.influence[column, key_index] = (keys_part + self._moment_influence[column])[:-1]
        self._clear()

    def cells(self) -> tuple[Cell, ...]:
        """The head's cells in order of (query bucket, key bucket)."""
        values, keys_in = self._values(), self.keys.counts
        return tuple(
            Cell(
                q_bucket=int(self.buckets[row]),
                k_bucket=int(self.keys.buckets[column]),
                plasticity=defined(values[row, column]),
                n_pairs=int(self.count[row, column]),
                n_queries=int(self.counts[row]),
                n_keys=int(keys_in[column]),
                se=self._error(self.influence[row, column]) if self.count[row, column] else None,
                q_position=float(self.tau[row]),
            )
            for row, column in np.argwhere(self.open)
        )

    def overall(self) -> tuple[float | None, float | None]:
        """The weighted mean over cells, and its standard error."""
        weight = np.outer(self.counts, self.keys.counts).astype(np.float64)
        if not self.weighted:
            weight = np.ones_like(weight)
        weight[self.count == 0] = 0.0
        if weight.sum() <= 0:
            return None, None
        share = weight / weight.sum()
        pooled = np.tensordot(share, self.influence, axes=2)
        return defined(np.nansum(self._values() * share)), self._error(pooled)

    def distance(self) -> tuple[DistanceBin, ...]:
        """The bins of distance that hold a pair."""
        total, count = self.distance_sum, self.distance_count
        return tuple(
            DistanceBin(int(i), int(j), float(total[i, j]), int(count[i, j]))
            for i, j in np.argwhere(count > 0)
        )

    def _values(self) -> Float[np.ndarray, "bucket key_bucket"]:
        """Mean plasticity of each cell; NaN where no pair was scored."""
        values = np.full(self.total.shape, np.nan)
        np.divide(self.total, self.count, values, where=self.count > 0)
        return values

    def _error(self, influence: Float[np.ndarray, " document"]) -> float | None:
        """The bootstrap's standard error of a sum over documents."""
        chosen = len(influence)
        if chosen < 2:
            return None
        centred = influence - influence.mean()
        return defined(np.sqrt(centred @ centred * self.num_documents / (chosen - 1)))


def fifth_means(
    cells: Sequence[Cell], fifths: Mapping[int, Sequence[int]], *, weighted: bool
) -> list[float | None]:
    """Plasticity by fifths of the position range; a cell counts where its queries lie.

    `fifths` are each query bucket's queries by fifth of the position range.
    """
    sums, weights = np.zeros(5), np.zeros(5)
    for cell in cells:
        if cell.plasticity is None:
            continue
        share = np.array(fifths[cell.q_bucket]) / cell.n_queries
        weight = share * (cell.n_queries * cell.n_keys if weighted else 1)
        sums += weight * cell.plasticity
        weights += weight
    return [float(s / w) if w > 0 else None for s, w in zip(sums, weights, strict=True)]
