"""The tap: see every layer's queries, keys, values and head outputs while the model runs.

`with tapped(model, reader): model(...)` computes attention with `attention.attend` instead of the
model's own code and shows each layer to `reader` as a `LayerAttention`. The logits do not change.
A reader may return another head output, and the layer goes on with that: ablation is a reader.
Statistics, Q/K capture, ablation and the fast training attention all read from here.

Two ways in. Families with transformers' AttentionInterface get a registered function, and a
registered mask function with it: without one, transformers silently drops the causal mask. The
others have an `attention_call` in their row (`models/families`), and their attention modules get a
forward around it while tapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from headwise.errors import HeadwiseError
from headwise.forward.attention import Moments, Scores, attend, attend_with_moments, moments
from headwise.forward.replaced_forward import Forward, replaced_forward
from headwise.models.architectures import (
    alibi_slopes,
    architecture_of,
    attention_modules,
    projection_of,
)
from headwise.models.families.layout import Architecture, AttentionInputs

NAME = "headwise"


@dataclass(eq=False)
class LayerAttention:
    """One layer's attention in a forward pass. Tensors are live: readers must not change them.

    It is computed when it is asked for: a reader that asks for its moments first has both in one.
    """

    layer: int
    scores: Scores
    v: Float[Tensor, "batch kv_head key value"]
    module: nn.Module = field(repr=False)
    behind_gate: Float[Tensor, "batch head query value"] | None = None  # where the family has one
    attended: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # output, log-sum-exp

    def _attended(self) -> tuple[Tensor, Tensor]:
        if self.attended is None:
            self.attended = attend(self.scores, self.v)
        return self.attended

    @property
    def out(self) -> Float[Tensor, "batch head query value"]:
        """What heads give, as the output projection reads it."""
        return self._attended()[0] if self.behind_gate is None else self.behind_gate

    @property
    def before_gate(self) -> Float[Tensor, "batch head query value"] | None:
        """What entered the gate where the family has one."""
        return None if self.behind_gate is None else self._attended()[0]

    @property
    def lse(self) -> Float[Tensor, "batch head query"]:
        """The log-sum-exp of every query's scores."""
        return self._attended()[1]

    def moments(
        self, sets: Float[Tensor, "#batch key set"] | None = None, back: int = 0
    ) -> Moments:
        """What the attention says as a distribution over keys: `attend_with_moments` says more."""
        differentiable = torch.is_grad_enabled() and self.scores.q.requires_grad
        if self.attended is not None or differentiable:
            return moments(self.scores, self.lse, sets, back)
        out, lse, moment = attend_with_moments(self.scores, self.v, sets, back)
        self.attended = out, lse
        return moment


Reader = Callable[[LayerAttention], Tensor | None]


@dataclass(eq=False)  # two open taps of one model are two
class _Tap:
    """The tap that is open now: attention modules by identity, and who reads."""

    layers: dict[int, int]
    row: Architecture
    reader: Reader | None
    slopes: Tensor | None
    own_implementation: str  # of the model when it is not tapped
    seen: set[int] = field(default_factory=set)
    waiting: dict[int, LayerAttention] = field(default_factory=dict)  # to be read behind the gate

    def show(self, module: nn.Module, scores: Scores, v: Tensor) -> Tensor:
        if id(module) not in self.layers:
            raise HeadwiseError(
                "attention ran in a module that the family's row does not name",
                where=type(module).__name__,
                fix="some of this model's layers share or lack keys and values: their heads are "
                "not separable; choose another model",
            )
        layer = self.layers[id(module)]
        self.seen.add(layer)
        attention = LayerAttention(layer, scores, v, module)
        replaced = None
        if self.row.gated:
            self.waiting[layer] = attention
        elif self.reader is not None:
            replaced = self.reader(attention)
        return attention.out if replaced is None else replaced

    def show_gated(self, layer: int, gated: Float[Tensor, "batch query heads"]) -> Tensor | None:
        """Read a layer when its gate has been applied; the reader's answer goes on from there."""
        attention = self.waiting.pop(layer, None)
        if attention is None or self.reader is None:
            return None
        heads = gated.unflatten(-1, (attention.out.shape[1], -1)).transpose(1, 2)
        attention.behind_gate = heads
        replaced = self.reader(attention)
        return None if replaced is None else replaced.transpose(1, 2).flatten(2)


_open: list[_Tap] = []


@contextmanager
def tapped(model: PreTrainedModel, reader: Reader | None = None) -> Iterator[None]:
    """Run the model's attention through headwise and show every layer to `reader`.

    Calls of the model inside must not use a key/value cache: `model(..., use_cache=False)`.
    """
    modules = attention_modules(model)
    slopes = alibi_slopes(model)
    tap = _Tap(
        {id(module): layer for layer, module in modules.items()},
        architecture_of(model),
        reader,
        None if slopes is None else slopes.float(),
        own_implementation(model),
    )
    _open.append(tap)
    try:
        call, bypassing = tap.row.attention_call, list(modules.values())
        with ExitStack() as stack:
            stack.enter_context(using_implementation(model, NAME))
            if call is not None:  # the family bypasses transformers' interface
                forward = partial(_attending, call)
                stack.enter_context(replaced_forward(bypassing, forward))
            stack.enter_context(_read_behind_gates(model, tap))
            yield
    finally:
        _open.remove(tap)
    if not tap.seen:
        raise HeadwiseError(
            "the tap saw no layer: the model did not run, or its attention bypasses the tap",
            where=f"model_type={model.config.model_type!r}",
            fix="run the model inside the `with`; if it did run, give its row an "
            "attention_call in src/headwise/models/families/known_families.py",
        )


