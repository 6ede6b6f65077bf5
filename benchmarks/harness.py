"""What all benchmarks share: options, clocks, memory, processes of their own, tables.

Seconds are CPU seconds of one process with one thread, so that other work on the machine counts
little; memory is the resident set as the kernel counts it.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headwise.progress import Progress, silent
from headwise.tables import Column

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROOT = Path(__file__).parent.parent
GIGA = 10**9


@dataclass(frozen=True)
class Options:
    """What the command line asks of a benchmark."""

    out: Path
    model: str | None = None
    repeats: int = 3
    quick: bool = False
    progress: Progress = silent


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process while the work runs."""
    started = time.process_time()
    work()
    return time.process_time() - started


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, and as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Pairs:
    """CPU seconds of headwise and of its peer, one pair a round."""

    seconds: tuple[tuple[float, float], ...]

    @property
    def ours(self) -> float:
        """The median of headwise."""
        return median(ours for ours, _ in self.seconds)

    @property
    def peer(self) -> float:
        """The median of the peer."""
        return median(peer for _, peer in self.seconds)

    @property
    def ratio(self) -> float:
        """The median of the ratios within a round: other work hits both sides of it alike."""
        return median(ours / peer for ours, peer in self.seconds)


def compare(ours: Callable[[], object], peer: Callable[[], object], repeats: int) -> Pairs:
    """Run both sides in turn on one thread."""
    with one_thread():
        return Pairs(tuple((cpu_seconds(ours), cpu_seconds(peer)) for _ in range(repeats)))


def resident_mb() -> float:
    """Resident memory of this process now."""
    gc.collect()
    return _status_mb("VmRSS:")


def peak_mb() -> float:
    """The peak since the start of this process or since `reset_peak`.

    `ru_maxrss` would begin with the peak of the process that this one was forked from.
    """
    return _status_mb("VmHWM:")


def reset_peak() -> None:
    """Start the peak anew where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_mb(key: str) -> float:
    status = Path("/proc/self/status")
    if not status.exists():  # macOS: bytes, and the peak only
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def command_of(module: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """The command that runs one side of a benchmark in a process of its own."""
    return [python, "-m", f"benchmarks.{module}", *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread, no network, and this checkout's code."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}


def run_side(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one side to its end; its last line on standard output is its answer."""
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )


Row = Mapping[str, object]

_SCREEN = 80  # columns of the narrowest terminal in use
shown = Column("").text  # of one entry
_LONG = 40  # characters of a cell that stands below the table instead
_BETWEEN = 3  # columns between two cells


def console() -> Console:
    """Where tables are printed."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_rows(name: str, rows: Sequence[Row]) -> None:
    """The rows of a benchmark as tables."""
    for item in tables(name, rows):
        console().print(item)


def tables(name: str, rows: Sequence[Row]) -> list[Any]:
    """One table for each kind of row, with the lines that stand below it."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(key for key in row if key != "note"), []).append(row)
    return [item for same_kind in kinds.values() for item in _tables_of_a_kind(name, same_kind)]


def _tables_of_a_kind(name: str, rows: Sequence[Row]) -> list[Any]:
    """One table, or several where it would be too wide; what is the same in all stands below."""
    keys = [key for key in rows[0] if key != "note"]
    same = [key for key in keys if len({str(row.get(key)) for row in rows}) == 1]
    if len(rows) == 1:  # a table of it, but for a path that would be cut
        same = [key for key in same if len(shown(rows[0].get(key))) > _LONG]
    columns = [key for key in keys if key not in same]
    cells = [[row.get(key) for key in columns] for row in rows]
    headings = [key.replace("_", " ") for key in columns]  # wrap at blanks
    below = [f"{key}: {shown(rows[0].get(key))}" for key in same]
    below += [
        f"{row.get('way', '')} at {row.get('length', '')}: {row['note']}"
        for row in rows
        if row.get("note")
    ]
    widths = [_column_width(column) for column in zip(headings, *cells, strict=True)]
    if sum(widths) + _BETWEEN * (len(widths) - 1) <= _SCREEN:
        return [table(name, headings, cells), *below]
    return [*(_transposed(name, headings, part) for part in _parts(headings, cells)), *below]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Numbers are right-aligned, and no word is cut however narrow the terminal is."""
    from rich.table import Table

    rows = list(rows)
    result = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        numeric = all(isinstance(cell, (int, float)) for cell in cells)
        width = _column_width([column, *cells])
        side: Any = "right" if numeric else "left"
        result.add_column(column, justify=side, width=width, overflow="fold")
    for row in rows:
        result.add_row(*map(shown, row))
    return result


def _column_width(column: Sequence[object]) -> int:
    """Of a column whose first row, the heading, may wrap at blanks and nothing else may."""
    head, *cells = column
    return max(len(word) for word in ["", *str(head).split(), *map(shown, cells)])


def _parts(
    headings: Sequence[str], cells: Sequence[Sequence[object]]
) -> list[list[Sequence[object]]]:
    """Cases that have room side by side, at least one."""
    parts: list[list[Sequence[object]]] = []
    first = max(map(len, headings))
    for case in cells:
        wide = [max(len(shown(value)) for value in one) for one in [*(parts or [[]])[-1], case]]
        if parts and first + sum(wide) + _BETWEEN * len(wide) <= _SCREEN:
            parts[-1].append(case)
        else:
            parts.append([case])
    return parts


def _transposed(title: str, headings: Sequence[str], cells: Sequence[Sequence[object]]) -> Table:
    """Measures one below the other, cases side by side: names stay whole."""
    first, *rest = zip(headings, *cells, strict=True)
    return table(title, [shown(word) for word in first], rest)
