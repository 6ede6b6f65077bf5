"""Files of captured vectors: buckets of positions, staged portions, and one Parquet file per head.

The layout is `sniffed-qk`: `lLLhHH{q|k}/data.parquet` with bucket, example_id, position, vector and
sliding_window (of type null for full attention). A Parquet row group is one portion of texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open

from headwise.artefacts import own_folder, read_text, remove_files, write_atomically, write_text
from headwise.errors import ArtefactError
from headwise.heads import Head
from headwise.integrity.checksums import file_checksum, require_same
from headwise.models.architectures import Geometry
from headwise.models.tensor_files import verified_metadata, write_safetensors
from headwise.plasticity.buckets import bucket_of
from headwise.plasticity.values import CaptureInfo

DATA, DONE = "data.parquet", "done"  # of a head; the list of a finished portion's files
_STAGED = "l[0-9]*[qk].safetensors"
Rows = tuple[int, np.ndarray, np.ndarray]  # a text, its kept positions, (head, position, dim)


def staged_file(portion: Path, layer: int, kind: str) -> Path:
    """Where a portion keeps the vectors of one layer and kind."""
    return portion / f"l{layer:02d}{kind}.safetensors"


def stage_rows(portion: Path, layer: int, kind: str, rows: list[Rows]) -> None:
    """Put one layer and kind of a portion on disk, in the order of the texts."""
    rows.sort(key=lambda part: part[0])
    arrays = {
        "example": np.concatenate([np.full(len(p), e) for e, p, _ in rows]),
        "position": np.concatenate([p for _, p, _ in rows]),
        "vectors": np.concatenate([v for _, _, v in rows], axis=1),  # (head, row, dim)
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    write_safetensors(staged_file(portion, layer, kind), tensors)


def end_portion(portion: Path, capture: str) -> None:
    """Say that all of a portion is on disk, and of which capture it is."""
    names = sorted(file.name for file in portion.glob(_STAGED))
    write_text(portion / DONE, "\n".join([capture, *names]))


def is_whole(portion: Path, capture: str) -> bool:
    """Whether a portion of this capture was finished and all its files are what was written."""
    if not (portion / DONE).exists():
        return False
    try:
        mark, *names = read_text(portion / DONE).split()
        for name in names:
            verified_metadata(portion / name)
    except (ArtefactError, ValueError):  # damaged, or empty: capturing it again mends it
        return False
    return mark == capture


def drop_staging(staging: Path) -> None:
    """Remove the staged portions; what else lies there is not ours and stays."""
    for portion in own_folder(staging).glob("portion-[0-9]*"):
        remove_files(portion, _STAGED, DONE)
    remove_files(staging)


def require_whole(folder: Path, info: CaptureInfo) -> None:
    """Refuse a finished capture that has lost a file, or holds a damaged one."""
    for name, checksum in info.checksums.items():
        require_same(
            file_checksum(folder / name / DATA),
            checksum,
            folder / name / DATA,
            "put an undamaged copy back, or delete the folder and capture again",
        )


def assemble(
    staging: Path,
    folder: Path,
    heads: list[Head],
    groups: Mapping[int, int],
    windows: dict[int, int | None],
    buckets: str,
) -> dict[str, int]:
    """One Parquet file per head and kind, a row group per portion; arrays are memory-mapped."""
    portions = sorted(staging.glob("portion-*"))
    wanted = {(head.layer, head.index, "q") for head in heads}
    wanted |= {(head.layer, head.index // groups[head.layer], "k") for head in heads}
    rows = {}
    for layer, head, kind in sorted(wanted):
        name = f"l{layer:02d}h{head:02d}{kind}"
        path = own_folder(folder / name) / DATA
        rows[name] = _write_head(path, portions, (layer, head, kind), buckets, windows[layer])
    return rows


def _write_head(
    path: Path,
    portions: list[Path],
    which: tuple[int, int, str],
    buckets: str,
    window: int | None,
) -> int:
    dim = _staged(portions[0], which)[2].shape[1]
    schema = pa.schema(
        [
            ("bucket", pa.int32()),
            ("example_id", pa.int32()),
            ("position", pa.int32()),
            ("vector", pa.list_(pa.float32(), dim)),
            ("sliding_window", pa.null() if window is None else pa.int64()),
        ]
    )
    total = 0

    def write(file: Any) -> None:
        nonlocal total
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for folder in portions:
                table = _table(folder, which, buckets, window, schema)
                total += len(table)
                writer.write_table(table)

    write_atomically(path, write)
    return total


def _staged(
    portion: Path, which: tuple[int, int, str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The texts, positions and vectors of one head; of the vectors only its own are read."""
    layer, head, kind = which
    with safe_open(str(staged_file(portion, layer, kind)), framework="numpy") as file:
        vectors = file.get_slice("vectors")[head]
        return file.get_tensor("example"), file.get_tensor("position"), vectors


def _table(
    folder: Path,
    which: tuple[int, int, str],
    buckets: str,
    window: int | None,
    schema: pa.Schema,
) -> pa.Table:
    example, position, vectors = _staged(folder, which)
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    count = len(position)
    return pa.table(
        [
            pa.array(bucket_of(buckets, position).astype(np.int32)),
            pa.array(example.astype(np.int32)),
            pa.array(position.astype(np.int32)),
            pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            pa.nulls(count) if window is None else pa.array(np.full(count, window, np.int64)),
        ],
        schema=schema,
    )


def vector_bytes(tokens: int, heads: Sequence[Head] | None, shape: Geometry) -> int:
    """What the queries of some heads (default: all) and the keys they use weigh, at most."""
    if heads is None:
        vectors = shape.num_layers * (shape.num_heads + shape.num_kv_heads)
    else:
        vectors = len(heads) + len({(head.layer, head.index // shape.group) for head in heads})
    return 4 * tokens * vectors * shape.key_dim
