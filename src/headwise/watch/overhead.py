"""When to look: every N steps, or as often as a share of the training time allows.

Time that the watch itself takes is measured and never counted as training. A reading is made if
all readings so far and one more like the last would stay within the share. The first one is made
whatever it costs: a film needs a beginning, and nothing is known before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headwise.artefacts import save_artefact

FILM_LENGTH = 200  # readings of a run whose length is known, if the budget allows so many
SPACING = 10  # steps between readings of a run whose length is not
OVERHEAD = "overhead.json"


@dataclass
class Overhead:
    """What watching has cost, measured in the run itself, and whether it may look again."""

    every: int | None
    limit: float  # share of the training time that watching may take
    total_steps: int | None = None
    clock: Callable[[], float] = time.perf_counter
    watch_seconds: float = 0.0
    last_seconds: float = 0.0
    readings: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def training_seconds(self) -> float:
        """Time since the start that was not the watch's own."""
        return self.clock() - self.started - self.watch_seconds

    @property
    def share(self) -> float:
        """Watching, as a share of training."""
        return self.watch_seconds / max(self.training_seconds, 1e-9)

    def save(self, folder: Path) -> Path:
        """Write `overhead.json`, apart from the film: times never repeat to the bit."""
        training = self.training_seconds
        body = {
            "readings": self.readings,
            "watch_seconds": self.watch_seconds,
            "training_seconds": training,
            "share": self.watch_seconds / max(training, 1e-9),
        }
        return save_artefact(folder / OVERHEAD, "overhead", body)

    @property
    def spacing(self) -> int:
        """Steps between readings, at least."""
        if self.every is not None:
            return self.every
        return max(1, self.total_steps // FILM_LENGTH) if self.total_steps else SPACING

    def allows(self, step: int) -> bool:
        """Whether to look after this step."""
        if step % self.spacing:
            return False
        if self.every is not None or not self.readings:
            return True
        spent = self.watch_seconds + self.last_seconds
        return spent <= self.limit * self.training_seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Time inside is the watch's own."""
        start = self.clock()
        try:
            yield
        finally:
            self.last_seconds = self.clock() - start
            self.watch_seconds += self.last_seconds
