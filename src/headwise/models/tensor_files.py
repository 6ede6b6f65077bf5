"""Tensors and arrays on disk: safetensors and .npy files, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from headwise.artefacts import write_atomically
from headwise.errors import ArtefactError


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, atomically; the library writes metadata in random order, we do not."""
    raw = save_safetensors(dict(tensors))
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data stays aligned

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(memoryview(raw)[8 + size :])

    return write_atomically(path, write)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of one safetensors file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ArtefactError(
            f"not a complete safetensors file ({error})", where=path, fix="write or copy it again"
        ) from None


def write_array(path: Path, array: np.ndarray) -> Path:
    """One .npy file, atomically."""
    return write_atomically(path, lambda file: np.save(file, array))