def own_implementation(model: PreTrainedModel) -> str:
    """The attention that the model runs when it is not tapped."""
    name = str(model.config._attn_implementation)
    return _open[-1].own_implementation if name == NAME else name  # a tap inside a tap


@contextmanager
def using_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention function of transformers', for a while."""
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


@contextmanager
def _read_behind_gates(model: PreTrainedModel, tap: _Tap) -> Iterator[None]:
    """What enters the output projection is what a gated head contributes."""

    def read(layer: int, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        replaced = tap.show_gated(layer, inputs[0]) if tap is _open[-1] else None
        return None if replaced is None else (replaced,)

    with ExitStack() as hooks:
        for layer in tap.layers.values() if tap.row.gated else ():
            projection = projection_of(model, layer, "o")
            hooks.enter_context(projection.register_forward_pre_hook(partial(read, layer)))
        yield


def _attending(call: Callable[..., AttentionInputs], module: nn.Module, _: Forward) -> Forward:
    """Another forward for an attention module of a family that bypasses the interface."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name in ("layer_past", "past_key_values"):
            if kwargs.get(name) is not None:
                raise _cache_error(module)
        tap = _open[-1]
        made = call(module, tap.own_implementation, *args, **kwargs)
        bias = _alibi(made.k) if made.alibi else made.bias
        parts = {"bias": bias, "window": made.window, **_mask_parts(made.mask)}
        scores = _scores(module, made.q, made.k, made.scale, **parts)
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


_NOT_CAUSAL = "_headwise_not_causal"  # on a mask, which is refused when attention reads it


def _mask_parts(mask: Tensor | None) -> dict[str, object]:
    """A compact mask from `_compact_mask`, or a dense one for anything unusual."""
    if mask is None:
        return {}
    if vars(mask).get(_NOT_CAUSAL):
        raise HeadwiseError(
            "the model's attention is not causal: queries look at later keys",
            where="its own mask function",
            fix="headwise reads causal language models; load the model as one",
        )
    if mask.dtype == torch.int64:
        return {"visible": mask[:, 0, 0] > 0, "window": int(mask.max())}
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
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in place of its own attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    scores = _scores(module, query, key, scale, **parts, **_mask_parts(attention_mask))
    out = _open[-1].show(module, scores, value)
    return out.transpose(1, 2).contiguous(), None


def _compact_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Tensor | None:
    """None for plain causal attention, (batch, 1, 1, key) for padding and windows, else dense.

    Only transformers' own causal and sliding functions are known to be what they are; any other
    (chunks, packed texts, a model's own) is asked for all its T x T answers. A window is written
    into the mask's numbers: whether it also comes as an argument is each family's own habit.
    """
    window = _window_of(mask_function)
    if window is None and mask_function is not causal_mask_function:
        rest |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        rest |= {"mask_function": mask_function, "attention_mask": attention_mask}
        whole = sdpa_mask(batch_size, kv_length=kv_length, kv_offset=kv_offset, **rest)
        if whole is not None and bool(whole.triu(1).any()):
            # BART's decoder makes a mask for cross-attention that it lacks as a language model
            vars(whole)[_NOT_CAUSAL] = True
        return whole
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    windowed = window if window is not None and window < kv_length else None
    if padding is None or bool(padding.all()):
        if windowed is None and not _open[-1].row.needs_mask:
            return None
        padding = torch.ones(batch_size, kv_length, device=rest.get("device"))
    padding = padding.bool()[:, None, None, :]
    return padding if windowed is None else padding.long() * windowed


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of transformers' own sliding function, told by its code; None for any other."""
    known = sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not known.__code__:
        return None
    parts, known_parts = (_closed_over(one, "mask_functions") for one in (mask_function, known))
    if len(parts) != 2 or [p.__code__ for p in parts] != [p.__code__ for p in known_parts]:
        return None
    return int(_closed_over(parts[0], "sliding_window"))


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    return inspect.getclosurevars(function).nonlocals[name]


AttentionInterface.register(NAME, _interface)
AttentionMaskInterface.register(NAME, _compact_mask)


def _alibi(k: Tensor) -> Float[Tensor, "1 head 1 key"]:
    """m j in float32 whatever the model's type; softmax ignores the missing -m t."""
    slopes = _open[-1].slopes
    assert slopes is not None
    position = torch.arange(k.shape[2], device=k.device, dtype=torch.float32)
    return (slopes.to(k.device)[:, None] * position)[None, :, None, :]
