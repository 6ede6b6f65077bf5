"""The command line: one thin function a verb, each calling one library function.

Nothing here imports torch before a verb runs, so that `headwise VERB --help` answers at once.
Exit codes: 0 done, 1 a known failure (one message, no traceback), 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from headwise.cli.app import app
from headwise.errors import HeadwiseError
from headwise.ranks import process_group, silent_unless_first

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; known failures become one message and exit code 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    sys.unraisablehook = _interrupt_again
    _write_what_can_be_written()
    try:
        with process_group() as place:
            # One of the processes that work as one: the first speaks for all, but each names its
            # own error, and does so before it leaves the group.
            try:
                with silent_unless_first():
                    app()
            except HeadwiseError as error:
                who = f" ({place})" if place.world > 1 else ""
                sys.stderr.write(f"headwise{who}: {error}\n")
                sys.exit(1)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        sys.exit(1)
    except HeadwiseError as error:
        sys.stderr.write(f"headwise: {error}\n")
        sys.exit(1)
    except OSError as error:  # a path that no disk can hold, or that may not be looked at
        where = f"\n  where  {str(error.filename)[:200]}" if error.filename else ""
        sys.stderr.write(f"headwise: {error.strerror or error}{where}\n  fix    check the path\n")
        sys.exit(1)


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """A signal that came inside a `__del__` is swallowed there: send it again, a moment later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


_AGAIN = 0.05  # seconds


def _write_what_can_be_written() -> None:
    """An ASCII terminal gets `?` for what it cannot show; a closed one gets nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _forget_stdout() -> None:
    """Python flushes standard output as it ends, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
