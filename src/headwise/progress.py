"""Progress bars: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    pass


Item = TypeVar("Item")


_PLAIN_EVERY = 15.0  # seconds between plain progress lines


def track(items: Sequence[Item], title: str, *, quiet: bool = False) -> Iterator[Item]:
    """Iterate with a progress bar on a terminal and occasional lines elsewhere."""
    with progress(len(items), title, quiet=quiet) as advance:
        for item in items:
            yield item
            advance(1, "")


@contextmanager
def progress(total: int, title: str, *, quiet: bool = False, start: int = 0) -> Iterator[Any]:
    """A bar of `total` steps; the yielded function takes (steps, note)."""
    if quiet:
        yield lambda steps, note: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(title, total=total, completed=start, note="")
            yield lambda steps, note: bar.update(task, advance=steps, note=note)
    else:
        yield _plain_lines(total, title, start)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )


def _plain_lines(total: int, title: str, start: int) -> Any:
    state = {"done": start, "last": time.monotonic()}

    def advance(steps: int, note: str) -> None:
        state["done"] += steps
        now = time.monotonic()
        if now - state["last"] >= _PLAIN_EVERY:
            state["last"] = now
            sys.stderr.write(f"{title}: {int(state['done'])}/{total} {note}".rstrip() + "\n")
            sys.stderr.flush()

    return advance


@contextmanager
def plasticity_progress(quiet: bool) -> Iterator[Any]:
    """A callback (done, total) that drives a bar whose length is known only once work starts."""
    state: dict[str, Any] = {}
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            if "advance" not in state:
                state["advance"] = stack.enter_context(
                    progress(total, "heads", quiet=quiet, start=0)
                )
            state["advance"](done - state.get("done", 0), "")
            state["done"] = done

        yield report
