"""Alarms: what makes a number not worth believing, shown wherever the number is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log

from headwise.values import OMITTED


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong: a name for programs, a sentence for people, and what it is about."""

    kind: str
    message: str
    texts: str | None = field(default=None, metadata=OMITTED)  # the text set it speaks of
    condition: str | None = field(default=None, metadata=OMITTED)  # stock, or the arm and seed

    def __str__(self) -> str:
        where = f" ({self.condition})" if self.condition else ""
        return f"ALARM {self.kind}{where}: {self.message}"


def loss_alarms(
    what: str, loss: float, vocabulary: int, unigram: float | None = None
) -> tuple[Alarm, ...]:
    """A model that reads worse than guessing, or than token frequencies alone, is not read right.

    The usual causes are a missing (or unwanted) BOS, a foreign tokenizer and a lost precision.
    """
    measured = f"{what}: loss {loss:.2f} nats per token"
    if loss > log(vocabulary):
        limit = f"above ln(vocabulary) = {log(vocabulary):.2f}: worse than guessing"
        return (Alarm("loss-above-uniform", f"{measured}, {limit}", what),)
    if unigram is not None and loss > unigram:
        limit = f"above {unigram:.2f}, what a unigram model reaches on the same text"
        return (Alarm("loss-above-unigram", f"{measured}, {limit}", what),)
    return ()


def cure_alarms(before: float, after: float) -> tuple[Alarm, ...]:
    """A model that was unusable as loaded and is usable now was loaded wrongly, not cured."""
    message = (
        f"unusable as loaded (loss {before:.2f} nats per token), {after:.2f} afterwards: that is "
        "no cure of heads; look at the first token, the tokenizer and the precision"
    )
    return (Alarm("cured-an-unusable-model", message),)


def merge_alarms(*groups: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """All alarms in order, each once."""
    return tuple(dict.fromkeys(alarm for group in groups for alarm in group))
