"""The model families: one row each, and the few functions of families with ways of their own.

To add a family, add its row here (and a tiny config to `TINY` in `tests/conftest.py`). A row is a
claim; `separability.check_heads` proves it on the model at hand by moving weights and watching the
heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.models.family import Architecture, AttentionCall


def _bloom_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    count = int(model.config.num_attention_heads)
    return build_alibi_tensor(torch.ones(1, 2), count, torch.float32)[:, 0, 1]


def _bloom_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> AttentionCall:
    q, k, v = module._reshape(module.query_key_value(hidden_states))

    def finish(merged: Tensor) -> tuple[Tensor, None]:
        return residual + module.dense(merged), None

    return AttentionCall(q, k, v, module.inv_norm_factor, attention_mask, finish, alibi=True)


def _falcon_kv_heads(config: Any) -> int | None:
    grouped = bool(getattr(config, "new_decoder_architecture", False))
    if not grouped and bool(getattr(config, "multi_query", True)):
        return 1
    count: int | None = getattr(config, "num_kv_heads", None)
    return count


def _falcon_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    count = int(model.config.num_attention_heads)
    return build_alibi_tensor(torch.ones(1, 2), count, torch.float32)[:, 0, 1]


def _falcon_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> AttentionCall:
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

    def finish(merged: Tensor) -> tuple[Tensor, None]:
        return module.dense(merged), None

    scale = 1 / math.sqrt(module.head_dim)
    return AttentionCall(q, k, v, scale, attention_mask, finish, bias=bias)


def _mpt_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    # Keys at -1 and 0 relative to the last query: the first value is minus the slope. The model
    # itself always uses alibi_bias_max = 8, whatever its config says.
    bias: Tensor = build_mpt_alibi_tensor(int(model.config.num_attention_heads), 2)
    return -bias[:, 0, 0].float()


def _mpt_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> AttentionCall:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    heads = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)

    def finish(merged: Tensor) -> tuple[Tensor, None]:
        return module.out_proj(merged), None

    return AttentionCall(q, k, v, module.softmax_scale, attention_mask, finish, alibi=True)


def _gptj_call(
    module: Any,
    implementation: str,
    hidden_states: Tensor,
    layer_past: None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> AttentionCall:
    split = (module.num_attention_heads, module.head_dim)
    names = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (projection(hidden_states).unflatten(-1, split) for projection in names)
    q, k = (_gptj_rotate(module, x, position_ids).transpose(1, 2) for x in (q, k))

    def finish(merged: Tensor) -> tuple[Tensor, None]:
        return module.out_proj(merged), None

    scale = 1 / float(module.scale_attn)
    return AttentionCall(q, k, v.transpose(1, 2), scale, attention_mask, finish)


def _gptj_rotate(module: Any, x: Tensor, position_ids: Tensor | None) -> Tensor:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    table = module.embed_positions.to(x.device)[position_ids].to(x.dtype)
    sin, cos = table.chunk(2, dim=-1)
    width = module.rotary_dim or x.shape[-1]
    return torch.cat([apply_rotary_pos_emb(x[..., :width], sin, cos), x[..., width:]], -1)


_LLAMA = Architecture()


_CAPPED = Architecture(logits_cap="final_logit_softcapping")


ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture(
        layers="transformer.h",
        attention="self_attention",
        projections=("query_key_value",),
        output="dense",
        order="grouped",
        positions="alibi",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        slopes=_bloom_slopes,
        attention_call=_bloom_call,
        layer_returns_tuple=True,
        takes_position_ids=False,
        slow_gelu="BloomGelu",
    ),
    "falcon": Architecture(
        layers="transformer.h",
        attention="self_attention",
        projections=("query_key_value",),
        output="dense",
        order="grouped",
        alibi_if="alibi",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        kv_heads=_falcon_kv_heads,
        slopes=_falcon_slopes,
        attention_call=_falcon_call,
        layer_returns_tuple=True,
    ),
    "mpt": Architecture(
        layers="transformer.blocks",
        attention="attn",
        projections=("Wqkv",),
        output="out_proj",
        order="concat",
        positions="alibi",
        mlp_in=("ffn.up_proj",),
        mlp_out="ffn.down_proj",
        slopes=_mpt_slopes,
        attention_call=_mpt_call,
        layer_returns_tuple=True,
        takes_position_ids=False,
        needs_mask=True,  # it calls .to(bool) on the mask whatever it is
    ),
    "gpt2": Architecture(
        layers="transformer.h",
        attention="attn",
        projections=("c_attn",),
        output="c_proj",
        order="concat",
        positions="learned",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
    ),
    "gptj": Architecture(
        layers="transformer.h",
        attention="attn",
        output="out_proj",
        mlp_in=("mlp.fc_in",),
        mlp_out="mlp.fc_out",
        attention_call=_gptj_call,
        layer_returns_tuple=True,
    ),
    "gpt_neox": Architecture(
        layers="gpt_neox.layers",
        attention="attention",
        projections=("query_key_value",),
        output="dense",
        order="grouped",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
    ),
    "opt": Architecture(
        layers="model.decoder.layers",
        output="out_proj",
        positions="learned",
        mlp_in=("fc1",),
        mlp_out="fc2",
    ),
    "phi3": Architecture(projections=("qkv_proj",), order="concat", mlp_in=("mlp.gate_up_proj*2",)),
    "starcoder2": Architecture(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj"),
    "gemma": _LLAMA,
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "granite": Architecture(logits_over="logits_scaling"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "olmo": Architecture(clip="clip_qkv"),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _LLAMA,
}


NOT_SEPARABLE: dict[str, str] = dict.fromkeys(
    ("olmo2", "olmo3", "flex_olmo", "minimax_m2", "olmo_hybrid"),
    "its query/key norm runs across all heads of a layer, so a change in one head's weights moves "
    "every other head",
)
