"""What wakes heads that rest on the first token, as a value. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.values import Finite


@dataclass(frozen=True)
class Wakers:
    """How awake one head is: on the whole, by kind of token, by token, and along one text."""

    base: Finite  # mean of 1 - mass on the sink, over all queries but the first
    kinds: Mapping[str, Finite]
    tokens: tuple[tuple[str, Finite, int], ...] = field(repr=False)  # token, mean, times seen
    text: tuple[Finite, ...] = field(repr=False)


@dataclass(frozen=True)
class Waking:
    """What wakes each sick head, and the text along which it is shown."""

    tokens: tuple[str, ...] = field(repr=False)
    heads: Mapping[str, Wakers] = field(repr=False)
