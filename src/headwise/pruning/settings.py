"""What `prune` and `stream` depend on besides the model and the texts; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge
from typing_extensions import Doc

from headwise.errors import SettingsError
from headwise.keywords import MaxLength, Seed

Replacement = Literal["mean", "zero"]


@dataclass(frozen=True)
class SearchSettings:
    """How much loss a set may cost, and how much is measured to find the largest."""

    max_loss: Annotated[float, Doc("What the set may cost, nats per token.")] = 0.01
    max_texts: Annotated[int, Doc("Documents at most: to choose, validate and check."), Ge(2)] = 64
    exact: Annotated[
        int, Doc("Costs measured exactly; of more, those that first-order estimates name."), Ge(1)
    ] = 128
    width: Annotated[
        int, Doc("Tried in each step of the search; 1: the order of their own costs."), Ge(1)
    ] = 3
    most: Annotated[int | None, Doc("Take at most so many."), Ge(1)] = None
    curve: Annotated[int, Doc("Points of the curve beside other orders."), Ge(0)] = 5
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_loss) and self.max_loss >= 0):
            raise SettingsError(
                f"a set cannot be asked to cost at most {self.max_loss} nats per token",
                fix="pass --max-loss 0 (nothing that costs) or more",
            )


@dataclass(frozen=True)
class PruneSettings:
    """Keywords of `prune`, options of `headwise prune`."""

    search: SearchSettings = field(default_factory=SearchSettings)
    replacement: Annotated[Replacement, Doc("What a head gives when it is out.")] = "mean"
    even: Annotated[bool, Doc("As many from every layer, so that apply --shrink can.")] = False
    max_length: MaxLength = 256


@dataclass(frozen=True)
class StreamSettings:
    """Keywords of `stream`, options of `headwise stream`."""

    search: SearchSettings = field(default_factory=SearchSettings)
    first: Annotated[int, Doc("First tokens that every group keeps."), Ge(1)] = 64
    recent: Annotated[int, Doc("Recent tokens that every group keeps."), Ge(1)] = 256
    context: Annotated[int, Doc("Tokens for which saved bytes are told."), Ge(1)] = 32768
    max_length: MaxLength = 2048
