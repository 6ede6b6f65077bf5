"""What a diagnosis depends on besides the model and the texts; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge
from typing_extensions import Doc

from headwise.errors import SettingsError
from headwise.keywords import BatchSize, MaxLength


@dataclass(frozen=True)
class Thresholds:
    """Where the classes begin: mass of the first token, and entropy in nats."""

    # `Finite` says the same of a field, but importing it would load numpy for every `--help`
    __pydantic_config__: ClassVar[dict[str, bool]] = {"allow_inf_nan": False}
    dead: Annotated[float, Doc("Dead above this first-token mass.")] = 0.95
    sink: Annotated[float, Doc("A sink above this first-token mass.")] = 0.50
    low_entropy: Annotated[float, Doc("Low entropy below this, nats.")] = 0.50
    role: Annotated[float, Doc("A role is named above this excess.")] = 0.20

    def __post_init__(self) -> None:
        if not 0 <= self.sink <= self.dead <= 1:
            raise SettingsError(
                f"thresholds must be 0 <= sink <= dead <= 1, not sink {self.sink} and dead "
                f"{self.dead}",
                fix="a dead head is a sink too: raise --dead or lower --sink",
            )
        if not math.isfinite(self.low_entropy):
            raise SettingsError(
                f"the entropy below which a head counts as low is {self.low_entropy}",
                fix="pass a number of nats to --low-entropy",
            )


@dataclass(frozen=True)
class DiagnoseSettings:
    """Keywords of `diagnose` and `survey`, options of both verbs."""

    max_length: MaxLength = 512
    batch_size: BatchSize = 4
    skip_queries: Annotated[int, Doc("Leave out the first N queries."), Ge(0)] = 0
    thresholds: Thresholds = field(default_factory=Thresholds)
