"""A long run in one process: memory and open files stay what they were."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from campaigns import desk
from campaigns.tally import Tally
from headwise.therapy.repair import repair

WARM = 0.2  # of the steps, after which memory must be flat
GROWTH = 16 * 1024  # KB that an allocator may keep over the rest


def resident() -> int:
    """KB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def soak(folder: Path, steps: int) -> Tally:
    """Train `steps` steps with checkpoints, validations and maps, and look on."""
    tally, seen = Tally("soak"), []
    recipe = desk.RECIPE.model_copy(
        update={"steps": steps, "save_every": 10, "validate_every": 50, "map_every": 50}
    )

    def look(title, done, total, note):
        if total == steps and done % max(1, steps // 50) == 0:
            seen.append((done, resident(), len(list(Path("/proc/self/fd").iterdir()))))

    repair(desk.loaded(), desk.plan(), desk.TEXTS, recipe, out=folder / "run", progress=look)
    warm = [row for row in seen if row[0] >= WARM * steps]
    grown = warm[-1][1] - warm[0][1]
    handles = warm[-1][2] - warm[0][2]
    sys.stdout.write(f"{grown:+,} KB and {handles:+} handles from step {warm[0][0]} on\n")
    if grown > GROWTH or handles > 0:
        tally.fails("steps", f"{grown} KB, {handles} handles", lost=True)
    else:
        tally.survives("steps", "flat", steps)
    return tally
