"""Pairs of keys between which a query chooses: enumerated once for a key head, or sampled.

An admissible pair is two keys of one passage: one document inside one key bucket. n such keys have
n(n-1)/2 pairs but only n-1 independent differences, so a `PairBatch` holds the differences to the
passage's first key (each is a pair itself) and lists the other pairs as differences of those: the
expensive products with d x d matrices are done on n-1 rows instead of n(n-1)/2.

Invariant: with "all", each unordered pair appears exactly once over the batches of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Int64

from headwise.plasticity.reader import VectorTable

BATCH_PAIRS = 8192  # a batch's arrays then stay within a few MB, and near the cache


@dataclass(frozen=True)
class PairBatch:
    """Some pairs of one key bucket: each row of `base`, then `base[first] - base[second]`."""

    base: Float[np.ndarray, "base dim"]
    first: Int[np.ndarray, " extra"]
    second: Int[np.ndarray, " extra"]
    example: Int64[np.ndarray, " pair"]
    distance: Float[np.ndarray, " pair"]  # tokens between the two keys
    middle: Float[np.ndarray, " pair"]  # their mean position
    identical: Bool[np.ndarray, " pair"]  # equal vectors: no preference to speak of

    def differences(self) -> Float[np.ndarray, "pair dim"]:
        """Every pair's difference, written out."""
        return np.concatenate([self.base, self.base[self.first] - self.base[self.second]])

    def picked(self, pairs: Int64[np.ndarray, " chosen"]) -> PairBatch:
        """Some of the pairs, ascending, each written out as a row of `base`."""
        split = int(np.searchsorted(pairs, len(self.base)))
        extra = pairs[split:] - len(self.base)
        apart = self.base[self.first[extra]] - self.base[self.second[extra]]
        none = np.empty(0, dtype=np.int64)
        return PairBatch(
            np.concatenate([self.base[pairs[:split]], apart]),
            none,
            none,
            self.example[pairs],
            self.distance[pairs],
            self.middle[pairs],
            self.identical[pairs],
        )


def sort_keys(keys: VectorTable, signs: Float[np.ndarray, " dim"]) -> VectorTable:
    """Sort keys by bucket and, inside it, by document in order of first appearance; orient them.

    Inside a passage (one document in one bucket) the order of the rows stays.
    """
    row = np.arange(len(keys.bucket))
    by_pair = np.lexsort((row, keys.example, keys.bucket))
    bucket, example = keys.bucket[by_pair], keys.example[by_pair]
    opens = np.ones(len(row), dtype=bool)
    opens[1:] = (bucket[1:] != bucket[:-1]) | (example[1:] != example[:-1])
    first_row = by_pair[opens][np.cumsum(opens) - 1]  # stable sort: the first is the earliest
    order = by_pair[np.lexsort((by_pair, first_row, bucket))]
    vectors = np.take(keys.vectors, order, axis=0)
    vectors *= signs.astype(np.float32)
    return VectorTable(
        vectors, keys.position[order], keys.bucket[order], keys.example[order], keys.window
    )


