"""The interval that a verdict rests on: how often it is wrong, for few and for skewed documents."""

import numpy as np
import pytest
from scipy import stats

from headwise.intervals import FEWEST, Interval, paired_interval, paired_intervals

CASES = 1500
KINDS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,  # a tail of harm
}
# Share of false "better" in percent that a kind may reach: 2.5 is nominal. The second moment of a
# skewed sample is too small whenever its tail was not drawn, so skew is allowed some more.
MOST = {"normal": 3.5, "exponential": 7.5}


def simulated(kind, documents, lengths="equal"):
    """Percent of cases without any effect that are called better, and worse."""
    rng = np.random.default_rng([documents, len(kind), len(lengths)])
    tokens = np.ones(documents) if lengths == "equal" else rng.lognormal(0, 0.7, documents)
    tokens = np.ceil(200 * tokens)
    effects = KINDS[kind](rng, (CASES, documents)) * tokens
    found = paired_intervals(effects, tokens)
    better = np.mean([interval.high < 0 for interval in found])
    return 100 * better, 100 * np.mean([interval.low > 0 for interval in found])


@pytest.mark.parametrize("lengths", ["equal", "unequal"])
@pytest.mark.parametrize("documents", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_no_effect_is_seldom_called_one(kind, documents, lengths):
    better, worse = simulated(kind, documents, lengths)
    if documents < FEWEST:
        assert better == worse == 0
    assert better <= MOST[kind]
    assert worse <= MOST["normal"]
    assert better + worse <= 8  # the interval as a whole: nominal 5


def test_an_effect_is_found_where_student_finds_it():
    """Width is what coverage costs: a third more at 8 normal documents, next to none at 64."""
    rng = np.random.default_rng(0)
    for documents, most in ((8, 1.35), (16, 1.12), (64, 1.05)):
        effects, tokens = rng.normal(size=(400, documents)), np.ones(documents)
        widths = [i.high - i.low for i in paired_intervals(effects, tokens)]
        student = 2 * stats.t.ppf(0.975, documents - 1) * stats.sem(effects, axis=1)
        assert (widths >= student * (1 - 1e-9)).all()
        assert np.mean(widths) <= most * student.mean()


def test_the_interval_is_nowhere_narrower_than_students_of_the_jackknife():
    """Leaving out one document after the other: one of them holds half of all tokens."""
    tokens = np.array([10, 20, 30, 40, 50, 60, 70, 80, 90, 500])
    effects = np.linspace(-1, 2, 10) * tokens
    left_out = [
        np.delete(effects, i).sum() / np.delete(tokens, i).sum() for i in range(len(tokens))
    ]
    spread = np.square(np.array(left_out) - effects.sum() / tokens.sum()).sum()
    half = stats.t.ppf(0.975, 9) * np.sqrt(spread * 9 / 10)
    found = paired_interval(effects, tokens)
    assert found.value == pytest.approx(effects.sum() / tokens.sum())
    assert found.high >= found.value + half * (1 - 1e-9)
    assert found.low <= found.value - half * (1 - 1e-9)


def test_a_smaller_error_gives_a_wider_interval_and_the_same_inputs_the_same_bytes():
    rng = np.random.default_rng(1)
    effects, tokens = rng.normal(1, 1, size=20), rng.integers(50, 500, size=20)
    usual, sure = paired_interval(effects, tokens), paired_interval(effects, tokens, error=0.005)
    assert sure.low < usual.low < usual.value < usual.high < sure.high
    assert paired_interval(effects, tokens) == usual


@pytest.mark.parametrize("documents", [1, 2, 3, FEWEST - 1])
def test_too_few_documents_show_nothing_however_alike_they_are(documents):
    effects = np.full(documents, -5.0) + np.linspace(0, 1e-3, documents)
    found = paired_interval(effects, np.full(documents, 10))
    assert found.low <= found.value < 0 <= found.high
    assert np.isfinite([found.low, found.high]).all()


def test_what_does_not_differ_has_no_width():
    assert paired_interval(np.zeros(12), np.full(12, 9)) == Interval(0.0, 0.0, 0.0)


def test_one_changed_document_of_many_is_no_verdict():
    effects = np.zeros(40)
    effects[3] = -100.0
    found = paired_interval(effects, np.full(40, 10))
    assert found.low < 0 < found.high
    assert max(-found.low, found.high) < 1000 * abs(found.value)
