"""The size of an effect in words: what a change of loss does to perplexity, and its share of all
that the model knows beyond token frequencies.

The share is the change over the distance from stock to a unigram model of the same text: 100% would
be a model that is as far below stock as stock is below the unigram model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from headwise.report.source import Condition, Source


@dataclass(frozen=True)
class Effect:
    """A paired change of held-out loss beside the losses that give it a measure."""

    change: float  # nats per token, over all seeds
    stock: float  # the loss of stock
    unigram: float | None  # of the same text
    sure: bool = True  # whether the interval of the change leaves out 0

    @property
    def perplexity_change(self) -> float:
        """Relative: -0.04 is 4% lower."""
        return exp(self.change) - 1

    @property
    def share(self) -> float | None:
        """Of the distance from stock to the unigram model; None where stock does not beat it."""
        if self.unigram is None or self.unigram <= self.stock:
            return None
        return self.change / (self.unigram - self.stock)

    @property
    def perplexities(self) -> str:
        """Before and after."""
        return f"{exp(self.stock):.4g} to {exp(self.stock + self.change):.4g}"

    def __str__(self) -> str:
        if not self.change:
            return f"Perplexity stays at {exp(self.stock):.4g}."
        if not self.sure:
            return f"Perplexity goes from {self.perplexities}, which may be chance."
        way = "falls" if self.change < 0 else "rises"
        told = f"Perplexity {way} by {_percent(self.perplexity_change)} ({self.perplexities})"
        if self.share is None:
            return f"{told}."
        gain = "gain" if self.change < 0 else "loss"
        size = "more than all" if self.share > 1 else f"{_percent(self.share)} of what"
        return (
            f"{told}: a {gain} of {size} stock knows beyond token "
            f"frequencies (stock {self.stock:.2f} nats per token, a unigram model "
            f"{self.unigram:.2f})."
        )


def _percent(share: float) -> str:
    """Two significant digits at least: a small effect must not read as 0.0%."""
    size = abs(100 * share)
    return f"{size:.0f}%" if size >= 10 else f"{size:.2g}%"


def effect_of(source: Source, main: Condition) -> Effect | None:
    """The effect of an arm on the judged text set; None before it was evaluated."""
    change, name = source.against_stock(main.arm), source.judged_set
    stock = None if source.stock is None or name is None else source.stock.text_sets.get(name)
    if change is None or stock is None:
        return None
    sure = change.high < 0 or change.low > 0
    return Effect(change.value, stock.loss.value, stock.unigram_loss, sure)
