"""What a check-up depends on besides the model and the texts; without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from headwise.errors import SettingsError
from headwise.keywords import MaxLength, Seed
from headwise.pruning.settings import SearchSettings

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class CheckupSettings:
    """Keywords of `checkup`, options of `headwise checkup`."""

    budget: Annotated[str, Doc("How long it may look: 90s, 10m, 2h.")] = "10m"
    max_length: MaxLength = 256
    max_loss: Annotated[float, Doc("What heads that go may cost, nats per token.")] = 0.01
    seed: Seed = 0

    def __post_init__(self) -> None:
        SearchSettings(max_loss=self.max_loss)  # refuses what is no limit
        if not self.seconds > 0:
            raise SettingsError(
                f"a budget of {self.budget} leaves no time to look",
                fix="pass e.g. --budget 10m; seconds (s), minutes (m) and hours (h) are understood",
            )

    @property
    def seconds(self) -> float:
        """The budget in seconds."""
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh])\s*", self.budget)
        if match is None:
            raise SettingsError(
                f"{self.budget!r} is no time", fix="write it as 90s, 10m or 2h (--budget 10m)"
            )
        return float(match[1]) * _UNITS[match[2]]
