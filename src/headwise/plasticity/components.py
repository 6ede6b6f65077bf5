"""Principal components of captured queries and keys, and how far each one tells the position.

A component that follows the position is where a head keeps it: under RoPE it appears when vectors
are captured behind the rotation and is gone before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float

from headwise.plasticity.reader import HeadGroup, QKFolder, VectorTable, read_vectors
from headwise.plasticity.settings import PlasticitySettings

COLUMNS = (
    *("layer", "head", "kind", "pca_dim"),
    *("correlation", "p_value", "explained_variance_ratio"),
)
CORRELATIONS = "correlations.csv"


def component_rows(
    folder: QKFolder, groups: Iterable[HeadGroup], settings: PlasticitySettings
) -> Iterator[dict[str, object]]:
    """A row for each of the first `settings.pca` components of every captured head."""
    for group in groups:
        owners = [(head, "q") for head in group.q_heads] + [(group.k_head, "k")]
        for head, kind in owners:
            path: Path = folder.verified_file(group.layer, head, kind)
            table = read_vectors(path, max_rows=settings.max_tokens_per_head, seed=settings.seed)
            numbers = position_correlations(table, settings.pca)
            for component, row in enumerate(numbers):
                known = (group.layer, head, kind, component, *map(float, row))
                yield dict(zip(COLUMNS, known, strict=True))


def position_correlations(table: VectorTable, count: int) -> Float[np.ndarray, "component 3"]:
    """Pearson correlation with position, its p-value, and the share of variance.

    A component's sign is arbitrary: its largest entry is made positive. A component without
    variance, or text of one position, has no correlation: NaN.
    """
    from scipy.stats import pearsonr  # late: slow to load

    centred = table.vectors.astype(np.float64)
    centred -= centred.mean(0)
    powers, axes = np.linalg.eigh(centred.T @ centred)
    order = np.argsort(powers)[::-1][:count]
    axes = axes[:, order]
    signs = np.sign(axes[np.abs(axes).argmax(0), np.arange(len(order))])
    scores = centred @ (axes * signs)
    total = powers.sum()
    rows = np.full((len(order), 3), np.nan)
    rows[:, 2] = powers[order].clip(0) / total if total > 0 else np.nan
    for at in range(len(order)):
        if len(table.position) > 2 and np.ptp(table.position) > 0 and np.ptp(scores[:, at]) > 0:
            rows[at, :2] = pearsonr(scores[:, at], table.position)
    return rows
