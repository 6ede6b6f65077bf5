"""Buckets of positions: uniform, or by powers of two."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import SettingsError


@dataclass(frozen=True)
class Buckets:
    """Positions to buckets: `uniform:512` by size, `log2:128` by powers of two from a floor."""

    kind: Literal["uniform", "log2"]
    size: int

    @staticmethod
    def parse(text: str) -> Buckets:
        """Read `uniform:512` or `log2:128`."""
        match = re.fullmatch(r"(uniform|log2):([0-9]{1,9})", text)
        if match is None or int(match[2]) < 1:
            raise SettingsError(f"unknown buckets {text[:40]!r}", fix="uniform:512 or log2:128")
        return Buckets("uniform" if match[1] == "uniform" else "log2", int(match[2]))

    def of(self, position: Int[np.ndarray, "row"]) -> Int[np.ndarray, "row"]:
        """The bucket of each position; log2 bucket b covers positions 2^b - 1 .. 2^(b+1) - 2."""
        if self.kind == "uniform":
            return position // self.size
        floor = math.ceil(math.log2(self.size))
        exponent = np.frexp((position + 1).astype(float))[1] - 1  # floor(log2(position + 1))
        return np.asarray(np.maximum(floor, exponent))

    def keep_probability(
        self, bucket: Int[np.ndarray, "row"], base_rate: float | None
    ) -> Float[np.ndarray, "row"]:
        """base_rate expected rows a text and bucket; everything without a base rate."""
        if base_rate is None:
            return np.ones(len(bucket))
        width = np.full(len(bucket), float(self.size)) if self.kind == "uniform" else 2.0**bucket
        return np.minimum(1.0, base_rate / width)
