"""The tap: see every layer's queries, keys, values and head outputs while the model runs.

`with tapped(model, reader): model(...)` computes attention with `attention.attend` instead of the
model's own code and shows each layer to `reader` as a `Sight`. The logits do not change. A reader
may return another head output, and the layer goes on with that: ablation is a reader. Statistics,
Q/K capture, ablation and the fast training attention all read from here.

Two ways in. Families with transformers' AttentionInterface get a registered function, and a
registered mask function with it: without one, transformers silently drops the causal mask. The
others have an `attention_call` in their row of `models/families.py`, and their attention modules
get a forward around it while tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from headwise.errors import HeadwiseError
from headwise.forward.attention import Scores, attend
from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.models.architectures import alibi_slopes, architecture_of, attention_of, layers_of
from headwise.models.family import Architecture, AttentionCall

NAME = "headwise"


@dataclass(frozen=True)
class Sight:
    """One layer during one forward pass. Tensors are live: readers must not change them."""

    layer: int
    scores: Scores
    v: Float[Tensor, "batch kv_head key value"]
    out: Float[Tensor, "batch head query value"]  # before the output projection
    lse: Float[Tensor, "batch head query"]
    module: nn.Module = field(repr=False)


Reader = Callable[[Sight], Tensor | None]


@dataclass(eq=False)  # two open taps of one model are two
class _Tap:
    """The tap that is open now: attention modules by identity, and who reads."""

    layers: dict[int, int]
    row: Architecture
    reader: Reader | None
    slopes: Tensor | None
    own_implementation: str  # of the model when it is not tapped
    seen: set[int] = field(default_factory=set)

    def show(self, module: nn.Module, scores: Scores, v: Tensor) -> Tensor:
        out, lse = attend(scores, v)
        layer = self.layers[id(module)]
        self.seen.add(layer)
        if self.reader is None:
            return out
        replaced = self.reader(Sight(layer, scores, v, out, lse, module))
        return out if replaced is None else replaced


_open: list[_Tap] = []


@contextmanager
def tapped(model: PreTrainedModel, reader: Reader | None = None) -> Iterator[None]:
    """Run the model's attention through headwise and show every layer to `reader`.

    Calls of the model inside must not use a key/value cache: `model(..., use_cache=False)`.
    """
    modules = [attention_of(model, layer) for layer in range(len(layers_of(model)))]
    slopes = alibi_slopes(model)
    tap = _Tap(
        {id(module): layer for layer, module in enumerate(modules)},
        architecture_of(model),
        reader,
        None if slopes is None else slopes.float(),
        _own_implementation(model),
    )
    _open.append(tap)
    try:
        with _implementation(model, NAME), _forwards(tap.row, modules):
            yield
    finally:
        _open.remove(tap)
    if not tap.seen:
        raise HeadwiseError(
            "the tap saw no layer: the model did not run, or its attention bypasses the tap",
            where=f"model_type={model.config.model_type!r}",
            fix="run the model inside the `with`; if it did run, give its row an "
            "attention_call in src/headwise/models/families.py",
        )


def _own_implementation(model: PreTrainedModel) -> str:
    name = str(model.config._attn_implementation)
    return _open[-1].own_implementation if name == NAME else name  # a tap inside a tap


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    configs: dict[int, Any] = {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _forwards(row: Architecture, modules: list[nn.Module]) -> AbstractContextManager[None]:
    """Another forward for attention modules of families that bypass the interface."""
    call = row.attention_call
    if call is None:
        return nullcontext()
    return replaced_forward(modules, lambda module, previous: _attending(module, call))


def _attending(module: nn.Module, call: Callable[..., AttentionCall]) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        for name in ("layer_past", "past_key_values"):
            if kwargs.get(name) is not None:
                raise _cache_error(module)
        tap = _open[-1]
        made = call(module, tap.own_implementation, *args, **kwargs)
        bias = _alibi(made.k) if made.alibi else made.bias
        scores = _scores(module, made.q, made.k, made.scale, bias=bias, **_mask_parts(made.mask))
        out = tap.show(module, scores, made.v)
        return made.finish(out.transpose(1, 2).flatten(2))  # (batch, query, head * dim)

    return forward


def _cache_error(module: nn.Module) -> HeadwiseError:
    return HeadwiseError(
        "a tapped model cannot use a key/value cache",
        where=type(module).__name__,
        fix="call the model with use_cache=False on whole sequences",
    )


def _scores(module: nn.Module, q: Tensor, k: Tensor, scale: float, **parts: Any) -> Scores:
    if q.shape[2] != k.shape[2]:
        raise _cache_error(module)
    return Scores(q, k, scale, **parts)


def _mask_parts(mask: Tensor | None) -> dict[str, Tensor]:
    """A compact key mask from `_compact_mask`, or a dense one for anything unusual."""
    if mask is None:
        return {}
    if mask.dtype != torch.bool:
        mask = mask > -1.0
    return {"visible": mask[:, 0, 0]} if mask.shape[-2] == 1 != mask.shape[-1] else {"mask": mask}


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in place of its own attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _scores(
        module,
        query,
        key,
        scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        **_mask_parts(attention_mask),
    )
    out = _open[-1].show(module, scores, value)
    return out.transpose(1, 2).contiguous(), None


def _compact_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **rest: Any,
) -> Tensor | None:
    """None for plain causal or windowed attention, (batch, 1, 1, key) for padding, else dense.

    The window itself reaches `_interface` as an argument, so no T x T mask is needed for it.
    """
    plain = mask_function is causal_mask_function or (
        local_size is not None and allow_is_causal_skip
    )
    if not plain:
        return sdpa_mask(
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            **rest,
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None or bool(padding.all()):
        if not _open[-1].row.needs_mask:
            return None
        padding = torch.ones(rest["batch_size"], kv_length, device=rest.get("device"))
    return padding.bool()[:, None, None, :]


AttentionInterface.register(NAME, _interface)


AttentionMaskInterface.register(NAME, _compact_mask)


def _alibi(k: Tensor) -> Float[Tensor, "1 head 1 key"]:
    """m j in float32 whatever the model's type; softmax ignores the missing -m t."""
    slopes = _open[-1].slopes
    assert slopes is not None
    position = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
    return (slopes.to(k.device)[:, None] * position)[None, :, None, :]
