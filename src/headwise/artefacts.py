"""Files that last: JSON artefacts with a schema and provenance, written atomically.

Invariants: a reader sees the old file or the new one, never half of one; the same inputs give the
same bytes (no timestamps, sorted keys, shortest round-trip floats); an unknown schema, a cut-off
file and a NaN are errors with a remedy, never a guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from headwise.errors import ArtefactError, reported_as
from headwise.integrity.checksums import CHECKSUM, check_text, sealed_text
from headwise.ranks import is_first, may_write

SCHEMA_VERSION = 1
TEMPORARY = ".headwise-tmp"  # how half-written files end


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, flush it to disk and rename it.

    Of several processes that work as one only the first writes.
    """
    path = Path(path)
    if not may_write():
        return path
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        raise ArtefactError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=path.parent,
            fix="free disk space or choose a writable --out; earlier files there are untouched",
        ) from None
    finally:
        with contextlib.suppress(OSError):  # OSError: a name that no disk can hold
            temporary.unlink()
    return path


def temporary_beside(path: Path) -> Path:
    """A name for what will become `path`; its checksum of itself shows that headwise chose it."""
    name = f".{path.name}.{secrets.token_hex(4)}"
    return path.with_name(name + _seal_of(name))


def is_temporary(path: Path) -> bool:
    """Whether headwise chose this name: another program's file may end as ours do."""
    name = path.name[: -len(_seal_of(""))]
    return path.name == name + _seal_of(name) and not path.is_symlink()


def _seal_of(name: str) -> str:
    return f"-{content_hash([name])[:8]}{TEMPORARY}"


def sweep(folder: Path) -> None:
    """Remove the temporary files that a killed process left; only whoever resumes may call it."""
    if not is_first():
        return
    for half_written in Path(folder).rglob(f".*{TEMPORARY}"):
        if half_written.is_file() and is_temporary(half_written):
            half_written.unlink(missing_ok=True)


def own_folder(path: Path) -> Path:
    """A folder that headwise fills and empties; a link there would lead to somebody else's."""
    if path.is_symlink():
        raise ArtefactError(
            f"{path.name} is a link", where=path.parent, fix="move it away, or choose another --out"
        )
    return path


def remove_files(folder: Path, *patterns: str) -> None:
    """Remove headwise's own files of a folder, and the folder if nothing else is in it."""
    for pattern in patterns:
        for path in own_folder(folder).glob(pattern):
            if path.is_file() and not path.is_symlink():
                path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_bytes(path: Path, content: bytes) -> Path:
    """Write `content` to `path` atomically."""
    return write_atomically(path, lambda file: file.write(content))


def write_text(path: Path, content: str) -> Path:
    """Write `content` to `path` atomically, as UTF-8."""
    return write_bytes(path, content.encode())


def to_json(value: Any) -> str:
    """Serialise with sorted keys; one line per innermost list so that diffs stay readable."""
    return _pretty(value, 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    pad, close = " " * (depth + 1), " " * depth
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(str(k))}: {_pretty(value[k], depth + 1)}" for k in sorted(value)]
        return "{\n" + ",\n".join(rows) + f"\n{close}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(v, (dict, list, tuple)) for v in value):
        return "[\n" + ",\n".join(pad + _pretty(v, depth + 1) for v in value) + f"\n{close}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def save_artefact(path: Path, kind: str, body: dict[str, Any]) -> Path:
    """Write one JSON artefact of schema `headwise.<kind>/1`."""
    what = f"{path.name} would hold a NaN or infinity"  # which json refuses
    with reported_as(ArtefactError, what, ValueError, where=path):
        text = to_json({"schema": f"headwise.{kind}/{SCHEMA_VERSION}", **body})
    return write_text(path, sealed_text(text))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; a missing, cut-off or damaged file is an `ArtefactError`."""
    path = Path(path)
    text = read_text(path)
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise ArtefactError(
            "it holds no JSON object", where=path, fix="pass the right file, or write it again"
        )
    check_text(text, path)
    value.pop(CHECKSUM, None)
    return value


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; a name that no disk can hold is none."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def require_regular(path: Path) -> None:
    """Refuse a pipe or a device, on which a reader would wait for ever (OSError: nothing there)."""
    mode = Path(path).stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ArtefactError(
            "neither a file nor a folder, but a pipe or a device",
            where=path,
            fix="save its content in a file first",
        )


def require_file(path: Path) -> None:
    """Refuse what is no file: nothing, a folder, a pipe (OSError: a name that no disk can hold)."""
    if Path(path).is_dir() or not Path(path).exists():
        raise ArtefactError("no such file", where=path, fix="check the path")
    require_regular(path)


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; what cannot be read is an `ArtefactError`."""
    rights = "check the path and its rights"
    damaged = "write it again; it may be damaged"
    with (
        # ValueError: a path with a null byte
        reported_as(ArtefactError, "cannot be read", OSError, ValueError, where=path, fix=rights),
        reported_as(ArtefactError, "not UTF-8 text", UnicodeDecodeError, where=path, fix=damaged),
    ):
        require_file(path)
        return Path(path).read_text(encoding="utf-8")


def parse_json(text: str, where: object, kind: str = "JSON") -> Any:
    """JSON of any kind; what is cut off, too deep or has absurd digits is an `ArtefactError`."""
    what, fix = f"not a complete {kind} file", "write it again; it may be cut off"
    with reported_as(ArtefactError, what, ValueError, RecursionError, where=where, fix=fix):
        return json.loads(text)


def load_artefact(path: Path, kind: str | Iterable[str]) -> dict[str, Any]:
    """Read one JSON artefact and check its schema; `kind` may name several accepted kinds."""
    path = Path(path)
    kinds = [kind] if isinstance(kind, str) else list(kind)
    body = read_json(path)
    accepted = [f"headwise.{k}/{SCHEMA_VERSION}" for k in kinds]
    if body.get("schema") not in accepted:
        raise ArtefactError(
            f"schema is {body.get('schema')!r}, expected {' or '.join(accepted)}",
            where=path,
            fix="pass the right file, or the headwise version that wrote it",
        )
    return body


def versions() -> dict[str, str]:
    """The versions that can change a number."""
    numbers = {}
    for package in ("headwise", "torch", "transformers", "numpy", "scipy"):
        with contextlib.suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return numbers


def content_hash(parts: Iterable[bytes | str]) -> str:
    """A SHA-256 over length-prefixed parts, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def read_lines(path: Path) -> list[Any]:
    """The rows of a .jsonl file, [] if there is none."""
    if not path.exists():
        return []
    return [parse_json(line, path, ".jsonl") for line in read_text(path).splitlines() if line]
