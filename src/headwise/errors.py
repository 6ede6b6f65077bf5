"""Every failure headwise knows: what went wrong, where, and how to mend it.

The command line prints `str(error)` and exits with 1; a library user catches `HeadwiseError`.
"""

from __future__ import annotations

_LONGEST = 500  # characters of a place: a path may be what somebody pasted


class HeadwiseError(Exception):
    """A known failure. The message says what, where and how to fix it."""

    def __init__(self, what: str, *, where: object | None = None, fix: str | None = None) -> None:
        lines = [what]
        if where is not None:
            lines.append(f"  where  {str(where)[:_LONGEST]}")
        if fix is not None:
            lines.append("  fix    " + fix.replace("\n", "\n         "))
        super().__init__("\n".join(lines))


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
