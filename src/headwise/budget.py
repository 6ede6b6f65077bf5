"""How large a piece of work is, told before it starts to whoever minds the cost.

Work counts tokens: how many go through a whole forward pass in all (what a backward pass does
counts as two more), and how many are alive at once. The library only tells; the listener may
refuse by raising. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """A verb's work on one model, at most: heads that are decided early need less."""

    tokens: float  # through a forward pass
    batch: int  # tokens of one forward pass
    kept: int = 0  # tokens whose activations wait for a backward pass
    trained: int = 0  # weights with a master, a gradient and two moments
    less: str = ""  # options that make it less


Budget = Callable[[Any, Work], None]  # of a model and the work to be done with it


def unlimited(model: Any, work: Work) -> None:
    """Nobody minds."""
