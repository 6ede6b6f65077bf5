"""Causal attention that also returns its log-sum-exp, so that head statistics need no T x T matrix.

Three exact ways to one result. The fused way is the kernel torch itself runs (CPU flash, or CUDA's
memory-efficient kernel), called where its log-sum-exp is visible. The tiled way is plain
PyTorch over tiles of queries: it does what the kernels cannot (soft caps, sliding windows, learned
sinks, arbitrary masks) and what their private ops might stop doing: `fused_is_trusted` compares the
two on 64 tokens once per device and type. The third is taken on a CPU where what attention says as
a distribution (`Moments`) is asked for too: all of it from one product of queries and keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TILE = 256  # queries per tile: the scores of one tile stay in the cache of one core
ROWS = 64  # queries of a head in one pass with moments; 32 and 128 take 1.05 to 1.15 of the time
EARLY = 256  # keys that most sets of keys do not reach beyond
EXACT_LENGTH = 4096  # tokens up to which the largest logit is exact on every device
_FIRST = 8  # queries per head that are looked at first for the largest logit
MASKED = -1e30  # finite, so that a row with no visible key stays finite (it is never read)
Heads = Float[Tensor, "batch head query dim"]


@dataclass(frozen=True)
class Scores:
    """All that decides the attention of one layer: s = scale q.k, capped, plus a bias on keys."""

    q: Heads
    k: Float[Tensor, "batch kv_head key dim"]
    scale: float
    bias: Float[Tensor, "#batch head 1 key"] | None = None  # ALiBi, float32, as executed
    visible: Bool[Tensor, "batch key"] | None = None  # False at padding
    window: int | None = None  # a query sees this many keys, itself included
    softcap: float | None = None
    sinks: Float[Tensor, "head"] | None = None  # learned logits outside the keys (gpt-oss)
    mask: Bool[Tensor, "batch 1 query key"] | None = None  # anything else, dense

    @property
    def length(self) -> int:
        """Number of keys, and of queries: the tap always sees whole sequences."""
        return int(self.k.shape[2])

    @property
    def num_visible(self) -> Float[Tensor, "#batch 1 query"]:
        """How many keys each query may look at, padding aside."""
        if self.mask is not None:
            return self.mask.tril().sum(-1).float()
        counts = torch.arange(1, self.length + 1, device=self.q.device, dtype=torch.float32)
        return counts.clamp_max(self.window or self.length)[None, None]

    @property
    def is_plain(self) -> bool:
        """Whether the fused kernel can express these scores."""
        windowed = self.window is not None and self.window < self.length
        return not windowed and self.softcap is None and self.sinks is None and self.mask is None


def attend(
    scores: Scores, v: Float[Tensor, "batch kv_head key value"]
) -> tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]:
    """Attention output and log-sum-exp (float32); differentiable in q, k, v through the output."""
    same_width = v.shape[-1] == scores.k.shape[-1]  # the CPU kernel's limit
    trusted = fused_is_trusted(scores.q.device.type, scores.q.dtype)
    fused = scores.is_plain and same_width and trusted
    return _fused(scores, v) if fused else _tiled(scores, v)


def _fused(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    bias = _key_bias(scores)
    if scores.q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            scores.q, scores.k, v, 0.0, True, attn_mask=bias, scale=scores.scale
        )
        return out, lse
    group = scores.q.shape[1] // scores.k.shape[1]
    k, v = scores.k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if bias is not None:  # this kernel wants the whole shape; expand makes no copy
        bias = bias.to(scores.q.dtype).expand(*scores.q.shape[:3], scores.length)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        scores.q, k, v, bias, True, 0.0, True, scale=scores.scale
    )
    return out, lse[..., : scores.length]


def _key_bias(scores: Scores) -> Float[Tensor, "batch head 1 key"] | None:
    """ALiBi and padding as one additive bias on keys, in float32."""
    bias = scores.bias
    if scores.visible is not None:
        padding = torch.zeros_like(scores.visible, dtype=torch.float32)
        padding = padding.masked_fill(~scores.visible, MASKED)[:, None, None, :]
        bias = padding if bias is None else bias + padding
    if bias is None:
        return None
    return bias.expand(bias.shape[0], scores.q.shape[1], 1, scores.length)


def _tiled(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for start in range(0, scores.length, TILE):
        stop = min(start + TILE, scores.length)
        logits, lse = tile_scores(scores, start, stop)
        p = (logits - lse[..., None]).exp()
        outs.append(_per_group(p, v[:, :, stop - p.shape[-1] : stop]).to(scores.q.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def tile_scores(
    scores: Scores, start: int, stop: int
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query"]]:
    """Masked float32 logits of queries [start, stop), and their log-sum-exp.

    Keys end at `stop` and begin at 0, or where the window of the first query begins; memory is
    TILE x keys, never T x T.
    """
    first = 0 if scores.window is None else max(0, start - scores.window + 1)
    q, k = scores.q[:, :, start:stop].float(), scores.k[:, :, first:stop].float()
    logits = _per_group(q, k.transpose(-1, -2)) * scores.scale
    logits = capped(scores, logits)
    if scores.bias is not None:
        logits = logits + scores.bias[..., first:stop]
    logits = logits.masked_fill(~_allowed(scores, start, stop, first), MASKED)
    lse = logits.logsumexp(-1)
    if scores.sinks is not None:
        lse = torch.logaddexp(lse, scores.sinks.float()[None, :, None].expand_as(lse))
    return logits, lse


def _allowed(
    scores: Scores, start: int, stop: int, first: int
) -> Bool[Tensor, "batch 1 query key"]:
    query = torch.arange(start, stop, device=scores.q.device)[:, None]
    key = torch.arange(first, stop, device=scores.q.device)
    return _sees(scores, _texts(scores)[:, None], query, key).expand(len(scores.q), -1, -1)[:, None]


def _texts(scores: Scores) -> Int[Tensor, "batch 1"]:
    return torch.arange(len(scores.q), device=scores.q.device)[:, None]


def _sees(scores: Scores, text: Tensor, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
    """Whether a query of a text may look at a key: of indices that are broadcast together."""
    seen = (key <= query) & (query - key < (scores.window or scores.length + 1))
    if scores.visible is not None:
        seen = seen & scores.visible[text, key]
    if scores.mask is not None:
        seen = seen & scores.mask.expand(len(scores.q), -1, -1, -1)[text, 0, query, key]
    return seen


def _per_group(
    left: Float[Tensor, "batch head query inner"], right: Float[Tensor, "batch kv_head inner out"]
) -> Float[Tensor, "batch head query out"]:
    """left @ right, where each key/value head serves its group of query heads."""
    batch, heads, queries, inner = left.shape
    grouped = left.reshape(batch, right.shape[1], -1, inner)
    return (grouped @ right.to(left.dtype)).reshape(batch, heads, queries, -1)


@dataclass(frozen=True)
class Moments:
    """What the attention of every query says as a distribution over keys."""

    entropy: Float[Tensor, "batch head query"]  # nats
    mean_key: Float[Tensor, "batch head query"]  # expected key position
    shares: Float[Tensor, "batch head query set"]  # on sets of keys
    back: Float[Tensor, "batch head query offset"]  # on this key, the one before, and so on
    largest: Float[Tensor, "batch head query"] | None = None  # ln of the largest share, where known


def attend_with_moments(
    scores: Scores,
    v: Float[Tensor, "batch kv_head key value"],
    sets: Float[Tensor, "#batch key set"] | None = None,
    back: int = 0,
) -> tuple[
    Float[Tensor, "batch head query value"],
    Float[Tensor, "batch head query"],
    Moments,
]:
    """Attention output and log-sum-exp, and its moments, without a gradient.

    `sets` are sets of keys whose shares are wanted, `back` is how many of the nearest keys.

    On a CPU 1.1 to 1.3 times the time of attention alone, where moments apart take as much again.
    """
    if scores.is_plain and scores.q.device.type == "cpu" and scores.q.dtype != torch.float64:
        return _one_pass(scores, v, _sets_or_none(scores, sets), back)
    out, lse = attend(scores, v)
    return out, lse, moments(scores, lse, sets, back)


def moments(
    scores: Scores,
    lse: Float[Tensor, "batch head query"],
    sets: Float[Tensor, "#batch key set"] | None = None,
    back: int = 0,
) -> Moments:
    """The same of an attention whose output is known, in float32, exactly."""
    scores = replace(scores, q=scores.q.float(), k=scores.k.float())
    sets = _sets_or_none(scores, sets)
    if scores.is_plain and scores.q.device.type == "cpu":
        return _one_pass(scores, scores.k[..., :0], sets, back)[2]
    if scores.is_plain and fused_is_trusted(scores.q.device.type, torch.float32):
        return _fused_moments(scores, lse, sets, back)
    return _tiled_moments(scores, sets, back)


def _sets_or_none(scores: Scores, sets: Tensor | None) -> Float[Tensor, "_ key set"]:
    device = scores.k.device
    return torch.zeros(1, scores.length, 0, device=device) if sets is None else sets.to(device)


@torch.no_grad()
def _one_pass(scores: Scores, v: Tensor, sets: Tensor, back: int) -> tuple[Tensor, Tensor, Moments]:
    """sum p v, and of the same p: sum p ln p, sum p j and sum p in each set, for rows of queries.

    p is 2^(s - the largest s of its query): torch's exp2 takes 0.4 of the time of its exp. Sets
    within the first `EARLY` keys, most of them, are multiplied by those keys alone.
    """
    q, k, v = _by_key_head(scores, v)
    count, group, length = q.shape[:3]
    late = torch.cat([torch.tensor([True]), sets[:, EARLY:].any(1).any(0)])
    position = torch.arange(length).to(q).expand(len(sets), -1)[..., None]
    columns = torch.cat([position, sets], -1)
    every, early = _padded(columns[:, :, late]), _padded(columns[:, :EARLY, ~late])
    # where each column of `columns` stands in the two products
    chosen = torch.where(late, late.cumsum(0) - 1, every.shape[-1] + (~late).cumsum(0) - 1)
    out, sums = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(*q.shape[:3], len(late))
    whole, bits, top = q.new_empty(3, *q.shape[:3])
    near = q.new_empty(*q.shape[:3], back)
    later = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    buffers = q.new_empty(2, group * min(ROWS, length) * length)
    for row in range(count):
        text = row * len(sets) // count
        for start in range(0, length, ROWS):
            stop = min(start + ROWS, length)
            n, at = stop - start, (row, slice(None), slice(start, stop))
            s, p = (one[: group * n * stop].view(group * n, stop) for one in buffers)
            torch.mm(q[at].flatten(0, 1), k[row][:, :stop], out=s)
            s.view(group, n, stop)[..., start:].masked_fill_(later[:n, :n], MASKED)
            highest = s.amax(-1)
            torch.exp2(s.sub_(highest[:, None]), out=p)
            total = p.sum(-1)
            out[at] = (p @ v[row, :stop]).div_(total[:, None]).view(group, n, -1)
            parts = p @ every[text, :stop], p[:, :EARLY] @ early[text, :stop]
            near[at] = _nearest(p.view(group, n, stop), start, back) / total.view(group, n, 1)
            sums[at] = torch.cat(parts, 1)[:, chosen].div_(total[:, None]).view(group, n, -1)
            for to, value in ((whole, total), (bits, p.mul_(s).sum(-1)), (top, highest)):
                to[at] = value.view(group, n)
    shape = scores.q.shape[:3]
    entropy = ((whole.log2() - bits / whole) * math.log(2)).clamp_min(0)
    means = sums.reshape(*shape, -1)
    largest = -whole.log()  # the largest p is 1
    moment = Moments(
        entropy.reshape(shape),
        means[..., 0],
        means[..., 1:],
        near.reshape(*shape, -1),
        largest.reshape(shape),
    )
    lse = ((top.double() + whole.double().log2()) * math.log(2)).float()
    return out.reshape(*shape, -1).to(scores.q.dtype), lse.reshape(shape), moment


def _nearest(
    p: Float[Tensor, "*rows query key"], start: int, count: int
) -> Float[Tensor, "*rows query offset"]:
    """p of each query on its own key and those before; the first query's own key is `start`."""
    near = p.new_zeros(*p.shape[:-1], count)
    for offset in range(count):
        along = p.diagonal(start - offset, -2, -1)
        first = max(0, offset - start)  # earlier queries have no such key
        near[..., first : first + along.shape[-1], offset] = along
    return near


