"""The cache of GGUF files made into model directories: where it is, what it holds, and its bound.

A conversion is a folder named by the hash of the GGUF file's bytes. What was not used for the
longest time makes room when the cache grows over its bound; nothing else lies in there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headwise.artefacts import read_json
from headwise.errors import ModelError

SOURCE, WEIGHTS = "source.json", "model.safetensors"
BOUND = 32e9  # bytes of all conversions together; a single larger model is still kept


def cache_folder() -> Path:
    """HEADWISE_CACHE, else below the home directory; a container's user may have none."""
    if os.environ.get("HEADWISE_CACHE"):
        return Path(os.environ["HEADWISE_CACHE"]) / "gguf"
    try:
        return Path.home() / ".cache" / "headwise" / "gguf"
    except RuntimeError:
        raise ModelError(
            "there is no home directory to keep the converted GGUF file in",
            fix="set HEADWISE_CACHE to a folder with room for the model",
        ) from None


def conversions() -> list[Path]:
    """The folders of the cache, the longest unused first."""
    folder = cache_folder()
    return sorted(folder.iterdir(), key=last_used) if folder.is_dir() else []


def last_used(folder: Path) -> float:
    """When a conversion was last loaded, in seconds since the epoch."""
    source = folder / SOURCE
    return (source if source.is_file() else folder).stat().st_mtime


def source_of(folder: Path) -> str:
    """The name of the GGUF file; a folder without its last file is half a conversion."""
    source = folder / SOURCE
    return str(read_json(source).get("file", "")) if source.is_file() else "unfinished"


def size_of(folder: Path) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def clear_conversions() -> int:
    """Delete every conversion; returns how many bytes that frees. They are made again at need."""
    freed = 0
    for folder in conversions():
        freed += size_of(folder)
        shutil.rmtree(folder)
    return freed


def make_room(kept: Path, bound: float = BOUND) -> None:
    """Delete what was not used for the longest time until the cache is within its bound."""
    total = sum(map(size_of, conversions()))
    for folder in conversions():
        if total > bound and folder != kept:
            total -= size_of(folder)
            shutil.rmtree(folder)
