"""The table of a campaign."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

KEPT_EXAMPLES = 5
SECONDS = 30  # between two lines that say how far a campaign has come


@dataclass
class Tally:
    """Counts by kind; `wrong` is a wrong result or a traceback, `lost` is lost work or a hang."""

    name: str
    tried: Counter = field(default_factory=Counter)
    survived: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    lost: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)  # how they survived
    examples: list[str] = field(default_factory=list)

    told_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def until_stopped(self):
        """Ctrl-C and SIGTERM end the campaign; the table says what was tried before."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt:
            self.notes["stopped early"] += 1
        finally:
            signal.signal(signal.SIGTERM, before)

    def _counted(self, kind, count):
        self.tried[kind] += count
        if time.monotonic() > self.told_at + SECONDS:
            self.told_at = time.monotonic()
            failed = self.wrong.total() + self.lost.total()
            sys.stderr.write(f"{self.name}: {self.tried.total():,} tried, {failed} not survived\n")

    def survives(self, kind, how, count=1):
        self._counted(kind, count)
        self.survived[kind] += count
        self.notes[how] += count

    def fails(self, kind, example, *, lost=False):
        self._counted(kind, 1)
        (self.lost if lost else self.wrong)[kind] += 1
        example = f"{kind}: {example}"[:1500]
        sys.stderr.write(f"not survived: {example}\n")
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(example)

    @property
    def clean(self):
        return not self.wrong and not self.lost

    def __str__(self):
        columns = (self.tried, self.survived, self.wrong, self.lost)
        rows = [[kind, *(str(column[kind]) for column in columns)] for kind in sorted(self.tried)]
        rows.append(["all", *(str(column.total()) for column in columns)])
        lines = [f"| {self.name} | tried | survived | wrong | lost |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", ", ".join(f"{how}: {n}" for how, n in sorted(self.notes.items()))]
        return "\n".join([*lines, *self.examples])

    def told(self):
        sys.stdout.write(f"{self}\n")
        sys.stdout.flush()
        return self
