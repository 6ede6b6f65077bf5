"""Token batches: texts are encoded, cut and padded on the right.

Under a causal mask a real token never sees padding on its right, so every statistic is exact
without a padding mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.errors import ModelError, TextError
from headwise.models.loaded_model import LoadedModel
from headwise.models.rope import LengthClass, length_class
from headwise.models.tokenizing import tokenise

DEFAULT_MAX_LENGTH = 512
_SAMPLE = 64  # texts that tell how long the others are
_LONGEST = 1_000_000  # characters tokenised at once: the tokenizer needs some 160 bytes for each


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int | None = DEFAULT_MAX_LENGTH,
    bos: bool | None = None,
    minimum: int = 2,
) -> list[list[int]]:
    """Token ids of each text, cut at `max_length`.

    `bos` puts a BOS in front, or takes it away; by default it is as the tokenizer has it.
    """
    if not texts:
        raise TextError("there is no text", fix="pass --texts with at least one non-empty text")
    if max_length is not None and max_length < minimum:
        raise TextError(
            f"texts cut at {max_length} tokens say nothing", fix=f"max_length of {minimum} or more"
        )
    encoded = []
    for number, text in enumerate(texts):
        ids = token_ids(tokenizer, text, bos, most=max_length)
        if len(ids) < minimum:
            raise TextError(
                f"text {number} has {len(ids)} token{'s' * (len(ids) != 1)}, "
                f"at least {minimum} are needed: {text[:40]!r}",
                fix="leave it out or use a longer text",
            )
        encoded.append(ids[:max_length])
    return encoded


def token_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    bos: bool | None = None,
    *,
    most: int | None = None,
) -> list[int]:
    """One text as tokens, with a BOS in front, without one, or as the tokenizer has it.

    A huge text is tokenised in parts, and no further than `most` tokens and one for a BOS.
    """
    ids = tokenise(tokenizer, _part(text, 0))
    start = len(_part(text, 0))
    while start < len(text) and (most is None or len(ids) <= most):
        part = _part(text, start)
        ids += tokenise(tokenizer, part, special_tokens=False)
        start += len(part)
    if bos is None or bos == (bool(ids) and ids[0] == tokenizer.bos_token_id):
        return ids
    if not bos:
        return ids[1:]
    if tokenizer.bos_token_id is None:
        raise TextError("--bos: the tokenizer has no BOS token", fix="run without --bos")
    return [tokenizer.bos_token_id, *ids]


def _part(text: str, start: int) -> str:
    """What follows `start`, up to white space if all of it at once would fill the memory."""
    end = start + _LONGEST
    if len(text) <= end:
        return text[start:]
    space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
    return text[start : space if space > start else end]


def encode_for(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    max_length: int | None = DEFAULT_MAX_LENGTH,
    minimum: int = 2,
) -> list[list[int]]:
    """The texts as a model is to read them: its first token, its positions, its vocabulary."""
    cut = None if max_length is None else loaded.length(max_length)
    encoded = encode_texts(loaded.tokenizer, texts, max_length=cut, bos=loaded.bos, minimum=minimum)
    require_embedded(loaded, encoded)
    return encoded


def token_count(loaded: LoadedModel, texts: Sequence[str], max_length: int | None) -> int:
    """About how many tokens the texts have, from at most 64 of them."""
    some = texts[:: max(1, len(texts) // _SAMPLE)]
    lengths = [len(token_ids(loaded.tokenizer, text)[:max_length]) for text in some]
    return sum(lengths) * len(texts) // len(some)


def require_embedded(loaded: LoadedModel, encoded: Sequence[Sequence[int]]) -> None:
    """Refuse a token that the model has no embedding for, before it reads memory that is none."""
    largest = max(map(max, encoded))
    if largest >= loaded.num_embeddings:
        raise ModelError(
            f"the text has token {largest}, the model embeds {loaded.num_embeddings}: the "
            "tokenizer is larger than the embedding",
            where=loaded.id,
            fix="load the tokenizer that belongs to these weights",
        )


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids with the true lengths and the places of the texts in their set."""

    ids: Int[Tensor, "text position"]
    lengths: Int[Tensor, "text"]
    index: tuple[int, ...]


def batches(
    encoded: Sequence[Sequence[int]],
    batch_size: int,
    *,
    model: PreTrainedModel | None = None,
    apart: int = 0,
) -> Iterator[Batch]:
    """Batches of texts of similar length, longest first (so memory peaks at once).

    Texts that the model reads differently beside each other (`length_class`) share no batch. The
    first texts, as many as `apart` says, have batches of their own: a measurement of those alone
    makes the same ones, and shares their forward passes.
    """
    kind: LengthClass = (lambda _: 0) if model is None else length_class(model)
    for numbers in (range(apart), range(apart, len(encoded))):
        order = sorted(numbers, key=lambda i: (-len(encoded[i]), i))
        for _, alike in groupby(order, key=lambda i: kind(len(encoded[i]))):
            same = list(alike)
            for start in range(0, len(same), batch_size):
                chosen = same[start : start + batch_size]
                lengths = torch.tensor([len(encoded[i]) for i in chosen])
                ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
                for row, i in enumerate(chosen):
                    ids[row, : len(encoded[i])] = torch.tensor(list(encoded[i]))
                yield Batch(ids, lengths, tuple(chosen))


def split_batch(batch: Batch, kind: LengthClass) -> list[Batch]:
    """A batch as one for each class of its rows' lengths, each cut to its longest row."""
    classes = [kind(int(length)) for length in batch.lengths]
    if len(set(classes)) == 1:
        return [batch]
    parts = []
    for one in dict.fromkeys(classes):
        rows = [row for row, own in enumerate(classes) if own == one]
        lengths = batch.lengths[rows]
        index = tuple(batch.index[row] for row in rows)
        parts.append(Batch(batch.ids[rows, : int(lengths.max())], lengths, index))
    return parts


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Several batches as one, right-padded to the longest."""
    longest = max(part.ids.shape[1] for part in parts)
    padded = [F.pad(part.ids, (0, longest - part.ids.shape[1])) for part in parts]
    lengths = torch.cat([part.lengths for part in parts])
    return Batch(torch.cat(padded), lengths, tuple(range(len(lengths))))
