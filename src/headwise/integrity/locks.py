"""One folder, one writer: a lock file with the process and the host that hold it.

The system's own lock on the file ends with the process, however it ends, so a lock that a killed
process left behind is known to be stale: it can be taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwise.errors import ArtefactError

LOCK = ".lock"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the folder while open; a second process is refused at once.

    Of the processes of one distributed run (torchrun's RANK) the first one holds it for all.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    path = Path(folder) / LOCK
    descriptor = _acquired(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquired(path: Path) -> int:
    """An open and locked file at `path`; another process may remove the one that was opened."""
    while True:
        descriptor = _opened(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(path)
            os.close(descriptor)
            raise ArtefactError(
                f"another process writes here: {holder}",
                where=path.parent,
                fix="wait until it ends, or choose another --out",
            ) from None
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                told = {"pid": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(told).encode(), 0)
                return descriptor
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ArtefactError(
            f"cannot write there: {error.strerror}",
            where=path.parent,
            fix="choose a writable folder for --out",
        ) from None


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_text())
        return f"process {told['pid']} on {told['host']}"
    return "a process that did not say its number yet"
