"""One folder, one writer: a lock file with the process and the host that hold it.

The system's own lock on the file (`filelock`) ends with the process, however it ends, so a lock
that a killed process left behind is known to be stale: it can be taken.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from headwise.errors import ArtefactError
from headwise.ranks import launched_place

LOCK = ".lock"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the folder while open; a second process is refused at once.

    Of the processes of one distributed run (torchrun's RANK) the first one holds it for all.
    """
    if launched_place().rank:
        yield
        return
    path = Path(folder) / LOCK
    lock = FileLock(path, blocking=False)
    _acquire(lock, path)
    try:
        yield
    finally:
        # While it is still held: whoever opened this file sees that it is gone and opens anew.
        with suppress(OSError):
            path.unlink()
        lock.release()


def _acquire(lock: FileLock, path: Path) -> None:
    """Take the lock and write this process's number into it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_own(path)
        lock.acquire()  # O_NOFOLLOW, and nothing is truncated
        # This process holds the file, and O_NOFOLLOW again: it may have been replaced meanwhile.
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "w") as file:
            file.truncate()
            json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
    except Timeout:
        raise ArtefactError(
            f"another process writes here: {_holder(path) or 'it did not say its number yet'}",
            where=path.parent,
            fix="wait until it ends, or choose another --out",
        ) from None
    except OSError as error:
        lock.release()
        raise ArtefactError(
            f"cannot write there: {error.strerror}",
            where=path.parent,
            fix="choose a writable folder for --out",
        ) from None


def _require_own(path: Path) -> None:
    """Refuse a link, and a file that is neither empty nor names a process: it would be removed."""
    if path.is_symlink():
        reason = "is a link"
    elif path.exists() and path.stat().st_size and not _holder(path):
        reason = "is a file that headwise did not write"
    else:
        return
    raise ArtefactError(
        f"{path.name} {reason}", where=path.parent, fix="move it away, or choose another --out"
    )


def _holder(path: Path) -> str:
    """The process that a lock file names; empty if it names none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    return ""
