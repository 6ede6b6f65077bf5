"""Perplexity on named text sets: predicted tokens counted, batched, with intervals.

A text longer than `max_length` is scored with a stride: every token is predicted once, with at
least `max_length - stride` tokens of context where the text has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from headwise.forward.losses import IGNORED, shifted_targets, token_losses
from headwise.forward.tap import tapped
from headwise.intervals import Interval, mean_interval
from headwise.models.architectures import device_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.progress import Progress, silent, track
from headwise.proof.evaluation import DocumentLosses
from headwise.texts.batches import DEFAULT_MAX_LENGTH, batches, encode_texts
from headwise.texts.text_sets import TextSet


@dataclass(frozen=True)
class TextLosses:
    """Summed loss and predicted tokens of every document of one text set."""

    texts: TextSet
    sums: Float[np.ndarray, "document"] = field(repr=False)
    tokens: Int[np.ndarray, "document"] = field(repr=False)

    def loss(self, seed: int = 0) -> Interval:
        """Mean loss in nats per predicted token."""
        return mean_interval(self.sums, self.tokens, seed=seed)

    def summary(self, seed: int = 0) -> DocumentLosses:
        """The entry of a text set in `evaluation.json`."""
        loss = self.loss(seed)
        return DocumentLosses(
            texts=self.texts.describe(),
            loss=loss,
            perplexity=loss.exp(),
            predicted_tokens=int(self.tokens.sum()),
            documents=len(self.sums),
            document_loss_sums=tuple(self.sums.tolist()),
            document_tokens=tuple(self.tokens.tolist()),
        )


@dataclass(frozen=True)
class Windows:
    """Pieces of documents for scoring: which document, and how many first targets to ignore."""

    encoded: list[list[int]]
    document: list[int]
    ignored: list[int]


def make_windows(encoded: Sequence[Sequence[int]], size: int, stride: int) -> Windows:
    """Cut documents so that each token is predicted exactly once."""
    pieces, document, ignored = [], [], []
    for number, ids in enumerate(encoded):
        start, scored = 0, 1  # targets below `scored` are done; token 0 is never predicted
        while scored < len(ids):
            stop = min(start + size, len(ids))
            pieces.append(list(ids[start:stop]))
            document.append(number)
            ignored.append(scored - start - 1)
            scored, start = stop, min(start + stride, stop - 1)  # one token of context at least
    return Windows(pieces, document, ignored)


@takes_model
def text_losses(
    loaded: LoadedModel,
    texts: TextSet,
    *,
    max_length: int = DEFAULT_MAX_LENGTH,
    stride: int | None = None,
    batch_size: int = 4,
    bos: bool = False,
    progress: Progress = silent,
) -> TextLosses:
    """Losses of every document of a text set, whole documents, whatever their length."""
    model = loaded.model
    encoded = encode_texts(loaded.tokenizer, texts.texts, max_length=None, bos=bos)
    windows = make_windows(encoded, max_length, stride or max(1, max_length // 2))
    sums = np.zeros(len(encoded))
    tokens = np.zeros(len(encoded), dtype=np.int64)
    device = device_of(model)
    work = list(batches(windows.encoded, batch_size))
    for batch in track(work, f"perplexity on {texts.name[:30]}", progress):
        ids = batch.ids.to(device)
        targets = shifted_targets(ids, batch.lengths)
        for row, piece in enumerate(batch.index):
            targets[row, : windows.ignored[piece]] = IGNORED
        with torch.inference_mode(), tapped(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            losses = token_losses(model, hidden, targets).double().sum(1).cpu().numpy()
        counted = (targets != IGNORED).sum(1).cpu().numpy()
        owners = [windows.document[piece] for piece in batch.index]
        np.add.at(sums, owners, losses)
        np.add.at(tokens, owners, counted)
    return TextLosses(texts, sums, tokens)


def paired_difference(after: TextLosses, before: TextLosses, seed: int = 0) -> Interval:
    """Mean loss of `after` minus `before` on the same tokens, with its paired interval."""
    return mean_interval(after.sums - before.sums, before.tokens, seed=seed)
