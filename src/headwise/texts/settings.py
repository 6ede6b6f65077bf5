"""Which texts a verb reads: options of every verb that reads text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge
from typing_extensions import Doc

from headwise.errors import SettingsError

if TYPE_CHECKING:
    from headwise.texts.text_sets import TextSet


@dataclass(frozen=True)
class TextSettings:
    """Where texts are, and how a file of them is cut into texts."""

    texts: Annotated[
        Sequence[str], Doc("Text files, folders or a hub dataset; default: a bundled set.")
    ] = ()
    lines: Annotated[bool, Doc("In .txt files every line is a text.")] = False
    limit: Annotated[int | None, Doc("Read the first so many of --texts."), Ge(1)] = None

    def read(self) -> TextSet | None:
        """The texts that are named, if any."""
        from headwise.texts.text_sets import read_texts

        if not self.texts:
            if self.limit is not None:
                raise SettingsError("--limit without --texts", fix="name the texts too")
            return None
        return read_texts(self.texts, lines=self.lines).first(self.limit)
