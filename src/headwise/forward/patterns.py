"""Attention patterns of chosen heads on one prompt, for looking at.

This is the only place where a whole query x key matrix is made: for a prompt, and for the heads
that are asked for. The weights are those of the model's own run (windows, soft caps, ALiBi and
learned sinks included), from the same scores that every statistic is read from.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from headwise.drawing import AMOUNT_COLOURS, figure_bytes, new_figure
from headwise.errors import SelectionError
from headwise.forward.attention import tile_scores
from headwise.forward.guard import guard
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head, format_heads, select_in_layers
from headwise.models.architectures import geometry_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.texts.batches import encode_for

_LABELLED = 40  # tokens: more labels than this overlap
_DRAWN = 64  # heads in one figure


@dataclass(frozen=True)
class AttentionPatterns:
    """What each of some heads looks at: a row of weights per query, over the keys."""

    model: str
    tokens: tuple[str, ...]
    heads: tuple[Head, ...]
    weights: Float[np.ndarray, "head query key"] = field(repr=False)

    def __getitem__(self, head: Head | str) -> Float[np.ndarray, "query key"]:
        """The pattern of one head, by its name (`L4H7`) too."""
        name = Head.parse(head) if isinstance(head, str) else head
        if name not in self.heads:
            raise SelectionError(
                f"{name} is not among the patterns",
                fix=f"ask for one of {format_heads(self.heads)}",
            )
        pattern: Float[np.ndarray, "query key"] = self.weights[self.heads.index(name)]
        return pattern

    def figure(self) -> Figure:
        """One square per head: queries down, keys to the right."""
        shown = self.heads[:_DRAWN]
        columns = min(len(shown), 4)
        rows = math.ceil(len(shown) / columns)
        labelled = len(self.tokens) <= _LABELLED
        size = max(2.4, 0.17 * len(self.tokens)) if labelled else 3.2
        figure = new_figure(0.6 + size * columns, 0.5 + size * rows)
        all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, head in zip(all_axes, shown, strict=False):
            axes.imshow(self[head], vmin=0.0, vmax=1.0, cmap=AMOUNT_COLOURS)
            axes.set_title(str(head), loc="left")
            if labelled:
                axes.set_xticks(range(len(self.tokens)), self.tokens, rotation=90, fontsize=6)
                axes.set_yticks(range(len(self.tokens)), self.tokens, fontsize=6)
            else:
                axes.set(xlabel="key", ylabel="query")
        for axes in all_axes[len(shown) :]:
            axes.set_axis_off()
        return figure

    def _repr_html_(self) -> str:
        image = base64.b64encode(figure_bytes(self.figure(), "png")).decode()
        rest = len(self.heads) - _DRAWN
        more = f"<p>{rest} more heads are in <code>weights</code></p>" if rest > 0 else ""
        title = html.escape(f"{self.model}: attention of {format_heads(self.heads)}")
        return f'<p>{title}</p><img src="data:image/png;base64,{image}" alt="{title}">{more}'


@takes_model
@torch.inference_mode()
def attention(
    loaded: LoadedModel, prompt: str, heads: str = "all", *, bos: bool | None = None
) -> AttentionPatterns:
    """The exact attention weights of selected heads on a prompt.

    A row sums to 1, or to less where the family has a learned sink outside the keys.
    """
    loaded = loaded.reading(bos)
    model, geometry = loaded.model, geometry_of(loaded.model)
    chosen = select_in_layers(None, heads, geometry.layers, geometry.num_heads)
    if not chosen:
        raise SelectionError(f"{heads!r} selects no head", fix="name heads as in L4H7 or L0-3H2")
    [ids] = encode_for(loaded, [prompt], max_length=loaded.max_positions)
    guard(loaded, len(ids))
    patterns: dict[Head, Tensor] = {}

    def read(layer: LayerAttention) -> None:
        indices = [head.index for head in chosen if head.layer == layer.layer]
        if indices:
            logits, lse = tile_scores(layer.scores, 0, layer.scores.length)
            weights = (logits - lse[..., None]).exp()[0, indices].cpu()
            for index, weight in zip(indices, weights, strict=True):
                patterns[Head(layer.layer, index)] = weight

    with tapped(model, read):
        model(torch.tensor([ids], device=model.device), use_cache=False)
    stacked = torch.stack([patterns[head] for head in chosen]).numpy()
    return AttentionPatterns(loaded.id, _shown_tokens(loaded, ids), tuple(chosen), stacked)


def _shown_tokens(loaded: LoadedModel, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text, with line ends and tabs visible."""
    texts = [str(loaded.tokenizer.decode([token])) for token in ids]
    return tuple(
        text if text.isprintable() else text.encode("unicode_escape").decode() for text in texts
    )
