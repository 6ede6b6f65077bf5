"""Losses from an output head that is met tile by tile: some rows, some tokens of the vocabulary.

A whole row of logits is never needed: the log-sum-exps of its tiles give that of the row. Tiles of
many rows read the head's weights seldom: SmolLM2's, 113 MB, are multiplied at 92 GFLOP/s in tiles
of 4,096 tokens and at 72 whole with 256 rows. Logits are summed while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

ROWS, TOKENS = 1024, 4096  # of a tile: 16 MiB of float32 logits
CACHED = 2**16  # logits that are summed at once: 256 KiB

Adjust = Callable[[Tensor], Tensor]
Logits = Float[Tensor, "row token"]


def tiled_losses(
    head: nn.Module,
    adjust: Adjust,
    hidden: Float[Tensor, "row hidden"],
    targets: Int[Tensor, "row"],
) -> Float[Tensor, "row"]:
    """Loss in nats of each row; `adjust` makes logits of what a linear head gives."""
    assert isinstance(head.weight, Tensor)
    losses = [torch.zeros(0, dtype=torch.float32, device=hidden.device)]
    buffer = hidden.new_empty(min(ROWS, len(hidden)) * min(TOKENS, len(head.weight)))
    with torch.no_grad():
        for rows, wanted in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
            if len(head.weight) <= TOKENS:
                logits = _projected(head, 0, rows, buffer)
                losses += [_cross_entropy(adjust, *one) for one in _pieces(logits, wanted)]
            else:
                losses.append(_over_tiles(head, adjust, rows, wanted, buffer))
    return torch.cat(losses)


def _over_tiles(
    head: nn.Module, adjust: Adjust, rows: Tensor, wanted: Tensor, buffer: Tensor
) -> Float[Tensor, "row"]:
    sums, own = [], torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    for start in range(0, len(head.weight), TOKENS):  # type: ignore[arg-type]
        logits = _projected(head, start, rows, buffer)
        here = ((wanted >= start) & (wanted < start + TOKENS)).nonzero().squeeze(1)
        own[here] = adjust(logits[here, wanted[here] - start].float())
        pieces = [adjust(piece.float()).logsumexp(-1) for piece, _ in _pieces(logits, wanted)]
        sums.append(torch.cat(pieces))
    return torch.stack(sums).logsumexp(0) - own


def _projected(head: nn.Module, start: int, rows: Tensor, buffer: Tensor) -> Logits:
    """The head's answers for one tile of tokens, in memory that all tiles share."""
    weight, bias = head.weight[start : start + TOKENS], head.bias  # type: ignore[index]
    logits = buffer[: len(rows) * len(weight)].view(len(rows), len(weight))
    torch.mm(rows, weight.T, out=logits)
    if isinstance(bias, Tensor):
        logits += bias[start : start + TOKENS]
    return logits


def _cross_entropy(adjust: Adjust, logits: Logits, wanted: Tensor) -> Float[Tensor, "row"]:
    return nn.functional.cross_entropy(adjust(logits.float()), wanted, reduction="none")


def _pieces(logits: Logits, wanted: Int[Tensor, "row"]) -> list[tuple[Tensor, Tensor]]:
    """A few rows at a time, so that they stay in a core's cache."""
    rows = max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return list(zip(logits.split(rows), wanted.split(rows), strict=True))
