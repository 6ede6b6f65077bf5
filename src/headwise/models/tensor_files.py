"""Safetensors files: headwise's own, written atomically with a checksum, and those of models.

Nothing here knows a model: `stored_weights` streams one from these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from headwise.artefacts import is_there, read_json, require_file, write_atomically
from headwise.errors import ArtefactError, ModelError, reported_as
from headwise.integrity.checksums import CHECKSUM, require_same

METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000  # bytes; the library's own limit
_WEIGHTS = "model.safetensors"
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 20


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, atomically; the library writes metadata in random order, we do not."""
    raw = save_safetensors(dict(tensors))
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    data = memoryview(raw)[8 + size :]
    entries = dict(sorted((metadata or {}).items()))
    entries[CHECKSUM] = _checksum(header, entries, [data])
    text = json.dumps({METADATA: entries, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data stays aligned

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(data)

    return write_atomically(path, write)


def read_safetensors(
    path: Path, schema: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of one safetensors file, if its checksum and schema match."""
    metadata = verified_metadata(path, schema)
    with _readable(path, SafetensorError, OSError), safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def verified_metadata(path: Path, schema: str | None = None) -> dict[str, str]:
    """The metadata of a safetensors file whose header and data are what was written."""
    with _readable(
        path, OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError
    ):
        require_file(path)
        header, start = read_header(Path(path))
        metadata = header.pop(METADATA, {})
        with Path(path).open("rb") as file:
            file.seek(start)
            checksum = _checksum(header, metadata, iter(lambda: file.read(_CHUNK), b""))
    noun = "file" if schema is None else schema.removeprefix("headwise.").partition("/")[0]
    if schema is not None and metadata.get("schema") != schema:
        raise ArtefactError(f"not a headwise {noun}", where=path, fix=f"expected {schema}")
    fix = "take an undamaged copy, or make it again with this version of headwise"
    require_same(checksum, metadata.pop(CHECKSUM, None), path, fix, f"the {noun}")
    return dict(metadata)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, with METADATA where it has any, and where its data starts.

    Raises ValueError if the file is shorter than its header says.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, _LARGEST_HEADER)))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != METADATA]
    if 8 + size + max(ends, default=0) > path.stat().st_size:
        raise ValueError("it is cut off")
    return header, 8 + size


def _checksum(
    header: Mapping[str, Any], metadata: Mapping[str, str], data: Iterable[bytes | memoryview]
) -> str:
    """Of names, types, shapes, metadata and bits."""
    entries = {key: value for key, value in metadata.items() if key != CHECKSUM}
    digest = hashlib.sha256(json.dumps([entries, header], sort_keys=True).encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _readable(path: Path, *causes: type[Exception]) -> AbstractContextManager[None]:
    what, fix = "not a complete safetensors file", "write or copy it again"
    return reported_as(ArtefactError, what, *causes, where=path, fix=fix)


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers from `start` to `stop`, as one row."""
        size = self.dtype.itemsize
        buffer = bytearray((stop - start) * size)
        with self.file.open("rb") as file:
            file.seek(self.offset + start * size)
            if file.readinto(buffer) != len(buffer):
                raise ModelError("the weight file is cut off", where=self.file, fix="copy it again")
        return torch.frombuffer(buffer, dtype=self.dtype) if buffer else torch.empty(0)

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all safetensors files of a model directory."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        with reported_as(
            ModelError,
            "the weight file is damaged or cut off",
            SafetensorError,
            OSError,
            ValueError,
            LookupError,
            where=path,
            fix="download or copy the weights again",
        ):
            tensors |= _tensors_of(path)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read; others may lie beside them."""
    if is_there(folder / _WEIGHTS):
        return [folder / _WEIGHTS]
    path = folder / f"{_WEIGHTS}.index.json"
    if not is_there(path):
        return sorted(folder.glob("*.safetensors"))
    names = read_json(path).get("weight_map")
    named = set(names.values()) if isinstance(names, dict) else set()
    if not named or not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise ModelError(
            "its index does not name weight files of this folder",
            where=path,
            fix="download or copy the model again; a shard lies beside its index",
        )
    return [folder / name for name in sorted(named)]


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    # Checks places, types and shapes of all tensors. For "pt" the file would be mapped twice,
    # which a process that is limited to less than two of its files cannot.
    with safe_open(str(path), framework="numpy"):
        pass
    header, start = read_header(path)
    header.pop(METADATA, None)
    return {
        name: StoredTensor(
            path,
            start + int(entry["data_offsets"][0]),
            TYPES.get(entry["dtype"], torch.uint8),
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }
