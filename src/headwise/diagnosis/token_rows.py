"""How awake heads are, by token: sums of 1 - (mass on the sink) over the queries of each token.

The output of a head is (1 - g) v_0 + g c with g = 1 - A_t0 and c its attention on the other keys,
renormalised: g is how awake it is at query t, exactly. What a learned sink takes counts as asleep.
Query 0 has nothing but the sink and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwise.diagnosis.values import Wakers, Waking
from headwise.heads import Head
from headwise.texts.batches import Batch
from headwise.texts.token_kinds import ENDS, KINDS, token_text

SEEN = 5  # times a token must occur before it is said to wake a head
WAKERS = 8  # tokens that are named for a head
SHOWN = 160  # tokens of the text that is shown
AWAKE = 0.01  # more awake than on the whole by this much, or it is rounding


@dataclass(frozen=True)
class TokenRows:
    """A row for every kind of token, then one for every token that occurs often enough."""

    kinds: Sequence[Tensor] = field(repr=False)  # (text, position) of each batch
    tokens: Sequence[Tensor] = field(repr=False)  # the same; the last row is for rare tokens
    ids: tuple[int, ...] = field(repr=False)  # of the tokens that have a row
    shown: tuple[int, int]  # batch and text of the one that is shown
    shown_length: int
    counts: Int[np.ndarray, "row"] = field(repr=False)  # measured queries

    @property
    def count(self) -> int:
        """Rows, one for all rare tokens among them."""
        return len(KINDS) + len(self.ids) + 1

    def sums(
        self,
        number: int,
        awake: Float[Tensor, "text head query"],
        weights: Float[Tensor, "text query"],
    ) -> tuple[Float[np.ndarray, "head row"], Float[np.ndarray, "head token"] | None]:
        """What one layer adds to every row, and g of the shown text where this is its batch."""
        measured = (weights > 0) & (torch.arange(weights.shape[1], device=weights.device) > 0)
        flat = awake.clamp(0, 1).double().transpose(1, 2)[measured].cpu()  # (query, head)
        where = measured.cpu()
        sums = torch.zeros(self.count, flat.shape[1], dtype=torch.float64)
        for rows in (self.kinds[number][where], self.tokens[number][where]):
            sums.index_add_(0, rows, flat)
        shown = None
        if number == self.shown[0]:
            shown = awake[self.shown[1], :, : self.shown_length].clamp(0, 1).cpu().numpy()
        return sums.T.numpy(), shown


def token_rows(work: Sequence[Batch], codes: Mapping[int, int], skip: int) -> TokenRows:
    """The rows of these batches without the first `skip` queries; the first text is shown."""
    often: Counter[int] = Counter()
    for batch in work:
        for row, length in zip(batch.ids, batch.lengths, strict=True):
            often.update(row[1 : int(length)].tolist())
    ids = sorted(one for one, times in often.items() if times >= SEEN)
    place = {one: len(KINDS) + at for at, one in enumerate(ids)}
    rare = len(KINDS) + len(ids)
    shown = next((b, w.index.index(0)) for b, w in enumerate(work) if 0 in w.index)
    length = min(SHOWN, int(work[shown[0]].lengths[shown[1]]))

    def rows(table: Mapping[int, int], batch: Batch, missing: int) -> Tensor:
        return torch.tensor(
            [[table.get(one, missing) for one in row] for row in batch.ids.tolist()]
        )

    kinds = {one: code % ENDS for one, code in codes.items()}
    by_kind = [rows(kinds, batch, 0) for batch in work]
    by_token = [rows(place, batch, rare) for batch in work]
    counts = torch.zeros(rare + 1, dtype=torch.long)
    for number, batch in enumerate(work):
        position = torch.arange(batch.ids.shape[1])[None]
        where = (position < batch.lengths[:, None]) & (position >= max(1, skip))
        both = torch.cat([by_kind[number][where], by_token[number][where]])
        counts += both.bincount(minlength=rare + 1)
    return TokenRows(by_kind, by_token, tuple(ids), shown, length, counts.numpy())


def waking_of(
    rows: TokenRows,
    sums: Float[np.ndarray, "layer head row"],
    text: Float[np.ndarray, "layer head token"],
    sick: Bool[np.ndarray, "layer head"],
    layers: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    shown_ids: Sequence[int],
) -> Waking | None:
    """What wakes each sick head, against how awake it is on the whole."""
    if not sick.any():
        return None
    counts = rows.counts
    numbers = np.maximum(counts, 1)
    heads = {}
    names = {one: token_text(tokenizer, one) for one in rows.ids}
    for row, index in np.argwhere(sick):
        mean = sums[row, index] / numbers
        by_kind = slice(0, len(KINDS))
        base = float(sums[row, index, by_kind].sum() / max(counts[by_kind].sum(), 1))
        kinds = {k: float(mean[at]) for at, k in enumerate(KINDS) if counts[at]}
        often = np.arange(len(KINDS), len(KINDS) + len(rows.ids))
        # a mean over few is further off by chance: the surprise grows with the root of the count
        surprise = (mean[often] - base) * np.sqrt(counts[often])
        best = [int(at) for at in often[np.argsort(-surprise, kind="stable")][:WAKERS]]
        tokens = [
            (names[rows.ids[at - len(KINDS)]], float(mean[at]), int(counts[at]))
            for at in best
            if mean[at] > base + AWAKE
        ]
        awake = tuple(float(g) for g in text[row, index].round(3))
        heads[str(Head(layers[row], int(index)))] = Wakers(base, kinds, tuple(tokens), awake)
    shown = tuple(token_text(tokenizer, one) for one in shown_ids[: rows.shown_length])
    return Waking(shown, heads)
