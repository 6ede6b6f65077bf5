"""The size of an effect in words: what a change of loss does to perplexity, and its share of all
that the model knows beyond token frequencies; and how many treated heads recovered.

The share is the change over the distance from stock to a unigram model of the same text: 100% would
be a model that is as far below stock as stock is below the unigram model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from headwise.intervals import Interval
from headwise.proof.values import Recovery


def perplexity_change(change: Interval, stock: float) -> str:
    """Before and after a change of loss."""
    return f"{_perplexity(stock)} to {_perplexity(stock + change.value)}"


def _perplexity(loss: float) -> str:
    return f"{exp(loss):.2f}" if loss < log(100) else f"{exp(loss):.4g}"


def effect_text(change: Interval, stock: float, unigram: float | None) -> str:
    """A paired change of held-out loss, beside the losses of stock and of a unigram model."""
    if not change.value:
        return f"Perplexity stays at {_perplexity(stock)}."
    between = perplexity_change(change, stock)
    if change.low <= 0 <= change.high:
        return f"Perplexity goes from {between}, which may be chance."
    way, gain = ("falls", "gain") if change.value < 0 else ("rises", "loss")
    text = f"Perplexity {way} by {_percent(exp(change.value) - 1)} ({between})"
    if unigram is None or unigram <= stock:  # stock knows nothing beyond token frequencies
        return f"{text}."
    share = change.value / (unigram - stock)
    size = "more than all" if share > 1 else f"{_percent(share)} of what"
    return (
        f"{text}: a {gain} of {size} stock knows beyond token frequencies "
        f"(stock {stock:.2f} nats per token, a unigram model {unigram:.2f})."
    )


def _percent(share: float) -> str:
    """Two significant digits at least: a small effect must not read as 0.0%."""
    size = abs(100 * share)
    return f"{size:.0f}%" if size >= 10 else f"{size:.2g}%"


def recovered_text(seeds: Sequence[Recovery]) -> str:
    """How many heads recovered of those that were ill and judged: `2 to 4 of 20`."""
    if untested_text(seeds):
        return "none judged" if _some_were_ill(seeds) else "none ill in stock"
    return _counts([r.functional for r in seeds], [r.judged for r in seeds])


def together_text(seeds: Sequence[Recovery]) -> str:
    """What all treated heads are worth at once: single heads carry little of a joint gain."""
    for one in seeds:
        if one.joint_now is not None and one.joint_stock is not None:
            now, stock = one.joint_now.value, one.joint_stock.value
            return f"together, the treated heads are worth {now:+.4f} nats ({stock:+.4f} in stock)"
    return ""


def not_sick_text(seeds: Sequence[Recovery]) -> str:
    """How many of all operated heads are not sick by first-token mass."""
    return _counts([r.not_sick for r in seeds], [r.operated for r in seeds])


def untested_text(seeds: Sequence[Recovery]) -> str:
    """Why no head was put to the test; empty if one was."""
    if any(r.judged for r in seeds):
        return ""
    if _some_were_ill(seeds):
        return "No treated head was ablated, so none can be called recovered."
    return "No treated head was ill in stock, so none can recover."


def _some_were_ill(seeds: Sequence[Recovery]) -> bool:
    # an older file counts sick heads alone, or says nothing
    return any((r.was_sick if r.was_ill is None else r.was_ill) != 0 for r in seeds)


def _counts(passed: Sequence[int], tested: Sequence[int]) -> str:
    """A range over seeds, or each seed by itself if they tested different numbers of heads."""
    if len(set(tested)) > 1:
        return " and ".join(f"{p} of {t}" for p, t in zip(passed, tested, strict=True))
    low, high = min(passed), max(passed)
    return (str(low) if low == high else f"{low} to {high}") + f" of {tested[0]}"
