"""What a patch says of itself, as artefacts quote it: a value without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.values import OMITTED


@dataclass(frozen=True)
class PatchPlaces:
    """Where each slice lies: parameter, axis, start and stop."""

    spans: dict[str, tuple[str, int, int, int]]


@dataclass(frozen=True)
class PatchInfo:
    """Where a patch comes from; an evaluation adds which file it was and how much it changes."""

    base_model: str = "an unknown model"
    plan: Mapping[str, object] | None = field(default=None, metadata=OMITTED)  # as JSON
    path: str | None = field(default=None, metadata=OMITTED)
    num_weights: int | None = field(default=None, metadata=OMITTED)
    sha256: str | None = field(default=None, metadata=OMITTED)  # of what its slices became

    @property
    def bos(self) -> bool | None:
        """Whether the texts of its training started with a BOS; None if its plan does not say."""
        found = (self.plan or {}).get("bos")
        return found if isinstance(found, bool) else None
