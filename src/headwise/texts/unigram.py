"""The loss of a unigram model of the same texts: what token frequencies alone would reach.

Each document is predicted from the others, with Witten-Bell smoothing, so that a small text set
gives an honest (high) reference and not its own entropy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def unigram_loss(encoded: Sequence[Sequence[int]], vocabulary: int) -> float:
    """Mean loss in nats per predicted token; one document alone is guessed uniformly."""
    rows = [np.bincount(np.asarray(ids[1:]), minlength=vocabulary) for ids in encoded]
    total = np.sum(rows, axis=0)
    loss = 0.0
    for counts in rows:
        others = total - counts
        size, types = int(others.sum()), int((others > 0).sum())
        seen = counts > 0
        p = (others[seen] + max(types, 1) / vocabulary) / (size + max(types, 1))
        loss -= float(counts[seen] @ np.log(p))
    return loss / int(total.sum())