def _padded(columns: Float[Tensor, "text key column"]) -> Float[Tensor, "text key _"]:
    """Products with 16 columns take half the time of those with 4 or 8."""
    return torch.nn.functional.pad(columns, (0, -columns.shape[-1] % 16))


def _by_key_head(
    scores: Scores, v: Tensor
) -> tuple[
    Float[Tensor, "row group query channel"],
    Float[Tensor, "row channel key"],
    Float[Tensor, "row key value"],
]:
    """Queries and keys whose product is the score in powers of two, and values, by key head.

    An added channel holds the bias of a key, where there is any.
    """
    q, k, bias = scores.q.float() * (scores.scale * math.log2(math.e)), scores.k.float(), None
    if scores.bias is not None or scores.visible is not None:
        bias = _key_bias(scores)
    if scores.bias is not None:  # one bias per query head, so keys can no longer be shared
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if bias is not None:
        q = torch.cat([q, torch.full_like(q[..., :1], math.log2(math.e))], -1)
        bias = bias.expand(len(k), -1, -1, -1)[:, :: bias.shape[1] // k.shape[1]]
        k = torch.cat([k, bias.transpose(-1, -2)], -1)
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    return grouped, k.flatten(0, 1).transpose(1, 2).contiguous(), v.flatten(0, 1).float()


def _fused_moments(scores: Scores, lse: Tensor, sets: Tensor, back: int) -> Moments:
    """H = lse - E[s]; attention with V := [K, bias, position] gives E[s] and the mean position.

    The added channels are zero in the queries, so one tensor serves as keys and as values.
    """
    q, k = scores.q, scores.k
    bias = scores.bias
    channels = []
    if bias is not None:  # one bias per query head, so keys can no longer be shared by a group
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        channels.append(bias.transpose(-1, -2).expand(*k.shape[:3], 1))
    position = torch.arange(scores.length, device=q.device, dtype=torch.float32)
    channels.append(position[None, None, :, None].expand(*k.shape[:3], 1))
    wide_q, wide_k = torch.nn.functional.pad(q, (0, len(channels))), torch.cat([k, *channels], -1)
    expected, _ = _fused(replace(scores, q=wide_q, k=wide_k), wide_k)
    mean_score = (q * expected[..., : q.shape[-1]]).sum(-1) * scores.scale
    if bias is not None:
        mean_score = mean_score + expected[..., -2]
    shares, _ = indicator_mass(scores, sets)
    near = [mass_at(scores, lse, offset) for offset in range(back)]
    nearest = torch.stack(near, -1) if near else lse[..., None][..., :0]
    return Moments((lse - mean_score).clamp_min(0), expected[..., -1], shares, nearest)


def _tiled_moments(scores: Scores, sets: Tensor, back: int) -> Moments:
    entropies, means, shares, near = [], [], [], []
    for start in range(0, scores.length, TILE):
        stop = min(start + TILE, scores.length)
        logits, lse = tile_scores(scores, start, stop)
        log_p = logits - lse[..., None]
        p = log_p.exp()
        # -sum p (s - lse), not lse - sum p s: with ALiBi (sum p - 1) |s| leaks 5e-3 nats
        entropy = -(p * log_p.clamp_min(-1e4)).sum(-1)
        if scores.sinks is not None:  # an outcome too: -p ln p of the mass that no key receives
            log_sink = scores.sinks.float()[None, :, None] - lse
            entropy = entropy + -(log_sink.exp() * log_sink)
        entropies.append(entropy)
        key = torch.arange(stop - p.shape[-1], stop, device=p.device, dtype=torch.float32)
        means.append(p @ key / p.sum(-1).clamp_min(1e-30))
        shares.append(p @ sets[:, None, stop - p.shape[-1] : stop])
        near.append(_nearest(p, start - (stop - p.shape[-1]), back))
    entropy = torch.cat(entropies, 2).clamp_min(0)
    return Moments(entropy, torch.cat(means, 2), torch.cat(shares, 2), torch.cat(near, 2))


def indicator_mass(
    scores: Scores, indicators: Float[Tensor, "#batch key set"]
) -> tuple[Float[Tensor, "batch head query set"], Float[Tensor, "batch head query"]]:
    """Attention of every query on sets of keys, and its log-sum-exp: values are the indicators.

    As many sets as a key is wide cost what one costs.
    """
    q, k, values = scores.q.float(), scores.k.float(), indicators.to(scores.k.device)[:, None]
    wider = values.shape[-1] - k.shape[-1]  # the fused kernel wants keys and values equally wide
    if wider < 0:
        values = torch.nn.functional.pad(values, (0, -wider))
    elif wider > 0 and scores.is_plain:
        q, k = (torch.nn.functional.pad(x, (0, wider)) for x in (q, k))
    scores = replace(scores, q=q, k=k)
    out, lse = attend(scores, values.expand(*scores.k.shape[:2], -1, -1))
    return out[..., : indicators.shape[-1]], lse


PAIRS = 2**18  # numbers gathered at once: 1 MiB, in 0.4 of the time that 8 MiB take


def pair_mass(
    scores: Scores, lse: Float[Tensor, "batch head query"], pairs: Int[Tensor, "pair 3"]
) -> Float[Tensor, "batch head query"]:
    """Attention of each query on its listed keys together: one dot product a pair and head.

    A pair is (text, query, key) with key <= query.
    """
    batch, heads, length = lse.shape
    mass: Tensor = torch.zeros(batch * length, heads, device=lse.device)
    q, k = (x.transpose(1, 2).flatten(0, 1) for x in (scores.q, scores.k))  # (position, head, dim)
    flat_lse = lse.transpose(1, 2).flatten(0, 1)
    step = max(1, PAIRS // q[0].numel()) if len(q) else 1
    for part in pairs.split(step):
        text, query, key = part.unbind(1)
        at, to = text * length + query, text * length + key
        grouped = q[at].float().unflatten(1, (k.shape[1], -1))  # (pair, kv_head, group, dim)
        logits = (grouped @ k[to].float()[..., None]).flatten(1) * scores.scale
        logits = capped(scores, logits)
        if scores.bias is not None:
            logits = logits + scores.bias[:, :, 0].expand(batch, heads, length)[text, :, key]
        share = (logits - flat_lse[at]).exp().clamp(max=1.0)
        seen = _sees(scores, text, query, key)
        mass.index_add_(0, at, torch.where(seen[:, None], share, 0.0))
    return mass.reshape(batch, length, heads).transpose(1, 2)


def mass_at(
    scores: Scores, lse: Float[Tensor, "batch head query"], offset: int | None
) -> Float[Tensor, "batch head query"]:
    """Attention on the first key (`offset=None`) or on the key `offset` places back, 0 if unseen.

    One dot product per query: p = exp(s - lse). Differentiable in q and k but not through `lse`.
    """
    length, back = scores.length, offset or 0
    # queries back.. meet keys 0..length-back one to one, or all meet key 0: slices, no gathering
    keys = slice(0, 1) if offset is None else slice(0, max(length - back, 0))
    logits = _dots(scores.q[:, :, back:].float(), scores.k[:, :, keys].float()) * scores.scale
    logits = capped(scores, logits)
    if scores.bias is not None:
        logits = logits + scores.bias[:, :, 0, keys]
    # rounding may put a dead head's share at 1 + 1e-8; a share is at most 1
    share = (logits - lse[..., back:]).exp().clamp(max=1.0)
    query = torch.arange(back, length, device=scores.q.device)
    key = torch.zeros_like(query) if offset is None else query - back
    seen = _sees(scores, _texts(scores), query, key).expand(len(share), -1)
    mass = torch.where(seen[:, None], share, 0.0)
    return torch.nn.functional.pad(mass, (min(back, length), 0))


def _first_logits(scores: Scores, count: int) -> Float[Tensor, "batch head query key"]:
    """Masked logits of every query on the first `count` keys."""
    count = min(count, scores.length)
    logits = _per_group(scores.q.float(), scores.k[:, :, :count].float().transpose(-1, -2))
    logits = capped(scores, logits * scores.scale)
    if scores.bias is not None:
        logits = logits + scores.bias[..., :count]
    return logits.masked_fill(~_allowed(scores, 0, scores.length, 0)[..., :count], MASKED)


def attend_ends(
    scores: Scores, v: Float[Tensor, "batch kv_head key value"], first: int, recent: int
) -> tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]:
    """Attention on the first `first` keys and the `recent` last ones (the query's own included).

    Each subset of keys is attended to alone and the two are weighed by their log-sum-exps, so
    memory is that of a window. `exp(lse of the ends - lse of all)` is the attention they hold.
    """
    later = torch.arange(scores.length, device=scores.q.device)[None] >= first
    visible = later.expand(len(scores.q), -1)
    if scores.visible is not None:
        visible = visible & scores.visible
    window = min(recent, scores.window or recent)
    near, near_lse = _tiled(replace(scores, sinks=None, window=window, visible=visible), v)
    logits = _first_logits(scores, first)
    far_lse = logits.logsumexp(-1)
    far = _per_group((logits - far_lse[..., None]).exp(), v[:, :, : logits.shape[-1]])
    lse = torch.logaddexp(near_lse, far_lse)
    if scores.sinks is not None:
        lse = torch.logaddexp(lse, scores.sinks.float()[None, :, None].expand_as(lse))
    shares = (near_lse - lse).exp()[..., None], (far_lse - lse).exp()[..., None]
    return (near * shares[0] + far * shares[1]).to(scores.q.dtype), lse


def sink_share(
    scores: Scores, lse: Float[Tensor, "batch head query"]
) -> Float[Tensor, "batch head query"]:
    """What a learned sink takes of every query's attention; 0 where the family has none."""
    if scores.sinks is None:
        return torch.zeros_like(lse)
    return (scores.sinks.float()[None, :, None] - lse).exp()


def capped(scores: Scores, logits: Tensor) -> Tensor:
    """The soft cap of a family that has one."""
    if scores.softcap is None:
        return logits
    return scores.softcap * torch.tanh(logits / scores.softcap)


def _dots(
    q: Float[Tensor, "batch head query dim"], k: Float[Tensor, "batch kv_head #query dim"]
) -> Float[Tensor, "batch head query"]:
    """q.k of each query with its one key; keys are shared by groups of heads, never copied."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    if k.shape[2] == 1:
        dots = (grouped @ k[:, :, None].transpose(-1, -2)).squeeze(-1)
    else:
        dots = (grouped * k[:, :, None]).sum(-1)
    return dots.flatten(1, 2)


@functools.cache
def fused_is_trusted(device: str, dtype: torch.dtype) -> bool:
    """Does this device's private op exist and agree with the tiled path on 64 tokens?"""
    if device not in ("cpu", "cuda"):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64, 16, generator=generator).to(device, dtype) for _ in range(3))
    bias = torch.linspace(0, 8, 64, device=device).expand(1, 4, 1, 64)
    scores = Scores(q, k, 0.25, bias=bias)
    try:
        out, lse = _fused(scores, v)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
    expected, expected_lse = _tiled(scores, v)
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return bool(
        (out - expected).abs().max() < tolerance and (lse - expected_lse).abs().max() < tolerance
    )


