"""Perplexity on named text sets: predicted tokens counted, batched, with intervals.

A text longer than `max_length` is scored in windows: every token is predicted once, with at least
`max_length - stride` tokens of context where the text has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ModelError
from headwise.forward.hooked_pass import HookedPass
from headwise.forward.losses import IGNORED, shifted_targets
from headwise.forward.measurements import Measurement, run_measurement
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.progress import Progress, silent
from headwise.proof.values import DocumentLosses
from headwise.texts.batches import DEFAULT_MAX_LENGTH, Batch, batches, encode_for
from headwise.texts.text_sets import TextSet

Sums = Float[np.ndarray, "document"]
Tokens = Int[np.ndarray, "document"]
# a piece of a document: its tokens, which document, and how many first targets count no more
Window = tuple[list[int], int, int]


def make_windows(
    encoded: Sequence[Sequence[int]], size: int, stride: int, prefix: Sequence[int] = ()
) -> list[Window]:
    """Cut documents so that each token is predicted exactly once; later pieces get the prefix.

    First pieces stand first: they are the texts as other measurements read them, which then share
    their forward passes.
    """
    first: list[Window] = []
    later: list[Window] = []
    for number, ids in enumerate(encoded):
        start, scored = 0, 1  # targets below `scored` are done; token 0 is never predicted
        while scored < len(ids):
            stop = min(start + size - len(prefix if start else ()), len(ids))
            before = prefix if start else ()
            ignored = scored - start - 1 + len(before)
            window = [*before, *ids[start:stop]], number, ignored
            (later if start else first).append(window)
            scored, start = stop, min(start + stride, stop - 1)  # one token of context at least
    return first + later


@takes_model
def text_losses(
    loaded: LoadedModel,
    texts: TextSet,
    *,
    max_length: int = DEFAULT_MAX_LENGTH,
    whole: bool = True,
    stride: int | None = None,
    batch_size: int = 4,
    progress: Progress = silent,
) -> DocumentLosses:
    """Losses of every document of a text set, `whole` in windows, or cut at `max_length`."""
    max_length = loaded.length(max_length)
    encoded = encode_for(loaded, texts.texts, max_length=None if whole else max_length)
    work = losses_measurement(
        loaded, texts, encoded, max_length=max_length, stride=stride, batch_size=batch_size
    )
    sums, tokens = run_measurement(loaded.model, work, progress=progress)
    return DocumentLosses.of(texts.describe(), sums, tokens)


def losses_measurement(
    loaded: LoadedModel,
    texts: TextSet,
    encoded: Sequence[Sequence[int]],
    *,
    max_length: int,
    stride: int | None = None,
    batch_size: int = 4,
    apart: int = 0,
) -> Measurement[tuple[Sums, Tokens]]:
    """Summed loss and predicted tokens of each text, in windows where it is over `max_length`.

    The first texts, as many as `apart` says, stand in batches of their own (see `batches`).
    """
    prefix = [loaded.tokenizer.bos_token_id] if loaded.bos and loaded.first_token.needed else []
    windows = make_windows(encoded, max_length, stride or max(1, max_length // 2), prefix)
    sums = np.zeros(len(encoded))
    tokens = np.zeros(len(encoded), dtype=np.int64)
    pieces = [piece for piece, _, _ in windows]
    work = list(batches(pieces, batch_size, model=loaded.model, apart=apart))
    wanted = [_targets(batch, windows) for batch in work]

    def take(number: int, _: int | None, losses: Float[Tensor, "text position"]) -> None:
        owners = [windows[piece][1] for piece in work[number].index]
        np.add.at(sums, owners, losses.double().sum(1).numpy())
        np.add.at(tokens, owners, (wanted[number] != IGNORED).sum(1).numpy())

    title = f"perplexity on {texts.name[:30]}"
    yield HookedPass([batch.ids for batch in work], take, targets=wanted, title=title)
    _require_numbers(loaded, texts, sums)
    return sums, tokens


def _targets(batch: Batch, windows: Sequence[Window]) -> Int[Tensor, "text position"]:
    """What each position predicts; what an earlier window has scored counts no more."""
    targets = shifted_targets(batch.ids, batch.lengths)
    for row, piece in enumerate(batch.index):
        targets[row, : windows[piece][2]] = IGNORED
    return targets


def _require_numbers(loaded: LoadedModel, texts: TextSet, sums: Sums) -> None:
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        raise ModelError(
            f"the loss of {len(wrong)} of {len(sums)} texts is no number: {loaded.model.dtype} "
            f"overflows, first in text {wrong[0]} of {texts.name}",
            where=loaded.id,
            fix="use --dtype float32 (or bfloat16, which has its range)",
        )
