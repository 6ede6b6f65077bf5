"""Fused, tiled and dense attention are one thing, forwards and backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.forward import attention
from headwise.forward.attention import (
    TILE,
    Scores,
    attend,
    fused_is_trusted,
    mass_at,
    max_logits,
    moments,
    sink_share,
    tile_scores,
)

LENGTH, HEADS, DIM = TILE + 77, 6, 8  # more than one tile, and not a multiple of it


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alibi(heads=HEADS, length=LENGTH):
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    return (slopes[:, None] * torch.arange(length))[None, :, None, :]


def padding():
    visible = torch.ones(2, LENGTH, dtype=torch.bool)
    visible[1, :23] = False  # left padding: the first rows see nothing
    visible[0, 300:] = False
    return visible


def two_texts():
    text = torch.arange(LENGTH) // 100
    return (text[:, None] == text[None, :])[None, None].expand(2, 1, -1, -1)


CASES = {
    "plain": {},
    "alibi": {"bias": alibi()},
    "padding": {"visible": padding()},
    "alibi-padding": {"bias": alibi(), "visible": padding()},
    "window": {"window": 50},
    "wide-window": {"window": 10_000},
    "alibi-window": {"bias": alibi(), "window": 50},
    "softcap": {"softcap": 5.0},
    "softcap-window": {"softcap": 5.0, "window": 300},
    "sinks": {"sinks": torch.linspace(-2, 4, HEADS)},
    "mask": {"mask": two_texts()},
}
KV_HEADS = (6, 2, 1)


def make(case, kv_heads=HEADS, dtype=torch.float32):
    """Scores with heads from blunt to sharp, and values."""
    q = randn(2, HEADS, LENGTH, DIM, seed=1) * torch.linspace(0.3, 4, HEADS)[:, None, None]
    k, v = (randn(2, kv_heads, LENGTH, DIM, seed=seed) for seed in (2, 3))
    return Scores(q.to(dtype), k.to(dtype), 0.4, **CASES[case]), v.to(dtype)


def dense(scores, v):
    """Log-probabilities (batch, head, query, key), output and log-sum-exp, in float64."""
    group = scores.q.shape[1] // scores.k.shape[1]
    q, k, v = scores.q.double(), *(x.double().repeat_interleave(group, 1) for x in (scores.k, v))
    logits = q @ k.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.bias is not None:
        logits = logits + scores.bias.double()
    t = torch.arange(scores.length)
    allowed = (t[None, :] <= t[:, None])[None, None]
    if scores.window is not None:
        allowed = allowed & (t[:, None] - t[None, :] < scores.window)
    if scores.visible is not None:
        allowed = allowed & scores.visible[:, None, None]
    if scores.mask is not None:
        allowed = allowed & scores.mask
    logits = logits.masked_fill(~allowed, -1e300)
    lse = logits.logsumexp(-1)
    if scores.sinks is not None:
        lse = torch.logaddexp(lse, scores.sinks.double()[None, :, None])
    log_p = logits - lse[..., None]
    return log_p, log_p.exp() @ v, lse


def readable(scores):
    """Queries that see at least one key: (batch, head, query)."""
    seen = torch.ones(2, HEADS, LENGTH, dtype=torch.bool)
    if scores.visible is not None:
        seen = (scores.visible.cumsum(-1) > 0)[:, None].expand_as(seen)
    return seen


def error(left, right, at):
    return float((left - right)[at].abs().max())


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("case", CASES)
def test_output_and_log_sum_exp_equal_the_dense_ones(case, kv_heads):
    scores, v = make(case, kv_heads)
    at = readable(scores)
    _, out, lse = dense(scores, v)
    ways = [attend, attention._tiled, *([attention._fused] if scores.is_plain else [])]
    for way in ways:
        got, got_lse = way(scores, v)
        # ALiBi scores reach m T = 167, where float32 numbers are 1.5e-5 apart
        assert error(got, out, at) < (1e-5 if scores.bias is None else 5e-5), way
        assert error(got_lse, lse, at) < (1e-5 if scores.bias is None else 1e-4), way
        assert got_lse.dtype == torch.float32


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("case", CASES)
def test_moments_and_masses_equal_the_dense_ones(case, kv_heads, monkeypatch):
    scores, v = make(case, kv_heads)
    at = readable(scores)
    log_p, _, lse = dense(scores, v)
    p = log_p.exp()
    entropy = torch.special.entr(p).sum(-1)
    if scores.sinks is not None:
        entropy = entropy + torch.special.entr((scores.sinks.double()[None, :, None] - lse).exp())
    mean_key = (p * torch.arange(LENGTH)).sum(-1) / p.sum(-1)
    _, got_lse = attend(scores, v)
    assert error(sink_share(scores, got_lse), 1 - p.sum(-1), at) < 1e-5
    sets = (randn(2, LENGTH, 5, seed=7) > 1).float()
    sets[:, 48:, 1] = sets[:, 48:, 3] = 0  # two of them lie within the first keys
    computed = [moments(scores, got_lse, sets, 3), attention._tiled_moments(scores, sets, 3)]
    if scores.is_plain:
        computed.append(attention._fused_moments(scores, got_lse, sets, 3))
        monkeypatch.setattr(attention, "EARLY", 48)
        monkeypatch.setattr(attention, "ROWS", 33)  # many rows, the last of them fewer
        out, own_lse, moment = attention.attend_with_moments(scores, v, sets, 3)
        assert error(out, dense(scores, v)[1], at) < (1e-5 if scores.bias is None else 5e-5)
        assert error(own_lse, lse, at) < (1e-5 if scores.bias is None else 1e-4)
        assert torch.isfinite(moment.entropy).all()  # also where a query sees no key
        computed.append(moment)
    for moment in computed:
        assert error(moment.shares, p @ sets[:, None].double(), at) < 1e-5
        for offset in range(3):
            expected = torch.zeros_like(lse)
            expected[..., offset:] = p.diagonal(-offset, 2, 3)
            assert error(moment.back[..., offset], expected, at) < 1e-5, offset
        assert error(moment.entropy, entropy, at) < 2e-4  # one query; a head's mean is 10x better
        assert (moment.entropy - entropy).where(at, 0.0).mean(-1).abs().max() < 1e-5
        assert error(moment.mean_key, mean_key, at) < 1e-2
    assert error(mass_at(scores, got_lse, None), p[..., 0], at) < 1e-5
    for offset in (0, 1, 2, 7):
        expected = torch.zeros_like(lse)
        expected[..., offset:] = p.diagonal(-offset, 2, 3)
        assert error(mass_at(scores, got_lse, offset), expected, at) < 1e-5, offset


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("case", ["plain", "alibi", "window", "softcap", "sinks", "mask"])
def test_gradients_equal_those_of_dense_attention(case, kv_heads):
    scores, v = make(case, kv_heads)
    upstream = randn(2, HEADS, LENGTH, DIM, seed=9)

    def gradients(run, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (scores.q, scores.k, v)]
        out = run(replace(scores, q=leaves[0], k=leaves[1]), leaves[2])
        return torch.autograd.grad((out * upstream).sum(), leaves)

    expected = gradients(lambda s, v: dense(s, v)[1], torch.float64)
    got = gradients(lambda s, v: attend(s, v)[0], torch.float32)
    for left, right in zip(got, expected, strict=True):
        assert (left - right).abs().max() / right.abs().max() < 1e-5


def test_gradients_flow_through_a_mass():
    """The patient's collapse term pulls on it."""
    scores, v = make("alibi")
    q = scores.q.clone().requires_grad_()
    scores = replace(scores, q=q)
    _, lse = attend(scores, v)
    mass_at(scores, lse.detach(), None).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "alibi"])
