"""Tensors on disk: safetensors files, written atomically, with a checksum of all they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from headwise.artefacts import require_regular, write_atomically
from headwise.errors import ArtefactError
from headwise.integrity.checksums import CHECKSUM, require_same

_METADATA = "__metadata__"
LARGEST_HEADER = 100_000_000  # bytes; the library's own limit
_CHUNK = 1 << 20


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, atomically; the library writes metadata in random order, we do not."""
    raw = save_safetensors(dict(tensors))
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    data = memoryview(raw)[8 + size :]
    told = dict(sorted((metadata or {}).items()))
    told[CHECKSUM] = _checksum(header, told, [data])
    text = json.dumps({_METADATA: told, **header}, separators=(",", ":")).encode()
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
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def verified_metadata(path: Path, schema: str | None = None) -> dict[str, str]:
    """The metadata of a safetensors file whose header and data are what was written."""
    try:
        require_regular(path)
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, LARGEST_HEADER)))
            told = header.pop(_METADATA, {})
            require_length(header, 8 + size, Path(path).stat().st_size)
            found = _checksum(header, told, iter(lambda: file.read(_CHUNK), b""))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ArtefactError("no such file", where=path, fix="check the path") from None
    except (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        raise _unreadable(path, error) from None
    noun = "file" if schema is None else schema.removeprefix("headwise.").partition("/")[0]
    if schema is not None and told.get("schema") != schema:
        raise ArtefactError(f"not a headwise {noun}", where=path, fix=f"expected {schema}")
    fix = "take an undamaged copy, or make it again with this version of headwise"
    require_same(found, told.pop(CHECKSUM, None), path, fix, f"the {noun}")
    return dict(told)


def require_length(header: Mapping[str, Any], start: int, length: int) -> None:
    """Raise ValueError if a file of this length lacks data that its header speaks of."""
    ends = [part["data_offsets"][1] for part in header.values()]
    if start + max(ends, default=0) > length:
        raise ValueError("it is cut off")


def _checksum(
    header: Mapping[str, Any], metadata: Mapping[str, str], data: Iterable[bytes | memoryview]
) -> str:
    """Of names, types, shapes, metadata and bits."""
    told = {key: value for key, value in metadata.items() if key != CHECKSUM}
    digest = hashlib.sha256(json.dumps([told, header], sort_keys=True).encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> ArtefactError:
    what = getattr(error, "strerror", None) or str(error)[:200] or type(error).__name__
    return ArtefactError(
        f"not a complete safetensors file ({what})", where=path, fix="write or copy it again"
    )
