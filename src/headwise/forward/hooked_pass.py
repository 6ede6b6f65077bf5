"""What a measurement wants of forward passes, and how several measurements share them.

A `HookedPass` names batches and what is looked at while they go through the model. Passes that name
the same batch look at one run of it: `shared_batches` is what is run, in memory or from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from headwise.forward.tap import LayerAttention

Value = TypeVar("Value")
Observe = Callable[[int, LayerAttention], Value]  # of a batch by its number, and one of its layers
Visit = Callable[[int], None]  # of a layer whose weights are at hand
Emit = Callable[[int, Value], object]  # of a layer and what a hook has seen in it
Listen = Callable[[int, Emit[Value]], AbstractContextManager[object]]  # hooks, for one batch


@dataclass(frozen=True)
class HookedPass(Generic[Value]):
    """Batches that go through a model, what is looked at in them, and who takes it.

    `take` gets (batch, layer, what was observed), and (batch, None, losses) at `targets`, (text,
    position). `listen` opens hooks while a batch runs. `visit` is called once a layer while its
    weights are at hand. Layers from `stop` on are not needed.
    """

    ids: Sequence[Tensor]  # each (text, position)
    take: Callable[[int, int | None, Any], None]
    observe: Observe[Value] | None = None
    listen: Listen[Value] | None = None
    targets: Sequence[Tensor | None] = ()
    visit: Visit | None = None
    stop: int | None = None
    title: str = ""


@dataclass(frozen=True)
class SharedBatch:
    """A batch, and the passes that want it with its number there."""

    ids: Tensor
    seen_by: list[tuple[HookedPass[Any], int]] = field(default_factory=list)

    def targets(self) -> list[tuple[int, Tensor]]:
        """The targets that passes want losses at, with the pass's place in `seen_by`."""
        return [
            (place, targets)
            for place, (one, number) in enumerate(self.seen_by)
            for targets in one.targets[number : number + 1]
            if targets is not None
        ]


def shared_batches(passes: Sequence[HookedPass[Any]]) -> list[SharedBatch]:
    """Every batch once, however many passes name it; each pass meets its own in their order.

    The order matters: sums that are taken batch by batch then have the same bits, shared or not.
    """
    batches: list[SharedBatch] = []
    keys: list[tuple[torch.Size, bytes]] = []
    for one in passes:
        place = 0  # the pass's next batch stands here or later
        for number, ids in enumerate(one.ids):
            key = ids.shape, ids.cpu().numpy().tobytes()
            if key in keys[place:]:
                place = keys.index(key, place)
            else:
                batches.insert(place, SharedBatch(ids))
                keys.insert(place, key)
            batches[place].seen_by.append((one, number))
            place += 1
    return batches
