"""Never worse: is a patched model better than stock on validation text, with 95% confidence?

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
from headwise.intervals import FEWEST, Interval, paired_interval
from headwise.models.architectures import backbone_of, device_of
from headwise.models.patch import Patch
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus, spread_blocks

ENOUGH = 32  # unseen documents, with fewer all are judged: the interval would be too wide
MOST = 512  # blocks of a large corpus that are read: more would only narrow the interval


def require_validation(corpus: Corpus) -> None:
    """Refuse a corpus that cannot tell whether a repair is better."""
    documents = count_documents(corpus.validation)
    if documents < FEWEST:
        raise TextError(
            f"auto needs {FEWEST} validation documents to know whether a repair is better, and "
            f"this corpus has {documents}",
            where=f"{corpus.name}: {corpus.info.documents} documents",
            fix=f"up to half of a small corpus becomes validation text, near-duplicates count as "
            f"one: add {2 * (FEWEST - documents)} different documents or more, as a folder of "
            "files, a .jsonl, or a .txt with a text on each line and --lines",
        )


def judged_blocks(corpus: Corpus, seen: int) -> tuple[Batch, ...]:
    """The validation blocks that a patch is judged on; `seen` of them steered the training."""
    unseen = corpus.validation[seen:]
    enough = count_documents(unseen) >= ENOUGH
    return tuple(spread_blocks(unseen if enough else corpus.validation, MOST))


def count_documents(blocks: Sequence[Batch]) -> int:
    """Different documents in blocks of one split."""
    return len({document for block in blocks for document in block.index})


def validation_change(model: PreTrainedModel, patch: Patch, blocks: Sequence[Batch]) -> Interval:
    """Loss with the patch minus stock in nats per token, paired by document."""
    before, tokens = _document_losses(model, blocks)
    with patch.applied(model):
        after, _ = _document_losses(model, blocks)
    return paired_interval(after - before, tokens)


def _document_losses(
    model: PreTrainedModel, blocks: Sequence[Batch]
) -> tuple[Float[np.ndarray, "document"], Int[np.ndarray, "document"]]:
    """Summed losses and predicted tokens; pieces of one document count as one."""
    owners = np.array([document for block in blocks for document in block.index])
    sums = []
    with torch.inference_mode():
        for block in blocks:
            ids = block.ids.to(device_of(model))
            with tapped(model):
                last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            losses = token_losses(model, last, shifted_targets(ids, block.lengths))
            sums.append(losses.double().sum(1).cpu().numpy())
    lengths = torch.cat([block.lengths for block in blocks]).numpy() - 1
    places = np.unique(owners, return_inverse=True)[1]
    return np.bincount(places, np.concatenate(sums)), np.bincount(places, lengths).astype(int)
