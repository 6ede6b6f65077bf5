"""Head maps and tables as pandas frames; pandas is imported only when a frame is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headwise.errors import HeadwiseError
from headwise.intervals import Interval

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Rows as a pandas frame."""
    try:
        import pandas as pd
    except ImportError:
        raise HeadwiseError("to_frame() needs pandas", fix="pip install pandas") from None
    return pd.DataFrame(list(rows))


def interval_columns(intervals: Mapping[str, Interval]) -> dict[str, float]:
    """Value, low and high of named intervals as columns."""
    return {
        name + ending: getattr(interval, part)
        for name, interval in intervals.items()
        for ending, part in (("", "value"), ("_low", "low"), ("_high", "high"))
    }


def head_frame(
    maps: Mapping[str, np.ndarray],
    labels: Mapping[str, Sequence[Sequence[object]]],
    layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per head: layer, head, labels such as its class, and every map."""
    shape = next(iter(maps.values())).shape
    return frame(
        [
            {
                "layer": layer if layers is None else layers[layer],
                "head": head,
                **{name: rows[layer][head] for name, rows in labels.items()},
                **{name: float(values[layer, head]) for name, values in maps.items()},
            }
            for layer, head in np.ndindex(*shape)
        ]
    )
