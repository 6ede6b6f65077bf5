"""Buckets of positions: `uniform:512` by size, `log2:128` by powers of two from a floor."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from headwise.plasticity.settings import parse_buckets


def bucket_of(buckets: str, position: Int[np.ndarray, "row"]) -> Int[np.ndarray, "row"]:
    """The bucket of each position; log2 bucket b covers positions 2^b - 1 .. 2^(b+1) - 2."""
    kind, size = parse_buckets(buckets)
    if kind == "uniform":
        return position // size
    floor = math.ceil(math.log2(size))
    exponent = np.frexp((position + 1).astype(float))[1] - 1  # floor(log2(position + 1))
    return np.asarray(np.maximum(floor, exponent))


def keep_probability(
    buckets: str, bucket: Int[np.ndarray, "row"], base_rate: float | None
) -> Float[np.ndarray, "row"]:
    """base_rate expected rows a text and bucket; everything without a base rate."""
    if base_rate is None:
        return np.ones(len(bucket))
    kind, size = parse_buckets(buckets)
    width = np.full(len(bucket), float(size)) if kind == "uniform" else 2.0**bucket
    return np.minimum(1.0, base_rate / width)