def max_logits(
    scores: Scores,
    lse: Float[Tensor, "batch head query"],
    real: Bool[Tensor, "batch query"],
    largest: Float[Tensor, "batch head query"] | None = None,
) -> tuple[Float[Tensor, "batch head"], Float[Tensor, "batch head"]]:
    """Largest logit over visible keys of real queries, and the bound that it cannot exceed.

    A bias on keys counts from the query's own. On a CPU the pass that gives the entropy meets every
    pair and knows `largest`. Elsewhere: a query's log-sum-exp is never below its largest logit, so
    only queries whose log-sum-exp exceeds the largest logit so far can hold a larger one. The few
    with the highest are looked at first; that settles sharp heads, the ones whose logits grow. The
    rest is looked at too, up to `EXACT_LENGTH` tokens; beyond it the value is a lower bound.

    ALiBi is a bias m j on keys here; relative to key t it is the published -m (t - j). `largest` is
    the ln of each query's largest share of attention, if a pass over all pairs has found it.
    """
    reach = lse if scores.bias is None else lse - scores.bias[:, :, 0]
    reach = torch.where(real[:, None], reach, -torch.inf)
    if largest is not None:
        exact = (reach + largest).amax(-1)
        return exact, exact
    top, first = reach.topk(min(_FIRST, scores.length), dim=-1)
    value, upper = torch.empty_like(top[..., 0]), torch.empty_like(top[..., 0])
    for text, head in torch.cartesian_prod(*(torch.arange(n) for n in reach.shape[:2])).tolist():
        own = reach[text, head]
        best = _largest(scores, text, head, first[text, head][top[text, head].isfinite()])
        rest = torch.nonzero(own > best + 1e-4).squeeze(1)  # rounding of the log-sum-exp
        if len(rest) and scores.length <= EXACT_LENGTH:
            best, rest = torch.maximum(best, _largest(scores, text, head, rest)), rest[:0]
        value[text, head] = best
        upper[text, head] = own[rest].max() if len(rest) else best
    return value, upper


def _largest(
    scores: Scores, text: int, head: int, queries: Int[Tensor, "query"]
) -> Float[Tensor, ""]:
    """The largest logit of some queries of one head."""
    kv = head // (scores.q.shape[1] // scores.k.shape[1])
    logits = scores.q[text, head, queries].float() @ scores.k[text, kv].float().T
    logits = capped(scores, logits * scores.scale)
    if scores.bias is not None:
        bias = scores.bias[text if len(scores.bias) > 1 else 0, head, 0]
        logits = logits + bias[None] - bias[queries][:, None]
    key = torch.arange(scores.length, device=queries.device)
    seen = _sees(scores, torch.tensor(text), queries[:, None], key)
    return logits.masked_fill(~seen, -torch.inf).max()