def pair_batches(
    keys: VectorTable, index: int, *, limit: int, seed: Sequence[int]
) -> Iterator[PairBatch]:
    """The pairs of key bucket `index`: all of them if at most `limit`, else a sample of `limit`."""
    start, size = keys.passages_of(index)
    total = int((size * (size - 1) // 2).sum())
    if total > limit:
        yield from _sampled_batches(keys, start, size, limit, seed)
        return
    count = np.cumsum(size * (size - 1) // 2)
    cuts = np.searchsorted(count, np.arange(BATCH_PAIRS, total, BATCH_PAIRS))
    for begin, end in zip(np.r_[0, cuts], np.r_[cuts, len(size)], strict=True):
        if end > begin:
            yield _enumerated_batch(keys, start[begin:end], size[begin:end])


def _enumerated_batch(
    keys: VectorTable, start: Int64[np.ndarray, " passage"], size: Int64[np.ndarray, " passage"]
) -> PairBatch:
    """All pairs of some passages; those of one size are laid out together, without a loop."""
    anchor, other, first, second = [], [], [], []
    offset = 0
    for n in np.unique(size).tolist():
        heads = start[size == n]
        shape = (len(heads), n - 1)
        anchor.append(np.repeat(heads, n - 1))
        other.append((heads[:, None] + np.arange(1, n)).ravel())
        left, right = np.triu_indices(n - 1, k=1)
        row = offset + np.arange(shape[0])[:, None] * (n - 1)
        first.append((row + left).ravel())
        second.append((row + right).ravel())
        offset += shape[0] * shape[1]
    a, b = np.concatenate(anchor), np.concatenate(other)
    i, j = np.concatenate(first), np.concatenate(second)
    rows_a, rows_b = np.concatenate([a, b[j]]), np.concatenate([b, b[i]])
    return _batch(keys, a, b, (i, j), (rows_a, rows_b))


def _sampled_batches(
    keys: VectorTable,
    start: Int64[np.ndarray, " passage"],
    size: Int64[np.ndarray, " passage"],
    limit: int,
    seed: Sequence[int],
) -> Iterator[PairBatch]:
    """Distinct pairs, uniformly without replacement: draw ranks, then find the pair of each."""
    count = np.cumsum(size * (size - 1) // 2)
    rank = np.sort(np.random.default_rng(seed).choice(int(count[-1]), limit, replace=False))
    passage = np.searchsorted(count, rank, side="right")
    local = rank - np.where(passage > 0, count[passage - 1], 0)
    # Inside a passage, rank r is the pair low < high with r = C(high, 2) + low.
    high = ((1 + np.sqrt(1 + 8 * local.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > local  # the square root may round either way
    high += high * (high + 1) // 2 <= local
    low = local - high * (high - 1) // 2
    a, b = start[passage] + low, start[passage] + high
    for begin in range(0, limit, BATCH_PAIRS):
        part = slice(begin, begin + BATCH_PAIRS)
        yield listed_batch(keys, a[part], b[part])


def listed_batch(
    keys: VectorTable, a: Int64[np.ndarray, " pair"], b: Int64[np.ndarray, " pair"]
) -> PairBatch:
    """A batch of given pairs of rows; the difference is `a - b`."""
    none = np.empty(0, dtype=np.int64)
    return _batch(keys, b, a, (none, none), (b, a))


def _batch(
    keys: VectorTable,
    anchor: Int64[np.ndarray, " base"],
    other: Int64[np.ndarray, " base"],
    extra: tuple[Int64[np.ndarray, " extra"], Int64[np.ndarray, " extra"]],
    rows: tuple[Int64[np.ndarray, " pair"], Int64[np.ndarray, " pair"]],
) -> PairBatch:
    base = np.subtract(keys.vectors[other], keys.vectors[anchor], dtype=np.float64)
    first, second = extra
    p, q = keys.position[rows[0]], keys.position[rows[1]]
    return PairBatch(
        base=base,
        first=first,
        second=second,
        example=keys.example[rows[0]],
        distance=np.abs(p - q).astype(np.float64),
        middle=(p + q) / 2.0,
        identical=_identical(base, first, second),
    )


def _identical(
    base: Float[np.ndarray, "base dim"],
    first: Int64[np.ndarray, " extra"],
    second: Int64[np.ndarray, " extra"],
) -> Bool[np.ndarray, " pair"]:
    """Which pairs are of equal keys. Equal rows have equal norms, so few need a full look."""
    norm = np.vecdot(base, base)
    same = np.abs(norm[first] - norm[second]) <= 1e-12 * norm[first]
    maybe = np.flatnonzero(same)
    same[maybe] = (base[first[maybe]] == base[second[maybe]]).all(axis=1)
    return np.concatenate([norm == 0.0, same])


def draw_public_pairs(
    rng: np.random.Generator,
    start: Int64[np.ndarray, " passage"],
    size: Int64[np.ndarray, " passage"],
    num_pairs: int,
) -> tuple[Int64[np.ndarray, " pair"], Int64[np.ndarray, " pair"]]:
    """Draw pairs as the public code does: with replacement, two generator calls per pair.

    The calls and their order are part of the definition: they decide every later draw.
    """
    count = np.cumsum(size * (size - 1) // 2)
    total = int(count[-1])
    first, second = [], []
    for _ in range(min(num_pairs, total)):
        passage = int(np.searchsorted(count, rng.integers(total), side="right"))
        one, two = rng.choice(int(size[passage]), 2, replace=False)
        first.append(start[passage] + one)
        second.append(start[passage] + two)
    return np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
