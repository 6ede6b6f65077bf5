"""Captured query and key vectors: finding the files, checking them, reading them as arrays.

The `sniffed-qk` layout keeps one Parquet file for each layer, head and kind,
`lLLhHH{q|k}/data.parquet`, directly under a folder (since 2026) or under one folder per model
(before). Files are read batch by batch straight into float32 arrays, so memory is bounded
by the rows kept, not by the file.

Invariant: what `read_vectors` returns is usable. Anything else (cut-off file, missing column, wrong
type, NaN) is an `ArtefactError` that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Float32, Int, Int64

from headwise.artefacts import is_there
from headwise.errors import ArtefactError, SettingsError
from headwise.heads import Head
from headwise.integrity.checksums import file_checksum, require_same
from headwise.plasticity.values import CAPTURE, CaptureInfo

FILE = "data.parquet"


BATCH_ROWS = 2048


COLUMNS = ("bucket", "example_id", "position", "vector")


_HEAD_FOLDER = re.compile(r"l(\d{2,})h(\d{2,})([qk])")


@dataclass(frozen=True)
class VectorTable:
    """The rows of one head and kind: a vector with its position, bucket and document.

    Vectors stay the float32 that they were captured in; every sum over them is in float64. What is
    said by bucket holds once `sort_queries` or `sort_keys` has sorted the rows by bucket.
    """

    vectors: Float32[np.ndarray, "row dim"]
    position: Int64[np.ndarray, " row"]
    bucket: Int64[np.ndarray, " row"]
    example: Int64[np.ndarray, " row"]
    window: int | None  # sliding window in tokens, None for full attention

    @cached_property
    def buckets(self) -> Int64[np.ndarray, " bucket"]:
        """The distinct buckets, ascending."""
        return np.unique(self.bucket)

    @cached_property
    def start(self) -> Int64[np.ndarray, " bucket_and_one"]:
        """Rows of bucket i: from start[i] to start[i + 1]."""
        return np.append(np.searchsorted(self.bucket, self.buckets), len(self.bucket))

    @property
    def counts(self) -> Int64[np.ndarray, " bucket"]:
        """Rows in each bucket."""
        return np.asarray(np.diff(self.start))

    def rows(self, index: int) -> slice:
        """The rows of one bucket."""
        return slice(int(self.start[index]), int(self.start[index + 1]))

    @property
    def mean_positions(self) -> Float[np.ndarray, " bucket"]:
        """The mean position of each bucket's rows (tau)."""
        return np.asarray(np.add.reduceat(self.position, self.start[:-1]) / self.counts)

    def passages_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and size of the passages (of one document) of two rows or more in one bucket."""
        rows = self.rows(index)
        start = rows.start + np.flatnonzero(np.r_[True, np.diff(self.example[rows]) != 0])
        size = np.diff(np.append(start, rows.stop))
        return start[size >= 2], size[size >= 2]


@dataclass(frozen=True)
class HeadGroup:
    """One key head and the query heads that use it: the unit of work."""

    layer: int
    k_head: int
    q_heads: tuple[int, ...]


@dataclass(frozen=True)
class QKFolder:
    """A folder of head folders: which (layer, head) it has, and what its capture says of itself."""

    path: Path
    queries: frozenset[tuple[int, int]]
    keys: frozenset[tuple[int, int]]
    model: str  # as the capture names it, else the folder's name
    num_q_heads: int | None = None  # None: the capture does not say
    num_k_heads: int | None = None
    heads: tuple[Head, ...] = ()  # named one by one, if any
    fingerprint: str | None = None  # of the weights before any patch, if the capture says so
    patch: str | None = None  # hash of the patch on them, "" for stock
    sampled: bool = False  # a choice of heads, so that gaps are no losses
    checksums: Mapping[str, str] = field(default_factory=dict, repr=False)  # by head folder

    @property
    def identity(self) -> dict[str, str]:
        """What the vectors are of, as far as the capture says."""
        said = {"id": self.model, "fingerprint": self.fingerprint, "patch": self.patch}
        return {key: value for key, value in said.items() if value is not None}

    def file(self, layer: int, head: int, kind: str) -> Path:
        """Where the vectors of one head are."""
        return self.path / f"l{layer:02d}h{head:02d}{kind}" / FILE

    def verified_file(self, layer: int, head: int, kind: str) -> Path:
        """The same, if it is the file that the capture wrote (another program says no checksum)."""
        path = self.file(layer, head, kind)
        checksum = self.checksums.get(path.parent.name)
        if checksum is not None and path.exists():
            require_same(file_checksum(path), checksum, path, "capture this head again")
        return path


def find_heads(root: Path, model_dir: str | None = None) -> QKFolder:
    """Find the head folders under `root` in either layout; `model_dir` names the model's folder."""
    root = Path(root)
    if not is_there(root) or not root.is_dir():
        raise ArtefactError("no such folder of captured vectors", where=root, fix="check the path")
    candidates = [root / model_dir] if model_dir is not None else [root, *sorted(root.iterdir())]
    folders = [folder for path in candidates if (folder := _scan(path)) is not None]
    if (
        folders and folders[0].path == root
    ):  # the new layout: what lies beside the head folders is not data
        return folders[0]
    if len(folders) > 1:
        names = ", ".join(folder.path.name for folder in folders)
        raise ArtefactError(
            f"several models here: {names}", where=root, fix="name one of them with model_dir"
        )
    if not folders:
        raise ArtefactError(
            "no captured heads here: no folder is named like l00h00q",
            where=candidates[0],
            fix="pass the folder that `headwise capture` wrote, or the model's folder in it",
        )
    return folders[0]


