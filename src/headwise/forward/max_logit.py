"""The largest attention logit of every head, exactly, without looking at most pairs.

On a CPU the pass that gives the entropy meets every pair and knows. Elsewhere: a query's
log-sum-exp is never below its largest logit, so only queries whose log-sum-exp exceeds what was
already found can hold a larger one. The few queries with the highest are looked at first; that
settles sharp heads, the ones whose logits grow. The rest is looked at too, up to `EXACT_LENGTH`
tokens; beyond it the value is a lower bound and `upper` says how far it may be off.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.forward.attention import Scores, capped

EXACT_LENGTH = 4096
_FIRST = 8  # queries per head that are looked at before anything else


def max_logits(
    scores: Scores,
    lse: Float[Tensor, "batch head query"],
    real: Bool[Tensor, "batch query"],
    largest: Float[Tensor, "batch head query"] | None = None,
) -> tuple[Float[Tensor, "batch head"], Float[Tensor, "batch head"]]:
    """Largest logit over visible keys of real queries, and the bound that it cannot exceed.

    A bias on keys counts from the query's own.

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
    return logits.masked_fill(~_visible(scores, text, queries), -torch.inf).max()


def _visible(scores: Scores, text: int, queries: Int[Tensor, "query"]) -> Bool[Tensor, "query key"]:
    key, query = torch.arange(scores.length, device=queries.device)[None], queries[:, None]
    seen = key <= query
    if scores.window is not None:
        seen = seen & (query - key < scores.window)
    if scores.visible is not None:
        seen = seen & scores.visible[text][None]
    if scores.mask is not None:
        seen = seen & scores.mask[text if len(scores.mask) > 1 else 0, 0][queries]
    return seen
