"""Deciding with as little text as needed: documents in stages, intervals that allow for peeking.

The method is group-sequential error spending (Lan and DeMets 1983) with the linear spending
function (Kim and DeMets 1987, rho = 1) and a union bound over the looks: of the error of 5% a look
spends the share of documents that are new at it, so an interval is right at *all* looks together
with 95% confidence, whenever one stops. Intervals are Student's for the ratio of summed loss to
tokens. Over many heads the false discovery rate is held by Benjamini and Yekutieli (2001), since
heads share documents, on p-values that allow for the same peeking: the smallest over the looks of
p / share. (Benjamini and Hochberg's milder rule let 7 to 16% through on resampled real losses.)
A row that is most unlikely to be decided at all can be given up early (`Staged.chances`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

from headwise.intervals import ERROR, Interval
from headwise.provenance import Decisions

FIRST_LOOK = 5  # documents; with fewer, Student intervals of skewed losses are too sure
HOPE = 0.1  # a decision that is less likely than this is not waited for
_ROUNDING = 2e-7  # nats per token: no smaller difference is evidence, however constant

METHOD = (
    "linear error spending over looks (Lan-DeMets), Student intervals of the ratio, "
    "Benjamini-Yekutieli over heads"
)


def looks_at(documents: int, first: int = FIRST_LOOK) -> tuple[int, ...]:
    """After how many documents one looks: all at the last look, three quarters at the one before.

    Looking that often costs some width of every interval and still ends sooner: 0.192 instead of
    0.202 of the fixed work on MiniMind2, same decisions (`python -m benchmarks decisions`).
    """
    sizes = [documents]
    while (fewer := sizes[0] * 3 // 4) >= first:
        sizes.insert(0, fewer)
    return tuple(sizes)


def error_shares(looks: Sequence[int]) -> tuple[float, ...]:
    """Each look's share of the error: its new documents among all."""
    return tuple(float(new / looks[-1]) for new in np.diff([0, *looks]))


def document_order(documents: int, seed: int) -> list[int]:
    """The order in which documents are taken: drawn, so that early ones are like late ones."""
    return [int(i) for i in np.random.default_rng([seed, documents]).permutation(documents)]


@dataclass(frozen=True)
class Staged:
    """What was measured: changes of summed loss, of each row on the first so many documents."""

    looks: tuple[int, ...]  # documents at each look
    deltas: Float[np.ndarray, "row kind document"] = field(repr=False)  # in the order taken
    tokens: Int[np.ndarray, "document"] = field(repr=False)
    last_look: Int[np.ndarray, "row"] = field(repr=False)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the error of 5%, what each look spends."""
        return error_shares(self.looks)

    @property
    def documents(self) -> Int[np.ndarray, "row"]:
        """How many documents each row was measured on."""
        sizes: Int[np.ndarray, "row"] = np.array(self.looks)[self.last_look]
        return sizes

    @property
    def work(self) -> float:
        """Tokens measured, as a share of what all rows on all documents would be."""
        if not len(self.last_look):
            return 0.0
        seen = np.cumsum(self.tokens)[self.documents - 1]
        return float(seen.mean() / self.tokens.sum())

    def decisions(self) -> Decisions:
        """How it was decided, for an artefact."""
        return Decisions(METHOD, self.looks, self.shares, self.work)

    def interval(self, row: int, weights: Float[np.ndarray, "kind"]) -> Interval:
        """The interval of a combination of kinds at the row's last look."""
        size, share = self.documents[row], self.shares[self.last_look[row]]
        sums = weights @ self.deltas[row, :, :size]
        return student_interval(sums, self.tokens[:size], ERROR * share)

    def chances(self, row: int, below: float) -> tuple[float, float]:
        """How likely the last look shows a row of one kind above 0, and how likely below `below`.

        Foreseen from the row's own documents, as if those to come were like them. Giving a row up
        by this rule makes no discovery, so intervals and rates hold as they are.
        """
        from scipy.stats import t as student  # late: slow to load

        size, share = self.documents[row], self.shares[-1]
        value, deviation = _ratio(self.deltas[row, 0, :size], self.tokens[:size])
        seen = self.tokens[:size].sum() / self.tokens.sum()
        half = float(student.ppf(1 - ERROR * share / 2, len(self.tokens) - 1))
        half *= deviation * np.sqrt(seen)
        still = deviation * np.sqrt(1 - seen)  # by which the value may yet move
        ahead = np.array([value - half, below - half - value]) / max(still, _ROUNDING)
        above, under = student.cdf(ahead, size - 1)
        return float(above), float(under)

    def p_value(self, row: int, weights: Float[np.ndarray, "kind"]) -> float:
        """Evidence against no change, whichever look one stops at."""
        sums = weights @ self.deltas[row]
        looks = zip(self.looks, self.shares, strict=True)
        seen = [
            student_p(sums[:size], self.tokens[:size]) / share
            for look, (size, share) in enumerate(looks)
            if look <= self.last_look[row]
        ]
        return min(1.0, *seen)


def student_interval(
    sums: Float[np.ndarray, "document"], counts: Int[np.ndarray, "document"], error: float
) -> Interval:
    """The ratio of sums to counts with an interval that misses with this probability."""
    value, deviation = _ratio(sums, counts)
    from scipy.stats import t as student  # late: slow to load

    half = float(student.ppf(1 - error / 2, len(sums) - 1)) * deviation
    return Interval(value, value - half, value + half)


def student_p(sums: Float[np.ndarray, "document"], counts: Int[np.ndarray, "document"]) -> float:
    """Two-sided p-value of the ratio being 0."""
    value, deviation = _ratio(sums, counts)
    from scipy.stats import t as student  # late: slow to load

    return float(2 * student.sf(abs(value) / deviation, len(sums) - 1))


def _ratio(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """A ratio and its standard deviation by linearisation, never below rounding."""
    count, total = len(sums), counts.sum()
    value = float(sums.sum() / total)
    power = np.square(sums - value * counts).sum() * count / (count - 1)
    return value, float(np.hypot(np.sqrt(power) / total, _ROUNDING))


def discoveries(p_values: Float[np.ndarray, "row"], rate: float = ERROR) -> Bool[np.ndarray, "row"]:
    """Benjamini and Yekutieli: rows that may be called effects at this false discovery rate."""
    from scipy.stats import false_discovery_control  # late: slow to load

    effects: Bool[np.ndarray, "row"] = false_discovery_control(p_values, method="by") <= rate
    return effects


Measure = Callable[[Sequence[int], Sequence[int]], Float[np.ndarray, "row kind document"]]
Undecided = Callable[[Staged], Bool[np.ndarray, "row"]]


def in_stages(
    looks: tuple[int, ...],
    tokens: Int[np.ndarray, "document"],
    shape: tuple[int, int],
    measure: Measure,
    undecided: Undecided,
) -> Staged:
    """Measure (rows, documents) look by look; rows that are decided are measured no further."""
    rows, kinds = shape
    deltas = np.zeros((rows, kinds, len(tokens)))
    last = np.zeros(rows, dtype=int)
    staged = Staged(looks, deltas, tokens, last)  # its arrays fill as the looks go on
    open_rows, start = np.arange(rows), 0
    for look, size in enumerate(looks):
        if not len(open_rows):
            break
        documents = list(range(start, size))
        deltas[open_rows, :, start:size] = measure(open_rows.tolist(), documents)
        last[open_rows] = look
        open_rows, start = open_rows[undecided(staged)[open_rows]], size
    return staged
