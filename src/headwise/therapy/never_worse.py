"""Never worse on text like the corpus: is a patched model better there, with 95% confidence?

Judged on validation blocks that early stopping did not look at, if they hold enough documents;
otherwise on all of them (the best of a handful of validations is a mild selection, and it is said
in the artefact how many documents there were).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from headwise.errors import TextError
from headwise.forward.losses import shifted_targets, token_losses
from headwise.forward.tap import tapped
from headwise.intervals import FEWEST, paired_interval
from headwise.models.architectures import backbone_of, device_of
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus, build_corpus, spread_blocks
from headwise.texts.text_sets import TextSet
from headwise.therapy.values import LossChange

ENOUGH = 32  # unseen documents, with fewer all are judged: the interval would be too wide
POSITIONS = (0, 32, 96, 256, 1024)  # where buckets of the predicting token begin
MOST = 512  # blocks of a large corpus that are read: more would only narrow the interval


def require_validation(corpus: Corpus) -> None:
    """Refuse a corpus that cannot tell whether a repair is better."""
    documents, info = count_documents(corpus.validation), corpus.info
    tokens = (info.train_tokens + info.validation_tokens) // max(info.documents, 1)
    if documents < FEWEST:
        raise TextError(
            f"auto needs {FEWEST} validation documents to know whether a repair is better, and "
            f"this corpus has {documents}",
            where=f"{info.name}: {info.documents} documents of {tokens:,} tokens on average",
            fix=f"up to half of a small corpus becomes validation text, near-duplicates count as "
            f"one: add {2 * (FEWEST - documents)} different documents or more, as a folder of "
            "files, a .jsonl, or a .txt with a text on each line and --lines; one long document is "
            "one, however long: cut it where one part does not tell the next, at chapters, say",
        )


def judged_blocks(corpus: Corpus, seen: int) -> tuple[Batch, ...]:
    """The validation blocks that a patch is judged on; `seen` of them steered the training."""
    unseen = corpus.validation[seen:]
    enough = count_documents(unseen) >= ENOUGH
    return tuple(spread_blocks(unseen if enough else corpus.validation, MOST))


def count_documents(blocks: Sequence[Batch]) -> int:
    """Different documents in blocks of one split."""
    return len({document for block in blocks for document in block.index})


def loss_change(
    model: PreTrainedModel, patch: Patch, blocks: Sequence[Batch], texts: str
) -> LossChange:
    """Loss with the patch minus stock in nats per token, paired by document.

    Also along the context: a repair may gain late in a text and lose early.
    """
    before, tokens = _document_losses(model, blocks)
    with patch.applied(model):
        after, _ = _document_losses(model, blocks)
    deltas = after - before
    present = tokens > 0  # not every document is long enough for every position
    return LossChange(
        texts,
        len(tokens),
        paired_interval(deltas.sum(1), tokens.sum(1)),
        float((deltas.sum(1) > 0).mean()),
        {
            name: paired_interval(deltas[some, place], tokens[some, place])
            for place, (name, some) in enumerate(zip(_position_names(), present.T, strict=True))
            if some.any()
        },
    )


def _position_names() -> list[str]:
    ends = [*(str(end) for end in POSITIONS[1:]), ""]
    return [f"{start + 1}-{end}" for start, end in zip(POSITIONS, ends, strict=True)]


def other_blocks(loaded: LoadedModel, texts: TextSet, block: int) -> tuple[Batch, ...]:
    """Texts that a patch is judged on beside validation text, cut as the corpus is."""
    corpus = build_corpus(loaded, texts, block=block, validation_share=0.0)
    return tuple(spread_blocks(corpus.train, MOST))


def _document_losses(
    model: PreTrainedModel, blocks: Sequence[Batch]
) -> tuple[Float[np.ndarray, "document bucket"], Int[np.ndarray, "document bucket"]]:
    """Summed losses and predicted tokens by position; pieces of one document count as one."""
    owners = np.unique([i for block in blocks for i in block.index], return_inverse=True)
    shape = (len(owners[0]), len(POSITIONS))
    sums, tokens, row = np.zeros(shape), np.zeros(shape, dtype=int), 0
    with torch.inference_mode():
        for block in blocks:
            ids = block.ids.to(device_of(model))
            with tapped(model):
                last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            losses = token_losses(model, last, shifted_targets(ids, block.lengths))
            rows = losses.double().cpu().numpy()
            for loss, length in zip(rows, (block.lengths - 1).tolist(), strict=True):
                place, row = owners[1][row], row + 1
                buckets = np.digitize(np.arange(length), POSITIONS) - 1
                sums[place] += np.bincount(buckets, loss[:length], len(POSITIONS))
                tokens[place] += np.bincount(buckets, minlength=len(POSITIONS))
    return sums, tokens
