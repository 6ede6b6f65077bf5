"""Every failure headwise knows: what went wrong, where, and how to mend it.

The command line prints `str(error)` and exits with 1; a library user catches `HeadwiseError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 500  # characters of a place: a path may be what somebody pasted

# All control characters but the line break and the tab: a terminal would obey an escape sequence.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Text with its control characters written out: names of files and metadata may hold any."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class HeadwiseError(Exception):
    """A known failure. The message says what, where and how to fix it."""

    def __init__(self, what: str, *, where: object | None = None, fix: str | None = None) -> None:
        lines = [what]
        if where is not None:
            lines.append(f"  where  {str(where)[:_LONGEST]}")
        if fix is not None:
            lines.append("  fix    " + fix.replace("\n", "\n         "))
        super().__init__(visible("\n".join(lines)))


@contextmanager
def reported_as(
    kind: type[HeadwiseError],
    what: str,
    *causes: type[Exception],
    where: object | None = None,
    fix: str | None = None,
) -> Iterator[None]:
    """Report these exceptions (default: any) as a known failure: `what`, and the cause behind it.

    A `HeadwiseError` is one already and passes.
    """
    expected = causes or (Exception,)
    try:
        yield
    except HeadwiseError:
        raise
    except expected as error:
        raise kind(f"{what} ({cause(error)})", where=where, fix=fix) from None


def cause(error: BaseException) -> str:
    """What an exception of another library says, in one line."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return " ".join(text.split())[:300]


class UnknownArchitectureError(HeadwiseError):
    """The model family has no row in the architecture table, or its heads are not separable."""


class ModelError(HeadwiseError):
    """A model, tokenizer or weight file cannot be used."""


class TextError(HeadwiseError):
    """Texts or a corpus are missing, empty, or too short for the task."""


class ArtefactError(HeadwiseError):
    """A file is missing, truncated, of another schema, or belongs to something else."""


class SelectionError(HeadwiseError):
    """A head selection or a plan names something that does not exist."""


class TrainingError(HeadwiseError):
    """Training cannot start or had to stop; what was saved is named in the message."""


class SettingsError(HeadwiseError):
    """A configuration file has an unknown key or a value of the wrong kind."""
