"""Alarms: what makes a number not worth believing, told in every place where the number is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong: a name for programs, a sentence for people."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"ALARM {self.kind}: {self.message}"


def loss_alarms(
    what: str, loss: float, vocabulary: int, unigram: float | None = None
) -> tuple[Alarm, ...]:
    """A model that reads worse than guessing, or than token frequencies alone, is not read right.

    The usual causes are a missing (or unwanted) BOS, a foreign tokenizer and a lost precision.
    """
    if loss > log(vocabulary):
        told = f"above ln(vocabulary) = {log(vocabulary):.2f}: worse than guessing"
        return (Alarm("loss-above-uniform", f"{what}: loss {loss:.2f} nats per token, {told}"),)
    if unigram is not None and loss > unigram:
        told = f"above {unigram:.2f}, what a unigram model reaches on the same text"
        return (Alarm("loss-above-unigram", f"{what}: loss {loss:.2f} nats per token, {told}"),)
    return ()


def cure_alarms(before: float, after: float) -> tuple[Alarm, ...]:
    """A model that was unusable as loaded and is usable now was loaded wrongly, not cured."""
    told = (
        f"unusable as loaded (loss {before:.2f} nats per token), {after:.2f} afterwards: that is "
        "no cure of heads; look at the first token, the tokenizer and the precision"
    )
    return (Alarm("cured-an-unusable-model", told),)


def merge_alarms(*groups: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """All alarms in order, each once."""
    return tuple(dict.fromkeys(alarm for group in groups for alarm in group))
