"""Files of captured vectors: buckets of positions, staged groups, and one Parquet file a head.

The layout is `sniffed-qk`: `lLLhHH{q|k}/data.parquet` with bucket, example_id, position, vector and
sliding_window (of type null for full attention). A row group is one group of texts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from headwise.artefacts import write_atomically
from headwise.errors import SettingsError
from headwise.heads import Head


@dataclass(frozen=True)
class Buckets:
    """Positions to buckets: `uniform:512` by size, `log2:128` by powers of two from a floor."""

    kind: Literal["uniform", "log2"]
    size: int

    @staticmethod
    def parse(text: str) -> Buckets:
        """Read `uniform:512` or `log2:128`."""
        match = re.fullmatch(r"(uniform|log2):(\d+)", text)
        if match is None or int(match[2]) < 1:
            raise SettingsError(f"unknown buckets {text!r}", fix="uniform:512 or log2:128")
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


def write_array(path: Path, array: np.ndarray) -> Path:
    """One .npy file, atomically."""
    return write_atomically(path, lambda file: np.save(file, array))


def assemble(
    staging: Path,
    folder: Path,
    heads: list[Head],
    group: int,
    windows: dict[int, int | None],
    buckets: Buckets,
) -> dict[str, int]:
    """One Parquet file a head and kind, a row group a text group; arrays are memory-mapped."""
    groups = sorted(path for path in staging.iterdir() if path.is_dir())
    wanted = {(head.layer, head.index, "q") for head in heads}
    wanted |= {(head.layer, head.index // group, "k") for head in heads}
    rows = {}
    for layer, head, kind in sorted(wanted):
        name = f"l{layer:02d}h{head:02d}{kind}"
        path = folder / name / "data.parquet"
        rows[name] = _write_head(path, groups, (layer, head, kind), buckets, windows[layer])
    return rows


def _write_head(
    path: Path,
    groups: list[Path],
    which: tuple[int, int, str],
    buckets: Buckets,
    window: int | None,
) -> int:
    layer, _, kind = which
    first = np.load(groups[0] / f"l{layer:02d}{kind}-vectors.npy", mmap_mode="r")
    schema = pa.schema([
        ("bucket", pa.int32()), ("example_id", pa.int32()), ("position", pa.int32()),
        ("vector", pa.list_(pa.float32(), first.shape[2])),
        ("sliding_window", pa.null() if window is None else pa.int64()),
    ])  # fmt: skip
    total = 0

    def write(file: Any) -> None:
        nonlocal total
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for folder in groups:
                table = _table(folder, which, buckets, window, schema)
                total += len(table)
                writer.write_table(table)

    write_atomically(path, write)
    return total


def _table(
    folder: Path,
    which: tuple[int, int, str],
    buckets: Buckets,
    window: int | None,
    schema: pa.Schema,
) -> pa.Table:
    layer, head, kind = which
    stem = f"l{layer:02d}{kind}"
    position = np.load(folder / f"{stem}-position.npy")
    vectors = np.load(folder / f"{stem}-vectors.npy", mmap_mode="r")[head]
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    count = len(position)
    return pa.table(
        [
            pa.array(buckets.of(position).astype(np.int32)),
            pa.array(np.load(folder / f"{stem}-example.npy").astype(np.int32)),
            pa.array(position.astype(np.int32)),
            pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            pa.nulls(count) if window is None else pa.array(np.full(count, window, np.int64)),
        ],
        schema=schema,
    )
