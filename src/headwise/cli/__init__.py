"""The command line: one thin function a verb, each calling one library function.

Nothing here imports torch before a verb runs, so that `headwise VERB --help` answers at once.
Exit codes: 0 done, 1 a known failure (one message, no traceback), 2 wrong usage.
"""

from __future__ import annotations

import signal
import sys

from headwise.cli import handover, heads, proof, repair, study, triage, watch  # noqa: F401 - they register verbs
from headwise.cli.app import app
from headwise.errors import HeadwiseError
from headwise.ranks import Place, process_group, silent_unless_first

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; known failures become one message and exit code 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        with process_group() as place:
            _run(place)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a path that no disk can hold, or that may not be looked at
        where = f"\n  where  {str(error.filename)[:200]}" if error.filename else ""
        sys.stderr.write(f"headwise: {error.strerror or error}{where}\n  fix    check the path\n")
        sys.exit(1)


def _run(place: Place) -> None:
    """One of the processes that work as one; the first speaks for all, but each names its error."""
    try:
        with silent_unless_first():
            app()
    except HeadwiseError as error:
        who = f" ({place})" if place.world > 1 else ""
        sys.stderr.write(f"headwise{who}: {error}\n")
        sys.exit(1)
