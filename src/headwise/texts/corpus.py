"""Corpora for training: documents split by content hash, cut to pieces, grouped into blocks.

A block holds about `block` tokens of whole pieces. Every piece is its own row, so no token sees or
predicts across a document boundary. Which document lands in which split depends on its content
alone, so train and validation are disjoint by construction, also across runs and corpora. Only
near-duplicates go where the first of them in alphabetical order goes: none of them crosses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Int

from headwise.artefacts import content_hash
from headwise.errors import TextError
from headwise.models.loaded_model import LoadedModel
from headwise.models.rope import LengthClass, length_class
from headwise.texts.batches import Batch, batches, split_batch, token_ids
from headwise.texts.corpus_info import CorpusInfo
from headwise.texts.near_duplicates import near_duplicate_groups, near_duplicates_of
from headwise.texts.text_sets import TextSet, document_hash

VALIDATION_SHARE = 0.05
_BUCKETS = 10_000


@dataclass(frozen=True)
class Corpus:
    """Token blocks of one corpus, with what identifies it."""

    info: CorpusInfo
    train: tuple[Batch, ...] = field(repr=False)
    validation: tuple[Batch, ...] = field(default=(), repr=False)
    documents: tuple[str, ...] = field(default=(), repr=False)  # hashes of all that was kept


def in_validation(text: str, share: float = VALIDATION_SHARE) -> bool:
    """Whether a document belongs to validation: decided by its content hash."""
    return _bucket(text) < share * _BUCKETS


def _bucket(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") % _BUCKETS


def held_out(
    texts: Sequence[str],
    groups: Int[np.ndarray, "document"],
    share: float = VALIDATION_SHARE,
    fewest: int = 0,
) -> Bool[np.ndarray, "document"]:
    """Which documents are validation text: a group of near-duplicates goes as a whole.

    The share grows until `fewest` groups are validation text, at most half of all: what is
    validation text at a small share still is at a larger one.
    """
    first: dict[int, str] = {}
    for group, text in zip(groups.tolist(), texts, strict=True):
        first[group] = min(first.get(group, text), text)
    buckets = np.array([_bucket(first[group]) for group in sorted(first)])
    border = share * _BUCKETS
    if 0 < fewest <= len(buckets) // 2:
        border = max(border, np.sort(buckets)[fewest - 1] + 1)
    held: Bool[np.ndarray, "document"] = buckets[groups] < border
    return held


def validation_documents(texts: Sequence[str]) -> list[str]:
    """The documents of a corpus that no repair is trained on."""
    held = held_out(texts, near_duplicate_groups(texts))
    return [text for text, yes in zip(texts, held, strict=True) if yes]


def build_corpus(
    loaded: LoadedModel,
    texts: TextSet,
    *,
    block: int,
    batch_tokens: int = 2,
    validation_share: float = VALIDATION_SHARE,
    fewest_validation: int = 0,
    excluded: Sequence[str] = (),
) -> Corpus:
    """Tokenise, split and group a corpus without `excluded` texts and near-duplicates of them.

    Where 5% of a small corpus are fewer than `fewest_validation` documents, validation gets up to
    half. With a share of 0 there is no validation text.
    """
    forbidden = {content_hash([text]) for text in excluded}
    unique = list(dict.fromkeys(texts.texts))
    other = [text for text in unique if content_hash([text]) not in forbidden]
    near = near_duplicates_of(other, excluded)
    kept = [text for text, alike in zip(other, near, strict=True) if not alike]
    groups = near_duplicate_groups(kept) if validation_share else np.arange(len(kept))
    held = held_out(kept, groups, validation_share, fewest_validation)
    places = {"train": np.flatnonzero(~held), "validation": np.flatnonzero(held)}
    blocks = {
        name: _blocks(loaded, [kept[i] for i in some], block) for name, some in places.items()
    }
    # near-duplicates are no independent evidence: in validation they count as one document
    owners = np.unique(groups[held], return_index=True, return_inverse=True)
    first = owners[1][owners[2]].tolist()
    blocks["validation"] = [
        replace(b, index=tuple(first[i] for i in b.index)) for b in blocks["validation"]
    ]
    tokens = {name: sum(int(b.lengths.sum()) for b in found) for name, found in blocks.items()}
    if tokens["train"] < batch_tokens:
        raise TextError(
            f"the corpus has {tokens['train']} training tokens, one batch needs {batch_tokens}",
            where=texts.name,
            fix="add text, or lower batch_size, accumulation or block in the recipe",
        )
    info = CorpusInfo(
        name=texts.name,
        sha256=texts.sha256,
        documents=len(texts.texts),
        duplicates=len(texts.texts) - len(unique),
        excluded=len(unique) - len(other),
        near_duplicates=len(kept) - len(np.unique(groups)) or None,
        near_excluded=len(other) - len(kept) or None,
        train_documents=len(places["train"]),
        validation_documents=len(places["validation"]),
        train_tokens=tokens["train"],
        validation_tokens=tokens["validation"],
    )
    hashes = tuple(sorted(document_hash(text) for text in kept))
    corpus = Corpus(info, tuple(blocks["train"]), tuple(blocks["validation"]), hashes)
    return split_blocks(corpus, length_class(loaded.model))


def _blocks(loaded: LoadedModel, documents: Sequence[str], block: int) -> list[Batch]:
    every = loaded.bos and loaded.first_token.needed
    pieces: list[list[int]] = []
    owners: list[int] = []
    for number, text in enumerate(documents):
        cut = _pieces(token_ids(loaded.tokenizer, text, loaded.bos), block, every)
        pieces += [piece for piece in cut if len(piece) >= 2]
        owners += [number] * (len(pieces) - len(owners))
    # Pieces of like length share a block, so that rows need little padding.
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i]), i))
    groups: list[list[int]] = []
    room = 0
    for index in order:
        if not groups or len(pieces[index]) > room:
            groups.append([])
            room = block
        groups[-1].append(index)
        room -= len(pieces[index])
    return [_block([pieces[i] for i in group], [owners[i] for i in group]) for group in groups]


def split_blocks(corpus: Corpus, kind: LengthClass) -> Corpus:
    """The corpus in blocks whose rows may share a batch."""
    train, validation = (
        tuple(part for block in blocks for part in split_batch(block, kind))
        for blocks in (corpus.train, corpus.validation)
    )
    return replace(corpus, train=train, validation=validation)


def _block(pieces: list[list[int]], owners: list[int]) -> Batch:
    """Pieces as one batch; the index of a row is its document."""
    batch = next(batches(pieces, len(pieces)))
    return replace(batch, index=tuple(owners[place] for place in batch.index))


def _pieces(ids: list[int], block: int, every: bool) -> list[list[int]]:
    """A document in pieces of at most `block` tokens; with `every` each one starts with the BOS."""
    if not every:
        return [ids[i : i + block] for i in range(0, len(ids), block)]
    bos, rest = ids[:1], ids[1:]
    return [bos + rest[i : i + block - 1] for i in range(0, len(rest), block - 1)]


def block_order(num_blocks: int, seed: int, epoch: int) -> list[int]:
    """The order of blocks in one epoch: a function of seed and epoch alone."""
    generator = np.random.default_rng([seed, epoch])
    return [int(i) for i in generator.permutation(num_blocks)]


def block_at(num_blocks: int, seed: int, position: int) -> int:
    """The block at a position of the endless stream of shuffled epochs."""
    epoch, place = divmod(position, num_blocks)
    return block_order(num_blocks, seed, epoch)[place]


def spread_blocks(blocks: Sequence[Batch], count: int) -> list[Batch]:
    """At most `count` blocks, evenly spaced: blocks are ordered by length."""
    places = np.linspace(0, len(blocks) - 1, min(count, len(blocks))).round().astype(int)
    return [blocks[place] for place in places]