def _scan(path: Path) -> QKFolder | None:
    if not path.is_dir():
        return None
    matches = [match for entry in path.iterdir() if (match := _HEAD_FOLDER.fullmatch(entry.name))]
    if not matches:
        return None
    heads = [(int(match[1]), int(match[2]), match[3]) for match in matches]
    queries = frozenset((layer, head) for layer, head, kind in heads if kind == "q")
    keys = frozenset((layer, head) for layer, head, kind in heads if kind == "k")
    return _described(QKFolder(path, queries, keys, path.name))


def _described(folder: QKFolder) -> QKFolder:
    """The folder with what its capture wrote: headwise's file, or qk-sniffer's state."""
    if not (folder.path / CAPTURE).exists():
        return _described_by_sniffer(folder)
    capture = CaptureInfo.load(folder.path)
    if not capture.finished:
        raise ArtefactError(
            "the capture is not finished", where=folder.path, fix="`headwise capture ... --resume`"
        )
    return replace(
        folder,
        model=capture.model.id or folder.model,
        # an older capture of a patched model tells the fingerprint of the patched weights
        fingerprint=None if capture.patch is None else capture.model.fingerprint,
        patch=capture.patch,
        num_q_heads=capture.model.num_heads,
        num_k_heads=capture.model.num_kv_heads,
        heads=tuple(Head.parse(name) for name in capture.heads),
        sampled=capture.head_sampling is not None,
        checksums=capture.checksums,
    )


