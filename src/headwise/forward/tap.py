"""The tap: see every layer's queries, keys, values and head outputs while the model runs.

`with tapped(model, reader): model(...)` computes attention with `attention.attend` instead of the
model's own code and shows each layer to `reader` as a `Sight`. The logits do not change. A reader
may return another head output, and the layer goes on with that: ablation is a reader. Statistics,
Q/K capture, ablation and the fast training attention all read from here.

Two ways in. Families with transformers' AttentionInterface get a registered function, and a
registered mask function with it: without one, transformers silently drops the causal mask. The
others (bloom, falcon, mpt, gptj) get their attention module's `forward` replaced while tapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from headwise.models.architectures import alibi_slopes, architecture_of, attention_of, geometry_of

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
    modules = [attention_of(model, layer) for layer in range(geometry_of(model).num_layers)]
    slopes = alibi_slopes(model)
    tap = _Tap(
        {id(module): layer for layer, module in enumerate(modules)},
        reader,
        None if slopes is None else slopes.float(),
        _own_implementation(model),
    )
    _open.append(tap)
    try:
        with _implementation(model, NAME), _forwards(model, modules):
            yield
    finally:
        _open.remove(tap)
    if not tap.seen:
        raise HeadwiseError(
            "the tap saw no layer: the model did not run, or its attention bypasses the tap",
            where=f"model_type={model.config.model_type!r}",
            fix="run the model inside the `with`; if it did run, set interface=False in its row "
            "and give it a forward in headwise/tap.py",
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


@contextmanager
def _forwards(model: PreTrainedModel, modules: list[nn.Module]) -> Iterator[None]:
    """Replace `forward` on the instances of families that bypass the interface, then restore."""
    if architecture_of(model).interface:
        yield
        return
    forward = _FORWARDS[str(model.config.model_type)]
    # an outer tap or accelerate may have put its own `forward` on the instance: keep it
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module in modules:
            module.__dict__["forward"] = _bound(forward, module)
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _bound(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def bound(*args: Any, **kwargs: Any) -> Any:
        for name in ("layer_past", "past_key_values"):
            if kwargs.get(name) is not None:
                raise _cache_error(module)
        return forward(module, *args, **kwargs)

    return bound


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
        if getattr(rest.get("config"), "model_type", "") != "mpt":
            return None
        # MPT calls .to(bool) on the mask whatever it is, so "all visible" must be a tensor
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


def _merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)  # (batch, query, head * dim)


def _bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    scores = _scores(
        module, q, k, module.inv_norm_factor, bias=_alibi(k), **_mask_parts(attention_mask)
    )
    out = module.dense(_merged(_open[-1].show(module, scores, v)))
    return residual + out, None


def _mpt(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    heads = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    scores = _scores(
        module, q, k, module.softmax_scale, bias=_alibi(k), **_mask_parts(attention_mask)
    )
    return module.out_proj(_merged(_open[-1].show(module, scores, v))), None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    group = module.num_heads // module.num_kv_heads
    fused = module.query_key_value(hidden_states)
    fused = fused.unflatten(-1, (module.num_kv_heads, group + 2, module.head_dim))
    q = fused[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k, v = fused[..., -2, :].transpose(1, 2), fused[..., -1, :].transpose(1, 2)
    parts = _mask_parts(attention_mask)
    if alibi is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        # Falcon rounds its bias to bfloat16 in every precision, so the model's own tensor is used.
        # Its eager code adds the bias twice (once in the mask, transformers 5.22); sdpa does not.
        times = 2 if _open[-1].own_implementation == "eager" else 1
        bias = alibi.reshape(q.shape[0], module.num_heads, 1, -1).float()
        parts["bias"] = bias * (times * module.inv_norm_factor)
    scores = _scores(module, q, k, 1 / math.sqrt(module.head_dim), **parts)
    return module.dense(_merged(_open[-1].show(module, scores, v))), None


def _gptj(
    module: Any,
    hidden_states: Tensor,
    layer_past: None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    split = (module.num_attention_heads, module.head_dim)
    names = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (projection(hidden_states).unflatten(-1, split) for projection in names)
    q, k = (_gptj_rotate(module, x, position_ids).transpose(1, 2) for x in (q, k))
    scores = _scores(module, q, k, 1 / float(module.scale_attn), **_mask_parts(attention_mask))
    return module.out_proj(_merged(_open[-1].show(module, scores, v.transpose(1, 2)))), None


def _gptj_rotate(module: Any, x: Tensor, position_ids: Tensor | None) -> Tensor:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    table = module.embed_positions.to(x.device)[position_ids].to(x.dtype)
    sin, cos = table.chunk(2, dim=-1)
    width = module.rotary_dim or x.shape[-1]
    return torch.cat([apply_rotary_pos_emb(x[..., :width], sin, cos), x[..., width:]], -1)


_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gptj": _gptj,
    "mpt": _mpt,
}
