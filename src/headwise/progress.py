"""How long work tells how far it is: a callback that is silent unless someone listens.

The library calls `progress(title, done, total, note)`; what is drawn, if anything, is the
listener's business. A stage without steps of its own is told with a total of 0.

Before it starts, costly work tells its size to whoever minds the cost: how many tokens go through a
whole forward pass in all (a backward pass counts as two more), and how many are alive at once. The
listener may refuse by raising.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

Progress = Callable[[str, int, int, str], None]
Item = TypeVar("Item")


def silent(title: str, done: int, total: int, note: str) -> None:
    """Nobody listens."""


def track(
    items: Iterable[Item], title: str, progress: Progress, *, count: int | None = None
) -> Iterator[Item]:
    """Iterate and report how many items are done; `count` is of items that are made on the way."""
    if count is None:
        assert isinstance(items, Sized)
        count = len(items)
    if count:
        progress(title, 0, count, "")
    for done, item in enumerate(items, 1):
        yield item
        progress(title, done, count, "")


def stage(line: str, progress: Progress) -> None:
    """Tell what begins now."""
    progress(line, 0, 0, "")


@dataclass(frozen=True)
class Work:
    """A verb's work on one model, at most: heads that are decided early need less."""

    tokens: float  # through a forward pass
    batch: int  # tokens of one forward pass
    kept: int = 0  # tokens whose activations wait for a backward pass
    trained: int = 0  # weights with a master, a gradient and two moments
    written: float = 0  # bytes of vectors that are put on disk
    waiting: int = 0  # tokens whose hidden states wait between the layers of a streamed model
    less: str = ""  # options that make it less


Budget = Callable[[Any, Work], None]  # of a model and the work to be done with it


def unlimited(model: Any, work: Work) -> None:
    """Nobody minds."""
