"""The model families: what each of them is like, and what differs.

To add a family, add its row here, or its name to those that are just like another (and a tiny
config to `tests/tiny.py`). A row is a claim; `separability.check` proves it on the model at hand by
moving weights and watching the heads.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.models.families.custom_attention import (
    bloom_call,
    built_slopes,
    falcon_call,
    gpt_neo_call,
    gptj_call,
    mpt_call,
    mpt_slopes,
    xglm_call,
)
from headwise.models.families.layout import Architecture

_LLAMA = Architecture()
_CAPPED = Architecture(logits_cap="final_logit_softcapping")
_EXPERTS = Architecture(mlp_in=())  # no one MLP whose neurons could be counted
_UNGATED = Architecture(mlp_in=("mlp.up_proj",))
_FUSED_MLP = Architecture(mlp_in=("mlp.gate_up_proj*2",))
_SCALED = Architecture(logits_times="logit_scale")
_DIVIDED = Architecture(logits_over="logits_scaling")
_FEED_FORWARD = Architecture(
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"), mlp_out="feed_forward.down_proj"
)
_LATENT = Architecture(
    projections=("q_b_proj", "kv_b_proj"), order="latent", query_rank="q_lora_rank", mlp_in=()
)
_GATED_QUERY = Architecture(gate_in_query=True, gated=True)
_GPT2 = Architecture(
    layers="transformer.h",
    attention="attn",
    projections=("c_attn",),
    output="c_proj",
    order="concat",
    positions="learned",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
)
_NEOX = Architecture(
    projections=("query_key_value",),
    output="dense",
    order="grouped",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
)
_OPT = Architecture(output="out_proj", positions="learned", mlp_in=("fc1",), mlp_out="fc2")


def _alike(row: Architecture, families: str) -> dict[str, Architecture]:
    return dict.fromkeys(families.split(), row)


ARCHITECTURES: dict[str, Architecture] = {
    **_alike(
        _LLAMA,
        "cwm ernie4_5 exaone4 gemma helium hunyuan_v1_dense llama ministral ministral3 mistral "
        "qwen2 qwen3 seed_oss smollm3 stablelm",
    ),
    **_alike(
        _EXPERTS,
        "aria_text dots1 ernie4_5_moe exaone_moe flint glm4_moe gpt_oss hunyuan_v1_moe hy_v3 jamba "
        "kolibri1 llama4_text mellum mimo_v2_flash minimax minimax_m3_vl_text mixtral phimoe "
        "qwen2_moe qwen3_moe solar_open",
    ),
    **_alike(_CAPPED, "gemma2 gemma3_text gemma3n_text gemma4_text vaultgemma"),
    **_alike(_UNGATED, "apertus arcee jais2 nemotron"),
    **_alike(_FUSED_MLP, "glm glm4"),
    **_alike(_SCALED, "cohere cohere2"),
    **_alike(_DIVIDED, "granite granite_swa"),
    **_alike(
        replace(_DIVIDED, mlp_in=()),
        "granitemoe granitemoe_swa granitemoehybrid granitemoeshared",
    ),
    **_alike(_LATENT, "deepseek_v2 deepseek_v3 glm4_moe_lite"),
    **_alike(replace(_EXPERTS, gated=True), "afmoe laguna"),
    **_alike(replace(_GATED_QUERY, mlp_in=()), "qwen3_5_moe_text qwen3_next"),
    "bamba": replace(_FEED_FORWARD, layer_returns_tuple=True),
    "beam": replace(_CAPPED, mlp_in=(), gated=True),
    "biogpt": replace(_OPT, layers="biogpt.layers"),
    "bloom": replace(
        _NEOX,
        layers="transformer.h",
        attention="self_attention",
        positions="alibi",
        slopes=built_slopes,
        attention_call=bloom_call,
        layer_returns_tuple=True,
        takes_position_ids=False,
        slow_gelu="BloomGelu",
    ),
    "cohere2_moe": replace(_SCALED, mlp_in=()),
    "dbrx": Architecture(
        layers="transformer.blocks",
        attention="norm_attn_norm.attn",
        projections=("Wqkv",),
        output="out_proj",
        order="concat",
        mlp_in=(),
    ),
    "falcon": replace(
        _NEOX,
        layers="transformer.h",
        attention="self_attention",
        alibi_if="alibi",
        slopes=built_slopes,
        attention_call=falcon_call,
        layer_returns_tuple=True,
    ),
    "falcon_h1": replace(
        _FEED_FORWARD, logits_times="lm_head_multiplier", layer_returns_tuple=True
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, order="grouped"),
    "gpt_neo": replace(
        _GPT2,
        attention="attn.attention",
        projections=_LLAMA.projections,
        output="out_proj",
        order="split",
        attention_call=gpt_neo_call,
        layer_returns_tuple=True,
    ),
    "gpt_neox": replace(_NEOX, layers="gpt_neox.layers", attention="attention"),
    "gptj": Architecture(
        layers="transformer.h",
        attention="attn",
        output="out_proj",
        mlp_in=("mlp.fc_in",),
        mlp_out="mlp.fc_out",
        attention_call=gptj_call,
        layer_returns_tuple=True,
    ),
    "hyperclovax": Architecture(logits_times="logits_scaling"),
    "lfm2": Architecture(
        output="out_proj",
        mlp_in=("feed_forward.w1", "feed_forward.w3"),
        mlp_out="feed_forward.w2",
    ),
    "lfm2_moe": Architecture(output="out_proj", mlp_in=()),
    "minicpm3": replace(_LATENT, mlp_in=_LLAMA.mlp_in, logits_over="logits_scaling"),
    "modernbert-decoder": Architecture(
        attention="attn",
        output="Wo",
        mlp_in=("mlp.Wi*2",),
        mlp_out="mlp.Wo",
        before_logits="lm_head",
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
        slopes=mpt_slopes,
        attention_call=mpt_call,
        layer_returns_tuple=True,
        takes_position_ids=False,
        needs_mask=True,  # it calls .to(bool) on the mask whatever it is
    ),
    "nanochat": replace(_CAPPED, mlp_in=("mlp.fc1",), mlp_out="mlp.fc2"),
    "nemotron_h": replace(_EXPERTS, attention="mixer", positions="none"),
    "olmo": Architecture(clip="clip_qkv"),
    "opt": replace(_OPT, layers="model.decoder.layers"),
    "persimmon": _NEOX,
    "phi": Architecture(output="dense", mlp_in=("mlp.fc1",), mlp_out="mlp.fc2"),
    "phi3": replace(_FUSED_MLP, projections=("qkv_proj",), order="concat"),
    "qwen3_5_text": _GATED_QUERY,
    "recurrent_gemma": Architecture(
        attention="temporal_block",
        mlp_in=("mlp_block.gate_proj", "mlp_block.up_proj"),
        mlp_out="mlp_block.down_proj",
        logits_cap="logits_soft_cap",
    ),
    "starcoder2": Architecture(mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj"),
    "xglm": replace(_OPT, attention_call=xglm_call),
    "youtu": replace(_LATENT, mlp_in=_LLAMA.mlp_in),
}

_ACROSS = (
    "its query/key norm runs across all heads of a layer, so a change in one head's weights moves "
    "every other head"
)
NOT_SEPARABLE: dict[str, str] = {
    **dict.fromkeys(["olmo2", "olmo3", "flex_olmo", "minimax_m2", "olmo_hybrid", "olmoe"], _ACROSS),
    "bitnet": "a norm runs across the heads' outputs before the output projection, so zeroing one "
    "head's weights there is not removing the head",
    "diffllama": "two heads together make one difference of attentions, and share their values",
    "doge": "its attention mask is computed from the values, so a head's values move its attention",
    "jetmoe": "its query and output projections are experts chosen token by token",
}
