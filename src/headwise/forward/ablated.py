"""`with ablated(model, heads): ...`: the model without some heads, for code of one's own.

Hooks on the output projections put another value into the heads' columns, so the model may be
called in any way while the context is open: with a key/value cache, by `generate`, in training.
`variant_losses` does the same for many sets at once and is faster; this is for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from headwise.errors import SelectionError
from headwise.forward.guard import guard
from headwise.forward.mean_outputs import head_mean, measure_means
from headwise.heads import Head, select_in_layers
from headwise.models.architectures import geometry_of, projection_of, require_plain
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.slices import head_spans
from headwise.texts.batches import batches, encode_for
from headwise.texts.text_sets import TextSet, as_text_set

Replacement = Literal["zero", "mean"]
_MEAN_TEXTS = 32  # texts that a head's mean output is measured on, if none are given


@takes_model
@contextmanager
def ablated(
    loaded: LoadedModel,
    heads: str | Sequence[Head],
    replacement: Replacement = "zero",
    *,
    texts: TextSet | Sequence[str] | None = None,
    max_length: int = 256,
) -> Iterator[None]:
    """While open, the heads give nothing ("zero") or their mean output over `texts` ("mean").

    The weights are not touched, and everything is as before when the context closes.
    """
    if replacement not in ("zero", "mean"):
        raise SelectionError(f"no replacement is called {replacement!r}", fix="use zero or mean")
    chosen = _selected(loaded, heads)
    require_plain(loaded.model)
    guard(loaded)
    values = {head: torch.zeros(()) for head in chosen}
    if replacement == "mean":
        values = _mean_values(loaded, chosen, texts, max_length)
    handles = []
    try:
        for layer in sorted({head.layer for head in chosen}):
            given = {head: value for head, value in values.items() if head.layer == layer}
            projection = projection_of(loaded.model, layer, "o")
            handles.append(projection.register_forward_pre_hook(_putting(loaded, given)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _selected(loaded: LoadedModel, heads: str | Sequence[Head]) -> list[Head]:
    geometry = geometry_of(loaded.model)
    selection = heads if isinstance(heads, str) else ",".join(map(str, heads))
    chosen = select_in_layers(None, selection, geometry.layers, geometry.num_heads)
    if not chosen:
        raise SelectionError(f"{heads!r} selects no head", fix="name heads as in L4H7 or L0-3H2")
    return chosen


def _mean_values(
    loaded: LoadedModel,
    heads: Sequence[Head],
    texts: TextSet | Sequence[str] | None,
    max_length: int,
) -> dict[Head, Tensor]:
    given = as_text_set(texts, loaded.id, most=_MEAN_TEXTS)
    encoded = encode_for(loaded, given.texts, max_length=max_length)
    means = measure_means(loaded.model, batches(encoded, 4))
    return {head: head_mean(loaded.model, means, head) for head in heads}


def _putting(
    loaded: LoadedModel, values: dict[Head, Tensor]
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that writes each head's value into its columns of the projection's input."""
    places = {head: next(iter(head_spans(loaded.model, head, "o").values())) for head in values}

    def put(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = inputs[0].clone()
        for head, span in places.items():
            changed[..., span.start : span.stop] = values[head].to(changed)
        return (changed, *inputs[1:])

    return put
