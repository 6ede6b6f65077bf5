"""The model families: one row each.

To add a family, add its row here (and a tiny config to `tests/tiny.py`). A row is a claim;
`separability.check` proves it on the model at hand by moving weights and watching the heads.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.models.families.architecture import Architecture
from headwise.models.families.custom_attention import (
    bloom_call,
    bloom_slopes,
    falcon_call,
    falcon_slopes,
    gpt_neo_call,
    gptj_call,
    mpt_call,
    mpt_slopes,
    xglm_call,
)

_LLAMA = Architecture()
_CAPPED = Architecture(logits_cap="final_logit_softcapping")
_EXPERTS = Architecture(mlp_in=())  # no one MLP whose neurons could be counted
_UNGATED = Architecture(mlp_in=("mlp.up_proj",))
_SCALED = Architecture(logits_times="logit_scale")
_DIVIDED = Architecture(logits_over="logits_scaling")

_FEED_FORWARD = Architecture(
    mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"), mlp_out="feed_forward.down_proj"
)

_LATENT = Architecture(
    projections=("q_b_proj", "kv_b_proj"), order="latent", query_rank="q_lora_rank", mlp_in=()
)

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
        slopes=bloom_slopes,
        attention_call=bloom_call,
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
        slopes=falcon_slopes,
        attention_call=falcon_call,
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
        slopes=mpt_slopes,
        attention_call=mpt_call,
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
        attention_call=gptj_call,
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
    "afmoe": replace(_EXPERTS, gated=True),
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "aria_text": _EXPERTS,
    "bamba": replace(_FEED_FORWARD, layer_returns_tuple=True),
    "beam": replace(_CAPPED, mlp_in=(), gated=True),
    "biogpt": Architecture(
        layers="biogpt.layers",
        output="out_proj",
        positions="learned",
        mlp_in=("fc1",),
        mlp_out="fc2",
    ),
    "cohere": _SCALED,
    "cohere2": _SCALED,
    "cohere2_moe": replace(_SCALED, mlp_in=()),
    "cwm": _LLAMA,
    "dbrx": Architecture(
        layers="transformer.blocks",
        attention="norm_attn_norm.attn",
        projections=("Wqkv",),
        output="out_proj",
        order="concat",
        mlp_in=(),
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": _EXPERTS,
    "ernie4_5": _LLAMA,
    "ernie4_5_moe": _EXPERTS,
    "exaone4": _LLAMA,
    "exaone_moe": _EXPERTS,
    "falcon_h1": replace(
        _FEED_FORWARD, logits_times="lm_head_multiplier", layer_returns_tuple=True
    ),
    "flint": _EXPERTS,
    "gemma3n_text": _CAPPED,
    "gemma4_text": _CAPPED,
    "glm": Architecture(mlp_in=("mlp.gate_up_proj*2",)),
    "glm4": Architecture(mlp_in=("mlp.gate_up_proj*2",)),
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _LATENT,
    "gpt_bigcode": Architecture(
        layers="transformer.h",
        attention="attn",
        projections=("c_attn",),
        output="c_proj",
        order="grouped",
        positions="learned",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
    ),
    "gpt_neo": Architecture(
        layers="transformer.h",
        attention="attn.attention",
        output="out_proj",
        positions="learned",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
        attention_call=gpt_neo_call,
        layer_returns_tuple=True,
    ),
    "gpt_oss": _EXPERTS,
    "granite_swa": _DIVIDED,
    "granitemoe": replace(_DIVIDED, mlp_in=()),
    "granitemoe_swa": replace(_DIVIDED, mlp_in=()),
    "granitemoehybrid": replace(_DIVIDED, mlp_in=()),
    "granitemoeshared": replace(_DIVIDED, mlp_in=()),
    "helium": _LLAMA,
    "hunyuan_v1_dense": _LLAMA,
    "hunyuan_v1_moe": _EXPERTS,
    "hy_v3": _EXPERTS,
    "hyperclovax": replace(_LLAMA, logits_times="logits_scaling"),
    "jais2": _UNGATED,
    "jamba": _EXPERTS,
    "kolibri1": _EXPERTS,
    "laguna": replace(_EXPERTS, gated=True),
    "lfm2": Architecture(
        output="out_proj",
        mlp_in=("feed_forward.w1", "feed_forward.w3"),
        mlp_out="feed_forward.w2",
    ),
    "lfm2_moe": Architecture(output="out_proj", mlp_in=()),
    "llama4_text": _EXPERTS,
    "mellum": _EXPERTS,
    "mimo_v2_flash": _EXPERTS,
    "minicpm3": replace(_LATENT, mlp_in=_LLAMA.mlp_in, logits_over="logits_scaling"),
    "minimax": _EXPERTS,
    "minimax_m3_vl_text": _EXPERTS,
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mixtral": _EXPERTS,
    "modernbert-decoder": Architecture(
        attention="attn",
        output="Wo",
        mlp_in=("mlp.Wi*2",),
        mlp_out="mlp.Wo",
        before_logits="lm_head",
    ),
    "nanochat": replace(_CAPPED, mlp_in=("mlp.fc1",), mlp_out="mlp.fc2"),
    "nemotron": _UNGATED,
    "nemotron_h": replace(_EXPERTS, attention="mixer", positions="none"),
    "persimmon": Architecture(
        projections=("query_key_value",),
        output="dense",
        order="grouped",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
    ),
    "phi": Architecture(output="dense", mlp_in=("mlp.fc1",), mlp_out="mlp.fc2"),
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_5_moe_text": replace(_EXPERTS, gate_in_query=True, gated=True),
    "qwen3_5_text": replace(_LLAMA, gate_in_query=True, gated=True),
    "qwen3_moe": _EXPERTS,
    "qwen3_next": replace(_EXPERTS, gate_in_query=True, gated=True),
    "recurrent_gemma": Architecture(
        attention="temporal_block",
        mlp_in=("mlp_block.gate_proj", "mlp_block.up_proj"),
        mlp_out="mlp_block.down_proj",
        logits_cap="logits_soft_cap",
    ),
    "seed_oss": _LLAMA,
    "solar_open": _EXPERTS,
    "vaultgemma": _CAPPED,
    "xglm": Architecture(
        output="out_proj",
        positions="learned",
        mlp_in=("fc1",),
        mlp_out="fc2",
        attention_call=xglm_call,
    ),
    "youtu": replace(_LATENT, mlp_in=_LLAMA.mlp_in),
}

_ACROSS = (
    "its query/key norm runs across all heads of a layer, so a change in one head's weights moves "
    "every other head"
)

NOT_SEPARABLE: dict[str, str] = {
    **dict.fromkeys(
        ("olmo2", "olmo3", "flex_olmo", "minimax_m2", "olmo_hybrid", "olmoe"),
        _ACROSS,
    ),
    "bitnet": "a norm runs across the heads' outputs before the output projection, so zeroing one "
    "head's weights there is not removing the head",
    "diffllama": "two heads together make one difference of attentions, and share their values",
    "doge": "its attention mask is computed from the values, so a head's values move its attention",
    "jetmoe": "its query and output projections are experts chosen token by token",
}
