"""Progress as the terminal shows it: a live bar, plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bar,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headwise.cli.app import quiet
from headwise.cli.show import Screen, console
from headwise.progress import Progress, silent
from headwise.ranks import is_first

_PLAIN_EVERY = 15.0  # seconds between plain progress lines


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """What a verb gives to its library function; a bar that an error leaves behind is removed."""
    if quiet.get() or not is_first():
        yield silent
    elif sys.stderr.isatty():
        live = _LiveBar()
        try:
            yield live
        finally:
            live.stop()
    else:
        yield _PlainLines()


class _Stages:
    """The lines between the bars; what several arms of a study say in the same words, once."""

    def __init__(self) -> None:
        self.title = ""
        self.stages: set[str] = set()

    def show(self, line: str) -> None:
        """Print a line that was not printed before."""
        if line not in self.stages:
            self.stages.add(line)
            console().print(line)


class _LiveBar(_Stages):
    """One bar at a time: a new title takes the place of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Bar | None = None

    def __call__(self, title: str, done: int, total: int, note: str) -> None:
        if total == 0 or title != self.title:
            self.stop()
        if total == 0:
            self.show(title)
            return
        if self.bar is None:
            self.bar, self.title = _bar(), title
            self.bar.add_task(title, total=total, completed=done, note=note)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done, note=note)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
        self.bar = None


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Screen(stderr=True),
        transient=True,
    )


class _PlainLines(_Stages):
    """A line now and then, so that logs stay readable."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.start = time.monotonic()
        self.first = 0

    def __call__(self, title: str, done: int, total: int, note: str) -> None:
        if total == 0:
            self.show(title)
            return
        now = time.monotonic()
        if title != self.title or done == 0:
            self.title, self.last, self.start, self.first = title, now, now, done
        if now - self.last >= _PLAIN_EVERY:
            self.last = now
            left = f"{(total - done) * (now - self.start) / max(done - self.first, 1):.0f} s left"
            sys.stderr.write(f"{title}: {done}/{total} {note}".rstrip() + f", {left}\n")
            sys.stderr.flush()
