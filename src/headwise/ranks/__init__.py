"""Several processes that work as one: items are shared out, results come back in their order.

A launcher (`accelerate launch`, `torchrun`) starts the processes; the command line connects them
with `process_group()`, a program must do so itself: headwise inside a distributed training run does
not use the trainer's.
Every process gets every result and adds them up in the order of one process, so all of them hold
the same bits and only the first one needs to write. Numbers travel through gloo, on the CPU.
torch's own gathering, not accelerate's: that sends through the trainer's group and onto its device,
and pads what differs in length.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

_PATIENCE = timedelta(hours=6)  # a process that is alive may be slow; a dead one is seen at once


@dataclass(frozen=True)
class Place:
    """Which process this is, and of how many."""

    rank: int = 0
    world: int = 1

    def __str__(self) -> str:
        return f"process {self.rank} of {self.world}"


_AGAIN = (
    "look above for the other's own message (or the system's: out of memory?) and start again;\n"
    "repair and capture go on from what was saved with --resume"
)

_places = [Place()]  # the last one is where this process is now
_all_write = [False]


class LostProcessError(HeadwiseError):
    """Another process of the run has ended: this one cannot go on alone."""


def place() -> Place:
    """This process among those that work together."""
    return _places[-1]


def is_first() -> bool:
    """Whether this process prints."""
    return place().rank == 0


def may_write() -> bool:
    """Whether this process writes files: the first one, or each its own share."""
    return is_first() or _all_write[-1]


@contextmanager
def process_group() -> Iterator[Place]:
    """Work together with the processes that a launcher started; alone if none did."""
    launched = launched_place()
    if launched.world == 1:
        yield Place()
        return
    import torch.distributed as dist

    with _killable():
        dist.init_process_group("gloo", timeout=_PATIENCE)
    _places.append(launched)
    try:
        with _ended_by_launcher():
            yield place()
    finally:
        _places.pop()
        dist.destroy_process_group()


def launched_place() -> Place:
    """What the launcher says in RANK and WORLD_SIZE; alone if it says nothing."""
    numbers = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        value = os.environ.get(name, default)
        if not value.isascii() or not value.isdigit():
            raise HeadwiseError(
                f"{name} is {value[:40]!r}, not a number",
                fix=f"a launcher such as torchrun sets {name}; without one, unset it",
            )
        numbers.append(int(value))
    return Place(*numbers)


@contextmanager
def _killable() -> Iterator[None]:
    """Let signals end the process at once while it waits for the others.

    The wait is inside torch, where Python would not run a handler; nothing was begun yet.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def each_writes() -> Iterator[None]:
    """While open every process writes its own files, into a folder that all of them see."""
    _all_write.append(True)
    try:
        yield
    finally:
        _all_write.pop()


@contextmanager
def silent_unless_first() -> Iterator[None]:
    """Only the first process speaks; errors of the others still reach the terminal."""
    if is_first():
        yield
        return
    before = sys.stdout
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - not a file of ours
        sys.stdout = nowhere
        try:
            yield
        finally:
            sys.stdout = before


def shared_out(
    function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[tuple[Item, Result]]:
    """`function` of every item, in order, each computed by one process and known to all.

    An error in one process is raised in all of them, where its result would have come.
    """
    here = place()
    if here.world == 1:
        for item in items:
            yield item, function(item)
        return
    for start in range(0, len(items), here.world):
        mine = start + here.rank
        result = _tried(function, items[mine]) if mine < len(items) else None
        answers = _gathered(result)[: len(items) - start]
        for item, (value, error) in zip(items[start : start + here.world], answers, strict=True):
            if error is not None:
                raise error
            yield item, value


def _tried(function: Callable[[Item], Result], item: Item) -> tuple[Result | None, Any]:
    try:
        return function(item), None
    except HeadwiseError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - it is raised again, in every process
        return None, HeadwiseError(f"{place()}: {type(error).__name__}: {error}")


def by_the_first(function: Callable[[], Result]) -> Result:
    """The first process calls it, and all of them get its result or its known failure."""
    here = place()
    if here.world == 1:
        return function()
    answer = _gathered(_tried(lambda _: function(), None) if here.rank == 0 else None)[0]
    if answer[1] is not None:
        raise answer[1]
    result: Result = answer[0]
    return result


def anyone(said: bool) -> bool:
    """Whether it is so in any process."""
    return said if place().world == 1 else any(_gathered(said))


def wait() -> None:
    """Go on when all processes are here: what the first wrote can then be read."""
    anyone(False)


def gathered_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors of all processes, by rank; they have one shape."""
    import torch
    import torch.distributed as dist

    mine = tensor.detach().cpu().contiguous()
    tensors = [torch.empty_like(mine) for _ in range(place().world)]
    with _watching():
        dist.all_gather(tensors, mine)
    return tensors


def _gathered(value: object) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * place().world
    with _watching():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def _watching() -> Iterator[None]:
    """A connection that breaks means that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this run has ended, so this one stops too",
            where=f"{place()} ({str(error).splitlines()[0][:120]})",
            fix=_AGAIN,
        ) from None


@contextmanager
def _ended_by_launcher() -> Iterator[None]:
    """A launcher that has lost one process ends the others: they say so instead of vanishing."""

    def end(number: int, frame: object) -> None:
        raise LostProcessError(
            "the launcher ends this process: another one has failed", where=place(), fix=_AGAIN
        )

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
