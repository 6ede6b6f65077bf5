"""Files of captured vectors: buckets of positions, staged portions, and one Parquet file per head.

The layout is `sniffed-qk`: `lLLhHH{q|k}/data.parquet` with bucket, example_id, position, vector and
sliding_window (of type null for full attention). A Parquet row group is one portion of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headwise.artefacts import write_atomically
from headwise.heads import Head
from headwise.plasticity.buckets import Buckets


def assemble(
    staging: Path,
    folder: Path,
    heads: list[Head],
    groups: Mapping[int, int],
    windows: dict[int, int | None],
    buckets: Buckets,
) -> dict[str, int]:
    """One Parquet file per head and kind, a row group per portion; arrays are memory-mapped."""
    portions = sorted(staging.glob("portion-*"))
    wanted = {(head.layer, head.index, "q") for head in heads}
    wanted |= {(head.layer, head.index // groups[head.layer], "k") for head in heads}
    rows = {}
    for layer, head, kind in sorted(wanted):
        name = f"l{layer:02d}h{head:02d}{kind}"
        path = folder / name / "data.parquet"
        rows[name] = _write_head(path, portions, (layer, head, kind), buckets, windows[layer])
    return rows


def _write_head(
    path: Path,
    portions: list[Path],
    which: tuple[int, int, str],
    buckets: Buckets,
    window: int | None,
) -> int:
    layer, _, kind = which
    first = np.load(portions[0] / f"l{layer:02d}{kind}-vectors.npy", mmap_mode="r")
    schema = pa.schema(
        [
            ("bucket", pa.int32()),
            ("example_id", pa.int32()),
            ("position", pa.int32()),
            ("vector", pa.list_(pa.float32(), first.shape[2])),
            ("sliding_window", pa.null() if window is None else pa.int64()),
        ]
    )
    total = 0

    def write(file: Any) -> None:
        nonlocal total
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for folder in portions:
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
