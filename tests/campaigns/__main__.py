"""`python -m campaigns fuzz --count 1000000 --seed 0`: run one campaign and print its table."""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns")
    parser.add_argument("name", choices=("corruptions", "fuzz", "kills", "soak"))
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    asked = parser.parse_args()
    from campaigns import corruptions, desk, fuzz, kills, soak

    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        folder = Path(name)
        if asked.name == "soak":
            tally = soak.soak(folder, asked.count)
        elif asked.name == "kills":
            tally = kills.kill(folder, asked.count, asked.seed, asked.minutes)
        else:
            desk.make_artefacts(folder)
            if asked.name == "corruptions":
                tally = corruptions.corrupt(folder, asked.count, asked.seed)
            else:
                tally = fuzz.fuzz(folder, asked.count, asked.seed, asked.minutes)
        tally.told()
    sys.stdout.write(f"{time.monotonic() - started:.0f} s, {_worked():.0f} of them at work, seed ")
    sys.stdout.write(f"{asked.seed}\n")
    sys.exit(0 if tally.clean else 1)


def _worked() -> float:
    """Seconds of processor time of this process and of those it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _memory() -> str | None:
    """A folder in memory where there is one: campaigns write many small files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


main()