def test_half_precision_models_are_measured_in_float32(case, dtype):
    scores, v = make(case, 2, dtype)
    log_p, out, _ = dense(scores, v)
    got, lse = attend(scores, v)
    at = readable(scores)
    assert got.dtype == dtype
    assert error(got.double(), out, at) < 5e-2
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    assert (moments(scores, lse).entropy - entropy).mean(-1).abs().max() < 1e-4
    assert error(mass_at(scores, lse, None), log_p[..., 0].exp(), at) < 1e-3


def test_values_of_another_width_take_the_tiled_path():
    scores, _ = make("plain", 2)
    v = randn(2, 2, LENGTH, 3, seed=5)
    out, _ = attend(scores, v)
    assert error(out, dense(scores, v)[1], readable(scores)) < 1e-5


def test_only_what_the_kernel_can_say_is_called_plain():
    plain = {case for case in CASES if make(case)[0].is_plain}
    assert plain == {"plain", "alibi", "padding", "alibi-padding", "wide-window"}


def test_a_kernel_that_disagrees_is_not_trusted(monkeypatch):
    assert fused_is_trusted("cpu", torch.float32)
    assert not fused_is_trusted("mps", torch.float32)
    honest = attention._fused
    for dishonest in (
        lambda scores, v: (honest(scores, v)[0], honest(scores, v)[1] + 0.01),
        lambda scores, v: (honest(scores, v)[0] * 1.01, honest(scores, v)[1]),
        lambda scores, v: torch.ops.aten.no_such_kernel(scores, v),
    ):
        fused_is_trusted.cache_clear()
        monkeypatch.setattr(attention, "_fused", dishonest)
        assert not fused_is_trusted("cpu", torch.float32)
        scores, v = make("plain")
        assert error(attend(scores, v)[0], dense(scores, v)[1], readable(scores)) < 1e-5
    monkeypatch.undo()
    fused_is_trusted.cache_clear()
    assert fused_is_trusted("cpu", torch.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_the_largest_logit_is_the_largest_of_all_pairs(case, kv_heads, monkeypatch):
    scores, v = make(case, kv_heads)
    _, lse = attend(scores, v)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, 250:] = False
    if scores.visible is not None:
        real &= scores.visible
    logits = tile_scores(replace(scores, window=None), 0, LENGTH)[0]
    logits = logits.masked_fill(~attention._allowed(scores, 0, LENGTH, 0), -torch.inf)
    if scores.bias is not None:
        logits = logits - scores.bias.transpose(-1, -2)
    expected = logits.masked_fill(~real[:, None, :, None], -torch.inf).amax((2, 3))
    largest, upper = max_logits(scores, lse, real)
    torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(largest, upper)  # exact, and said so
    known = moments(scores, lse).largest
    assert (known is not None) == scores.is_plain
    if known is not None:
        largest, _ = max_logits(scores, lse, real, known)
        torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-4)
    monkeypatch.setattr("headwise.forward.attention.EXACT_LENGTH", 10)
    lower, upper = max_logits(scores, lse, real)
    assert (lower <= expected + 1e-4).all()
    assert (upper >= expected - 1e-4).all()
