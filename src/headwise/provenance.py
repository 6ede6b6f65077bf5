"""Where a number comes from: texts, settings and versions, as every artefact states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.values import OMITTED, Finite


@dataclass(frozen=True)
class TextInfo:
    """The identity of a text set."""

    name: str
    count: int
    sha256: str
    tokens: int | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class MeasureSettings:
    """What decides the maps of a diagnosis besides the model and the texts."""

    max_length: int
    skip_queries: int = 0
    bos: bool = False


@dataclass(frozen=True)
class Provenance:
    """What produced a diagnosis; a published map states its source instead."""

    texts: TextInfo | None = field(default=None, metadata=OMITTED)
    settings: MeasureSettings | None = field(default=None, metadata=OMITTED)
    versions: Mapping[str, str] | None = field(default=None, metadata=OMITTED)
    source: str | None = field(default=None, metadata=OMITTED)
    resolution: Finite | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Decisions:
    """How documents were taken in stages, and how much of all the work it took."""

    method: str
    looks: tuple[int, ...]  # documents at each look
    error_shares: tuple[Finite, ...]  # of the error of 5%, what each look spends
    share_of_all_work: Finite
