"""What a triage depends on besides the model, the diagnosis and the texts; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge
from pydantic import Field
from typing_extensions import Doc

from headwise.keywords import MaxLength, Seed

Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class TriageThresholds:
    """What counts as nothing, and how often a discovery may be false; nats per token."""

    negligible: Annotated[
        Finite, Doc("A change of loss below this counts as none (nats per token).")
    ] = 0.005
    gain: Finite = 0.002  # a gain below this is not worth a treatment
    parked_ratio: Finite = 1.5  # well above: this many times, and by more than the negligible
    false_discovery_rate: Finite = 0.05


@dataclass(frozen=True)
class TriageSettings:
    """How much text, how doses are set, and what the classes rest on."""

    max_texts: Annotated[int, Doc("Documents to use at most."), Ge(2)] = 64
    max_length: MaxLength = 256
    dose: Annotated[float, Doc("How much of a release is tried.")] = 1.0
    seed: Seed = 0
    thresholds: TriageThresholds = field(default_factory=TriageThresholds)
