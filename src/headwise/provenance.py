"""Where a number comes from: texts, settings and versions, as every artefact states them.

And whose it is: `Origin` is what an artefact is of, and `require_same_origin` is the one place that
refuses to read two things together that are not of the same model, patch, plan and seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import ArtefactError
from headwise.values import OMITTED, Finite


def text_name(name: str) -> str:
    """A text set as a sentence calls it: files without their folders, hub ids as they are."""
    parts = name.split(", ")
    return ", ".join(Path(p).name if p[:1] in "/." or Path(p).suffix else p for p in parts)


@dataclass(frozen=True)
class TextInfo:
    """The identity of a text set."""

    name: str
    count: int
    sha256: str
    tokens: int | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class MeasureSettings:
    """What decides the numbers of a diagnosis or evaluation besides the model and the texts."""

    max_length: int
    skip_queries: int = 0
    bos: bool = False
    max_texts: int | None = field(default=None, metadata=OMITTED)  # on which heads are judged
    seed: int | None = field(default=None, metadata=OMITTED)  # of bootstraps
    # losses are of whole texts, not of their first `max_length` tokens
    whole: bool = field(default=False, metadata=OMITTED)


@dataclass(frozen=True)
class Provenance:
    """What produced an artefact; a published map states its source instead."""

    texts: TextInfo | None = field(default=None, metadata=OMITTED)
    settings: MeasureSettings | None = field(default=None, metadata=OMITTED)
    versions: Mapping[str, str] | None = field(default=None, metadata=OMITTED)
    source: str | None = field(default=None, metadata=OMITTED)
    resolution: Finite | None = field(default=None, metadata=OMITTED)

    @property
    def basis(self) -> str:
        """On which texts a count of heads rests: others give another count of the same heads."""
        if self.texts is None:
            return ""
        length = "" if self.settings is None else f" of at most {self.settings.max_length} tokens"
        return f"{self.texts.count} texts of {text_name(self.texts.name)}{length}"


@dataclass(frozen=True)
class Decisions:
    """How documents were taken in stages, and how much of all the work it took."""

    method: str
    looks: tuple[int, ...]  # documents at each look
    error_shares: tuple[Finite, ...]  # of the error of 5%, what each look spends
    share_of_all_work: Finite


STOCK = ""  # the patch of a model without one


@dataclass(frozen=True)
class Origin:
    """What an artefact is of, as far as it says: a field that is None is not said."""

    name: str  # the artefact itself, as a message can call it
    model: str = "an unknown model"  # the id, for people: a copy elsewhere has another
    base: str | None = None  # fingerprint of the weights before any patch
    patch: str | None = None  # hash of the (last) patch on it, `STOCK` without one
    seed: int | None = None
    kind: str | None = None  # family, shape and precision, where weights are trained on
    run: str | None = None  # identity of the run that it is of or was written by
    texts: str | None = None  # hash of the texts that were read
    evaluations: str | None = None  # hash of the evaluations that it was made from

    def differs_from(self, other: Origin) -> str:
        """In what two artefacts cannot belong together, in words; empty if in nothing."""
        for what, ours, theirs in (
            ("models", self.kind, other.kind),
            ("base weights", _short(self.model, self.base), _short(other.model, other.base)),
            ("patches", _patch(self.patch), _patch(other.patch)),
            ("seeds", self.seed, other.seed),
            ("runs", self.run, other.run),
            ("texts", _hash(self.texts), _hash(other.texts)),
            ("evaluations", _hash(self.evaluations), _hash(other.evaluations)),
        ):
            known = ours is not None and theirs is not None
            same = self.base == other.base if what == "base weights" else ours == theirs
            if known and not same:
                return f"different {what}: {ours} and {theirs}"
        return ""


def _short(model: str, base: str | None) -> str | None:
    return None if base is None else f"{model} ({base[:12]})"


def _patch(sha256: str | None) -> str | None:
    return "stock, without a patch" if sha256 == STOCK else _hash(sha256)


def _hash(value: str | None) -> str | None:
    return value and value[:12]


def require_same_origin(one: Origin, other: Origin, fix: str = "") -> None:
    """Refuse two artefacts that are read together and are not of the same thing."""
    difference = one.differs_from(other)
    if difference:
        raise ArtefactError(
            f"{one.name} and {other.name} do not belong together: {difference}",
            where=other.name,
            fix=fix or "pass the artefacts of one run",
        )
