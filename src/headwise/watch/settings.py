"""How a watch reads its probe texts and judges heads; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwise.diagnosis.settings import Thresholds
from headwise.keywords import BatchSize, Bos, MaxLength


@dataclass(frozen=True)
class ProbeSettings:
    """Keywords of `HeadWatch` and `watch_checkpoints`, options of the verb `watch`."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    max_length: MaxLength = 128
    batch_size: BatchSize = 4
    bos: Bos = None