def _described_by_sniffer(folder: QKFolder) -> QKFolder:
    """Another program's state file: what it lacks is discovered instead."""
    try:
        state = json.loads((folder.path / "_saver_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return folder
    metadata = state.get("model_metadata") if isinstance(state, dict) else None
    if not isinstance(metadata, dict):
        return folder
    return replace(
        folder,
        model=str(metadata.get("model_name", state.get("model_name")) or folder.model),
        num_q_heads=_positive(metadata.get("num_q_heads")),
        num_k_heads=_positive(metadata.get("num_k_heads")),
        sampled=any(key.startswith("head_sampling") for key in metadata),
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def group_heads(
    folder: QKFolder,
    *,
    num_layers: int | None = None,
    num_q_heads: int | None = None,
    num_k_heads: int | None = None,
) -> list[HeadGroup]:
    """Which query heads share which key head; counts that are not given are discovered.

    Every head of the grid is listed, also when its file is missing: its absence is then reported
    by whoever reads it. A capture that says which heads it took lists those; one that only says
    that it sampled lists what it has.
    """
    num_q = num_q_heads or folder.num_q_heads or _count(folder, "query", folder.queries)
    num_k = num_k_heads or folder.num_k_heads or _count(folder, "key", folder.keys)
    size = _group_size(
        folder, num_q, num_k, given=num_q_heads is not None and num_k_heads is not None
    )
    if num_layers is not None:
        heads = {(layer, head) for layer in range(num_layers) for head in range(num_q)}
    elif folder.heads:
        heads = {(head.layer, head.index) for head in folder.heads}
    elif folder.sampled:
        heads = set(folder.queries)
    else:
        layers = {layer for layer, _ in folder.queries | folder.keys}
        heads = {(layer, head) for layer in layers for head in range(num_q)}
    grouped: dict[tuple[int, int], list[int]] = {}
    for layer, head in sorted(heads):
        grouped.setdefault((layer, head // size), []).append(head)
    return [HeadGroup(layer, k_head, tuple(qs)) for (layer, k_head), qs in grouped.items()]


def _count(folder: QKFolder, kind: str, heads: frozenset[tuple[int, int]]) -> int:
    if not heads:
        raise ArtefactError(f"no {kind} vectors here", where=folder.path, fix="capture both kinds")
    return 1 + max(head for _, head in heads)


def _group_size(folder: QKFolder, num_q: int, num_k: int, *, given: bool) -> int:
    """Query heads for each key head."""
    if num_q % num_k == 0:
        return num_q // num_k
    if given:
        raise SettingsError(
            f"num_q_heads={num_q} is not a multiple of num_k_heads={num_k}",
            fix="give the model's own counts",
        )
    # A partial capture shows too few heads to divide; the size that explains every key is unique
    # unless very few heads were kept.
    fits = [
        size
        for size in range(1, num_q + 1)
        if {(layer, head // size) for layer, head in folder.queries} == folder.keys
    ]
    if len(fits) != 1:
        raise ArtefactError(
            f"cannot tell which of {num_k} key heads serves which of {num_q} query heads",
            where=folder.path,
            fix="give num_q_heads and num_k_heads in a --config file, or capture the missing heads",
        )
    return fits[0]


def read_vectors(path: Path, *, max_rows: int | None = None, seed: int = 0) -> VectorTable:
    """Read one file; above `max_rows`, a sample without replacement in the order it was drawn."""
    file = _open(path)
    dim = _check_schema(file.schema_arrow, path)
    num_rows = file.metadata.num_rows
    if num_rows == 0:
        raise ArtefactError("the file has no rows", where=path, fix="capture this head again")
    target = np.arange(num_rows)  # where each row of the file goes; num_rows = nowhere
    kept = num_rows
    if max_rows is not None and num_rows > max_rows:
        chosen = np.random.default_rng(seed).choice(num_rows, max_rows, replace=False)
        target, kept = np.full(num_rows, num_rows), max_rows
        target[chosen] = np.arange(max_rows)
    vectors = np.empty((kept, dim), dtype=np.float32)
    columns = {name: np.empty(kept, dtype=np.int64) for name in COLUMNS[:3]}
    start = 0
    windows: set[int | None] = set()
    for part, rows in _batches(file, path, dim):
        place = target[start : start + len(rows)]
        start += len(rows)
        keep = place < num_rows
        vectors[place[keep]] = rows[keep]
        for name, values in columns.items():
            values[place[keep]] = _integers(part, name, path)[keep]
        windows |= _windows(part, keep, path)
    window = _one_window(windows, path)
    return VectorTable(
        vectors, columns["position"], columns["bucket"], columns["example_id"], window
    )


def orientation_of(table: VectorTable) -> Float[np.ndarray, " dim"]:
    """The sign of each component's mean over buckets of the bucket mean; 0 counts as +1."""
    numbers, index = np.unique(table.bucket, return_inverse=True)
    sums = np.zeros((len(numbers), table.vectors.shape[1]))
    # One-hot products of cache-sized parts: one pass over the vectors, summed in float64.
    for start in range(0, len(index), BATCH_ROWS):
        part = table.vectors[start : start + BATCH_ROWS].astype(np.float64)
        onehot = index[None, start : start + BATCH_ROWS] == np.arange(len(numbers))[:, None]
        sums += onehot.astype(np.float64) @ part
    means = sums / np.bincount(index)[:, None]
    return np.where(means.mean(axis=0) < 0, -1.0, 1.0)


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise ArtefactError(
            f"no vectors for {path.parent.name}",
            where=path,
            fix="capture this head, or leave it out",
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ArtefactError:
    first_line = str(error).splitlines()[0]
    return ArtefactError(
        f"not a readable Parquet file ({first_line})",
        where=path,
        fix="capture or download it again; it may be cut off",
    )


def _check_schema(schema: Any, path: Path) -> int:
    """Check names and types before any data is read; returns the head's dimension."""
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise ArtefactError(
            f"missing column{'s' * (len(missing) > 1)} {', '.join(missing)}",
            where=path,
            fix=f"the columns are {', '.join(COLUMNS)} and, if any, sliding_window",
        )
    for name in COLUMNS[:3]:
        if not pa.types.is_integer(schema.field(name).type):
            raise _wrong_type(name, schema, "an integer", path)
    vector = schema.field("vector").type
    if not pa.types.is_fixed_size_list(vector) or not pa.types.is_floating(vector.value_type):
        raise _wrong_type("vector", schema, "a fixed-size list of floats", path)
    return int(vector.list_size)


def _wrong_type(name: str, schema: Any, expected: str, path: Path) -> ArtefactError:
    return ArtefactError(
        f"column {name} is {schema.field(name).type}, expected {expected}",
        where=path,
        fix="write it as `headwise capture` does: vector fixed_size_list<float32>, the rest int32",
    )


def _batches(file: Any, path: Path, dim: int) -> Iterator[tuple[Any, np.ndarray]]:
    names = [*COLUMNS, *(["sliding_window"] if "sliding_window" in file.schema_arrow.names else [])]
    try:
        for part in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
            yield part, _matrix(part, path, dim)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _matrix(part: Any, path: Path, dim: int) -> Float32[np.ndarray, "row dim"]:
    column = part.column("vector")
    flat = column.values.slice(column.offset * dim, len(column) * dim)
    if column.null_count or flat.null_count:
        raise ArtefactError("column vector holds nulls", where=path, fix="capture this head again")
    rows = np.asarray(_view(flat), dtype=np.float32).reshape(-1, dim)
    # A sum is finite unless a term is not, or it overflows: only then look at each value.
    if not np.isfinite(rows.sum()):
        bad = int((~np.isfinite(rows)).any(axis=1).sum())
        if bad:
            raise ArtefactError(
                f"at least {bad} vectors hold NaN or infinity",
                where=path,
                fix="capture this head again; float16 overflows in some models, try float32",
            )
    return rows


def _integers(part: Any, name: str, path: Path) -> Int[np.ndarray, " row"]:
    column = part.column(name)
    if column.null_count:
        raise ArtefactError(f"column {name} holds nulls", where=path, fix="capture this head again")
    return np.asarray(_view(column), dtype=np.int64)


def _view(values: Any) -> np.ndarray:
    """An Arrow array without nulls as numpy; its own `to_numpy` would import pandas (0.4 s)."""
    view: np.ndarray = np.from_dlpack(values)
    return view


def _windows(part: Any, keep: Bool[np.ndarray, " row"], path: Path) -> set[int | None]:
    """The distinct windows of the kept rows; null, NaN and non-positive mean full attention."""
    if "sliding_window" not in part.schema.names:
        return {None}
    column = part.column("sliding_window")
    if pa.types.is_null(column.type):
        return {None}
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise _wrong_type("sliding_window", part.schema, "an integer", path)
    values = _view(column.cast(pa.float64()).fill_null(0.0))[keep]
    return {int(value) if value >= 1 else None for value in np.unique(values)}


def _one_window(windows: set[int | None], path: Path) -> int | None:
    if len(windows) > 1:
        listed = ", ".join(sorted("none" if w is None else str(w) for w in windows))
        raise ArtefactError(
            f"rows disagree about sliding_window: {listed}",
            where=path,
            fix="one head has one window",
        )
    return next(iter(windows), None)
