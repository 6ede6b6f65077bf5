"""Near-duplicates: documents that share most of their text, as reprints, versions and templates do.

A document is the set of its shingles: every run of 32 characters, in small letters and with single
spaces, hashed. Characters and not words, so that it works in languages without spaces. Two
documents are near-duplicates if at least half of the shingles of the smaller one are in the other.
Everything is a function of the texts alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt64

WIDTH = 32  # characters of a shingle, a power of two: five or six English words
SHARE = 0.5  # of the smaller document's shingles
_SKETCH = 512  # shingles by which a document is compared with all others: the smallest hashes
_NEIGHBOURS = 16  # documents with the same shingle that each one is compared with
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes in 64 bits


def shingles(text: str) -> UInt64[np.ndarray, "shingle"]:
    """The different shingles of a text, sorted; a text that is shorter than one is one."""
    plain = " ".join(text.casefold().split()).ljust(WIDTH)
    data = plain.encode("utf-32-le", errors="surrogatepass")
    hashes = np.frombuffer(data, dtype="<u4").astype(np.uint64) + np.uint64(1)
    power, width = _FACTOR, 1
    while width < WIDTH:  # a run of 2w is a run of w and the next one
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
        power, width = power * power % 2**64, 2 * width
    hashes ^= hashes >> np.uint64(31)  # mixed, for the smallest of them shall be a fair sample
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return np.unique(hashes ^ (hashes >> np.uint64(27)))


def near_duplicate_groups(texts: Sequence[str]) -> Int[np.ndarray, "document"]:
    """For each document the number of its group; near-duplicates of near-duplicates share one."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    sketches = [shingles(text)[:_SKETCH] for text in texts]
    sizes = np.array([len(sketch) for sketch in sketches], dtype=int)
    pairs, shared = _shared_shingles(sketches)
    left, right = np.divmod(pairs, max(len(texts), 1))
    alike = shared >= SHARE * np.minimum(sizes[left], sizes[right])
    edges = (np.ones(alike.sum()), (left[alike], right[alike]))
    graph = coo_matrix(edges, shape=(len(texts), len(texts)))
    groups: Int[np.ndarray, "document"] = connected_components(graph, directed=False)[1]
    return groups


def _shared_shingles(
    sketches: Sequence[UInt64[np.ndarray, "_"]],
) -> tuple[Int[np.ndarray, "pair"], Int[np.ndarray, "pair"]]:
    """Pairs of documents (first * documents + second) and how many shingles they share."""
    count, (hashes, owners) = len(sketches), _by_hash(sketches)
    pairs = []
    # What a thousand documents share is compared with the next sixteen of them, not with all: a
    # chain of neighbours joins them as well.
    for step in range(1, _NEIGHBOURS + 1):
        same = hashes[step:] == hashes[:-step]
        if not same.any():
            break
        pairs.append(owners[:-step][same] * count + owners[step:][same])
    return np.unique(np.concatenate([*pairs, np.zeros(0, int)]), return_counts=True)


def _by_hash(
    documents: Sequence[UInt64[np.ndarray, "_"]],
) -> tuple[UInt64[np.ndarray, "shingle"], Int[np.ndarray, "shingle"]]:
    """The shingles of all documents in the order of their hashes, and whose each one is."""
    hashes = np.concatenate([*documents, np.zeros(0, np.uint64)])
    owners = np.repeat(np.arange(len(documents)), [len(one) for one in documents])
    order = np.lexsort((owners, hashes))
    return hashes[order], owners[order]


def near_duplicates_of(texts: Sequence[str], others: Sequence[str]) -> Bool[np.ndarray, "document"]:
    """Which texts are near-duplicates of one of `others`, or hold most of one."""
    known = [shingles(text) for text in others]
    sizes = np.array([len(one) for one in known], dtype=int)
    hashes, owners = _by_hash(known)
    alike = np.zeros(len(texts), dtype=bool)
    for place, text in enumerate(texts):
        own = shingles(text)
        starts = np.searchsorted(hashes, own)
        ends = np.searchsorted(hashes, own, side="right")
        hits = [owners[a:b] for a, b in zip(starts, ends, strict=True) if b > a]
        shared = np.bincount(np.concatenate([*hits, np.zeros(0, int)]), minlength=len(sizes))
        alike[place] = (shared >= SHARE * np.minimum(sizes, len(own))).any()
    return alike
