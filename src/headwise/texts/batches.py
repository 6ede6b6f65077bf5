"""Token batches: texts are encoded, cut and padded on the right.

Under a causal mask a real token never sees padding on its right, so every statistic is exact
without a padding mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwise.errors import TextError

DEFAULT_MAX_LENGTH = 512


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int | None = DEFAULT_MAX_LENGTH,
    bos: bool = False,
    minimum: int = 2,
) -> list[list[int]]:
    """Token ids of each text, cut at `max_length`; special tokens as the tokenizer adds them."""
    if not texts:
        raise TextError("there is no text", fix="pass --texts with at least one non-empty text")
    encoded = []
    for number, text in enumerate(texts):
        ids = list(tokenizer(text, truncation=False, verbose=False)["input_ids"])
        if bos and (not ids or ids[0] != tokenizer.bos_token_id):
            if tokenizer.bos_token_id is None:
                raise TextError("--bos: the tokenizer has no BOS token", fix="run without --bos")
            ids = [tokenizer.bos_token_id, *ids]
        if len(ids) < minimum:
            raise TextError(
                f"text {number} has {len(ids)} token{'s' * (len(ids) != 1)}, "
                f"at least {minimum} are needed: {text[:40]!r}",
                fix="leave it out or use a longer text",
            )
        encoded.append(ids[:max_length])
    return encoded


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids with the true lengths and the places of the texts in their set."""

    ids: Int[Tensor, "text position"]
    lengths: Int[Tensor, "text"]
    index: tuple[int, ...]


def batches(encoded: Sequence[Sequence[int]], batch_size: int) -> Iterator[Batch]:
    """Batches of texts of similar length, longest first (so memory peaks at once)."""
    order = sorted(range(len(encoded)), key=lambda i: (-len(encoded[i]), i))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        lengths = torch.tensor([len(encoded[i]) for i in chosen])
        ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
        for row, i in enumerate(chosen):
            ids[row, : len(encoded[i])] = torch.tensor(list(encoded[i]))
        yield Batch(ids, lengths, tuple(chosen))


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Several batches as one, right-padded to the longest."""
    longest = max(part.ids.shape[1] for part in parts)
    padded = [F.pad(part.ids, (0, longest - part.ids.shape[1])) for part in parts]
    lengths = torch.cat([part.lengths for part in parts])
    return Batch(torch.cat(padded), lengths, tuple(range(len(lengths))))
