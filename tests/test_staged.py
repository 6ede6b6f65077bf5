"""Decisions with as little text as needed: valid under peeking, few false discoveries."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import tiny_model
from headwise.forward.mean_outputs import measure_means
from headwise.heads import all_heads
from headwise.proof.usefulness import judge_heads, open_rows, verdicts
from headwise.staged import (
    ERROR,
    Staged,
    discoveries,
    document_order,
    error_shares,
    in_stages,
    looks_at,
    student_interval,
    student_p,
)
from headwise.texts.batches import batches
from planned import ablate_sets

DOCUMENTS = 64


def skewed(generator, shape):
    """Changes of summed loss by document as ablations give them: heavy-tailed, a little skewed."""
    return generator.standard_t(4, shape) + 0.3 * (generator.exponential(1, shape) - 1)


def peeked(looks, deltas, tokens):
    """Rows that were looked at every time."""
    last = np.full(len(deltas), len(looks) - 1)
    return Staged(looks, deltas[:, None], tokens, last)


def test_every_look_spends_the_share_of_its_documents_and_all_of_them_the_error():
    assert looks_at(64) == (6, 8, 11, 15, 20, 27, 36, 48, 64)
    assert error_shares(looks_at(64)) == pytest.approx(np.array([6, 2, 3, 4, 5, 7, 9, 12, 16]) / 64)
    assert looks_at(12) == (6, 9, 12)
    assert looks_at(5) == (5,)
    assert sum(error_shares(looks_at(100))) == pytest.approx(1)


def test_an_interval_that_is_looked_at_every_time_still_misses_one_time_in_twenty():
    generator = np.random.default_rng(0)
    looks, tokens = looks_at(DOCUMENTS), generator.integers(150, 256, DOCUMENTS)
    missed = 0
    for _ in range(1000):
        sums = skewed(generator, DOCUMENTS)
        missed += any(
            not (i.low <= 0 <= i.high)
            for size, share in zip(looks, error_shares(looks), strict=True)
            for i in [student_interval(sums[:size], tokens[:size], ERROR * share)]
        )
    assert missed / 1000 <= 0.06


def test_without_effects_no_more_discoveries_than_promised():
    """1,000 draws of 64 heads that do nothing, on the same documents, looked at seven times."""
    generator = np.random.default_rng(1)
    looks, tokens = looks_at(DOCUMENTS), generator.integers(150, 256, DOCUMENTS)
    any_found = 0
    for _ in range(1000):
        shared = skewed(generator, DOCUMENTS)  # what a document does to all heads
        deltas = skewed(generator, (64, DOCUMENTS)) + 0.5 * shared
        any_found += bool(discoveries(fast_p_values(looks, deltas, tokens)).any())
    assert any_found / 1000 <= ERROR + 0.01


def fast_p_values(looks, deltas, tokens):
    """`Staged.p_value` of all rows at once, checked against it on one row."""
    from scipy.stats import t as student

    found = np.ones(len(deltas))
    for size, share in zip(looks, error_shares(looks), strict=True):
        d, n = deltas[:, :size], tokens[:size]
        ratio = d.sum(1) / n.sum()
        power = np.square(d - ratio[:, None] * n).sum(1) * size / (size - 1)
        p = 2 * student.sf(np.abs(ratio) * n.sum() / np.sqrt(power), size - 1)
        found = np.minimum(found, p / share)
    one = peeked(looks, deltas[:1], tokens).p_value(0, np.ones(1))
    assert found[0] == pytest.approx(one, rel=1e-3)
    return found


def test_most_of_the_discoveries_are_true_where_some_heads_matter():
    generator = np.random.default_rng(2)
    looks, tokens = looks_at(DOCUMENTS), np.full(DOCUMENTS, 200)
    matters = np.arange(40) < 10
    false = []
    for _ in range(300):
        deltas = skewed(generator, (40, DOCUMENTS)) + matters[:, None] * 2.0
        found = discoveries(fast_p_values(looks, deltas, tokens))
        false.append((found & ~matters).sum() / max(1, found.sum()))
        assert (found & matters).sum() >= 6
    assert np.mean(false) <= ERROR + 0.01


def test_benjamini_and_yekutieli_by_hand():
    # four rows: thresholds are 0.05 rank / (4 (1 + 1/2 + 1/3 + 1/4)) = 0.006, 0.012, 0.018, 0.024
    assert list(discoveries(np.array([0.001, 0.0115, 0.02, 0.9]))) == [True, True, False, False]
    assert list(discoveries(np.array([0.01, 0.015, 0.02, 0.0235]))) == [True] * 4
    assert not discoveries(np.array([0.0065, 0.2, 0.3, 0.4])).any()
    assert discoveries(np.zeros(0)).shape == (0,)


def test_rounding_is_no_evidence():
    tokens = np.full(8, 200)
    assert student_p(np.full(8, 1e-5), tokens) > 0.5  # the same 5e-8 nats in all documents
    assert student_p(np.full(8, 1.0), tokens) < 1e-6


def test_decided_rows_are_measured_no_further():
    seen = []

    def measure(rows, documents):
        seen.append((list(rows), list(documents)))
        return np.ones((len(rows), 1, len(documents)))

    found = in_stages(
        (2, 4, 8),
        np.ones(8, dtype=int),
        (3, 1),
        measure,
        lambda staged: np.array([False, staged.last_look[1] < 1, True]),
    )
    assert seen == [([0, 1, 2], [0, 1]), ([1, 2], [2, 3]), ([2], [4, 5, 6, 7])]
    assert list(found.documents) == [2, 4, 8]
    assert found.work == pytest.approx((2 + 4 + 8) / 24)


def test_heads_that_are_given_up_would_hardly_ever_have_been_decided():
    """400 heads with effects around the negligible, all looks taken, beside giving up early."""
    generator = np.random.default_rng(3)
    looks, tokens = looks_at(DOCUMENTS), generator.integers(150, 256, DOCUMENTS)
    effects = generator.uniform(-0.001, 0.003, 400) * tokens.mean()
    scale = generator.uniform(0.1, 3, (400, 1))
    rows = scale * skewed(generator, (400, DOCUMENTS)) + effects[:, None]

    def judged(keep_open):
        def measure(some, documents):
            return rows[np.ix_(some, documents)][:, None]

        return in_stages(looks, tokens, (400, 1), measure, keep_open)

    whole = judged(lambda staged: np.array(verdicts(staged)) == "undecided")
    quick = judged(open_rows)
    given_up = quick.documents < whole.documents
    decided = np.array(verdicts(whole)) != "undecided"
    assert 100 < given_up.sum() < 390
    assert (decided & given_up).sum() / given_up.sum() < 0.1
    assert quick.work < 0.92 * whole.work


def test_a_useful_head_is_decided_early_and_costs_what_the_fixed_path_says():
    model = tiny_model("llama")
    generator = np.random.default_rng(0)
    encoded = [list(map(int, generator.integers(3, 97, 30))) for _ in range(32)]
    heads = all_heads(2, 4)
    means = measure_means(model, batches(encoded, 8))
    found = judge_heads(model, encoded, heads, means)
    exact = ablate_sets(model, encoded, [[head] for head in heads])
    assert found.decisions.share_of_all_work < 1
    order = document_order(32, 0)
    for row, head in enumerate(heads):
        cost = found.ablation_zero[str(head)]
        taken = order[: cost.documents]  # each head on the first documents of the order
        value = exact.deltas[row, taken].sum() / exact.tokens[taken].sum()
        assert cost.value == pytest.approx(value, abs=1e-5)
    assert min(cost.documents for cost in found.ablation_zero.values()) < 32
    useful = [name for name, cost in found.ablation_zero.items() if cost.useful]
    assert set(found.ablation_mean) == set(useful) != set()


def test_a_head_is_called_not_useful_only_if_more_than_the_negligible_is_ruled_out():
    tokens = np.full(8, 200)
    noise = np.random.default_rng(0).normal(0, 1, 8)
    rows = np.stack([0.01 * noise, 10 * noise, 20 + noise])
    staged = Staged((8,), rows[:, None], tokens, np.zeros(3, dtype=int))
    assert verdicts(staged) == ["not useful", "undecided", "useful"]
