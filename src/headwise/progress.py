"""How long work tells how far it is: a callback that is silent unless someone listens.

The library calls `progress(title, done, total, note)`; what is drawn, if anything, is the
listener's business. A stage without steps of its own is told with a total of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[str, int, int, str], None]


Item = TypeVar("Item")


def silent(title: str, done: int, total: int, note: str) -> None:
    """Nobody listens."""


def track(items: Sequence[Item], title: str, progress: Progress) -> Iterator[Item]:
    """Iterate and tell how many items are done."""
    return told(items, len(items), title, progress)


def told(items: Iterable[Item], count: int, title: str, progress: Progress) -> Iterator[Item]:
    """The same for items that are made on the way, of which the number is known."""
    if count:
        progress(title, 0, count, "")
    for done, item in enumerate(items, 1):
        yield item
        progress(title, done, count, "")


def stage(line: str, progress: Progress) -> None:
    """Tell what begins now."""
    progress(line, 0, 0, "")
