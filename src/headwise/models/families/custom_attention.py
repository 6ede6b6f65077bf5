"""Families whose attention is their own code: ALiBi slopes, and calls that bypass the interface.

A `*_call` turns the arguments of a family's attention module into queries, keys and values; the tap
attends with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.models.families.layout import AttentionInputs


def _split(module: Any, heads: int, hidden: Tensor) -> list[Tensor]:
    """Queries, keys and values as (batch, position, head, dim)."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    return [p(hidden).unflatten(-1, (heads, module.head_dim)) for p in projections]


def _through(output: Any) -> Callable[[Tensor], tuple[Tensor, None]]:
    """What a module returns that only projects its merged heads."""
    return lambda merged: (output(merged), None)


def built_slopes(model: PreTrainedModel) -> Tensor:
    """BLOOM's and Falcon's slopes as executed, from the function that both have under one name.

    Falcon's are rounded to bfloat16.
    """
    family = model.config.model_type
    build = import_module(f"transformers.models.{family}.modeling_{family}").build_alibi_tensor
    slopes: Tensor = build(torch.ones(1, 2), int(model.config.num_attention_heads), torch.float32)
    return slopes[:, 0, 1]


def bloom_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> AttentionInputs:
    """BLOOM: fused projections, ALiBi, the residual added inside."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))

    def finish(merged: Tensor) -> tuple[Tensor, None]:
        return residual + module.dense(merged), None

    return AttentionInputs(q, k, v, module.inv_norm_factor, attention_mask, finish, alibi=True)


def falcon_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> AttentionInputs:
    """Falcon: RoPE, or an ALiBi bias of its own making."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    group = module.num_heads // module.num_kv_heads
    fused = module.query_key_value(hidden_states)
    fused = fused.unflatten(-1, (module.num_kv_heads, group + 2, module.head_dim))
    q = fused[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k, v = fused[..., -2, :].transpose(1, 2), fused[..., -1, :].transpose(1, 2)
    bias = None
    if alibi is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        # Falcon rounds its bias to bfloat16 in every precision, so the model's own tensor is used.
        # Its eager code adds the bias twice (once in the mask, transformers 5.22); sdpa does not.
        times = 2 if implementation == "eager" else 1
        bias = alibi.reshape(q.shape[0], module.num_heads, 1, -1).float()
        bias = bias * (times * module.inv_norm_factor)

    scale = 1 / math.sqrt(module.head_dim)
    return AttentionInputs(q, k, v, scale, attention_mask, _through(module.dense), bias=bias)


def mpt_slopes(model: PreTrainedModel) -> Tensor:
    """MPT's slopes, in its own order."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    # Keys at -1 and 0 relative to the last query: the first value is minus the slope. The model
    # itself always uses alibi_bias_max = 8, whatever its config says.
    bias: Tensor = build_mpt_alibi_tensor(int(model.config.num_attention_heads), 2)
    return -bias[:, 0, 0].float()


def mpt_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> AttentionInputs:
    """MPT: fused projections, perhaps clipped, and ALiBi."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    heads = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)

    return AttentionInputs(
        q, k, v, module.softmax_scale, attention_mask, _through(module.out_proj), alibi=True
    )


def gptj_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    layer_past: None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> AttentionInputs:
    """GPT-J: rotary tables inside the attention module."""
    q, k, v = _split(module, module.num_attention_heads, hidden_states)
    q, k = (_gptj_rotate(module, x, position_ids).transpose(1, 2) for x in (q, k))

    scale = 1 / float(module.scale_attn)
    return AttentionInputs(
        q, k, v.transpose(1, 2), scale, attention_mask, _through(module.out_proj)
    )


def _gptj_rotate(module: Any, x: Tensor, position_ids: Tensor | None) -> Tensor:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    table = module.embed_positions.to(x.device)[position_ids].to(x.dtype)
    sin, cos = table.chunk(2, dim=-1)
    width = module.rotary_dim or x.shape[-1]
    return torch.cat([apply_rotary_pos_emb(x[..., :width], sin, cos), x[..., width:]], -1)


def gpt_neo_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> AttentionInputs:
    """GPT-Neo: unscaled scores, and a window in every other layer."""
    q, k, v = (x.transpose(1, 2) for x in _split(module, module.num_heads, hidden_states))
    window = int(module.config.window_size) if module.attention_type == "local" else None

    return AttentionInputs(q, k, v, 1.0, attention_mask, _through(module.out_proj), window=window)


def xglm_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    key_value_states: None = None,
    past_key_values: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> AttentionInputs:
    """XGLM: plain attention without the interface."""
    q, k, v = (x.transpose(1, 2) for x in _split(module, module.num_heads, hidden_states))

    return AttentionInputs(q, k, v, module.scaling, attention_mask, _through(module.out_proj))
