"""Tiny configs of every row of the architecture table; several variants of a family are cases."""

from __future__ import annotations

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
SIX = {"num_attention_heads": 6, "hidden_size": 48}  # not a power of two: other ALiBi slopes
FIRST_SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
WIDE = {"head_dim": 16}  # unlike hidden / heads
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **EXPERTS,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "qk_head_dim": 12,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}

# name -> (model_type, extra config)
TINY: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {}),
    "bloom-6h": ("bloom", SIX),
    "mpt": ("mpt", {"max_seq_len": 512}),
    "mpt-6h": ("mpt", {**SIX, "max_seq_len": 512}),
    "mpt-clip": ("mpt", {"max_seq_len": 512, "attn_config": {"clip_qkv": 0.9}}),
    "falcon-alibi": (
        "falcon",
        {"alibi": True, "multi_query": False, "num_kv_heads": 4, "new_decoder_architecture": False},
    ),
    "falcon-mqa": (
        "falcon",
        {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
    ),
    "falcon-gqa": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt2-scaled": (
        "gpt2",
        {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 48}),
    "gptj-full-rotary": ("gptj", {"rotary_dim": 8, "n_inner": 48}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "llama": ("llama", GQA),
    "llama-mha-bias": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {**GQA, "sliding_window": 40}),
    "qwen2": ("qwen2", GQA),
    "qwen2-window": ("qwen2", {**GQA, **FIRST_SLIDES, "use_sliding_window": True}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 1.0,  # low enough for tiny logits to feel it
        },
    ),
    "gemma3": (
        "gemma3_text",
        {**GQA, **FIRST_SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    "smollm3": ("smollm3", {**GQA, "no_rope_layers": [1, 0]}),
    "phi3": ("phi3", {**GQA, "sliding_window": None}),
    "phi3-window": ("phi3", {**GQA, "sliding_window": 40}),
    "stablelm": ("stablelm", {**GQA, "qk_layernorm": True}),
    "olmo": ("olmo", {**GQA, "clip_qkv": 4.0}),
    "granite": (
        "granite",
        {
            **GQA,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
        },
    ),
    "starcoder2": ("starcoder2", {**GQA, "sliding_window": 64}),
}

# the long tail: the same proofs, fewer comparisons
MORE: dict[str, tuple[str, dict]] = {
    "llama4-chunks": (
        "llama4_text",
        {
            **GQA,
            **EXPERTS,
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "head_dim": 8,
        },
    ),
    "qwen2_moe": ("qwen2_moe", {**GQA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", {**GQA, **EXPERTS, **WIDE}),
    "mixtral": ("mixtral", {**GQA, **EXPERTS, "sliding_window": 40}),
    "gpt_oss": ("gpt_oss", {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8}),
    "glm": ("glm", {**GQA, "head_dim": 8, "attention_bias": True}),
    "glm4": ("glm4", {**GQA, "head_dim": 8}),
    "glm4_moe": ("glm4_moe", {**GQA, **EXPERTS, "head_dim": 8, "use_qk_norm": True}),
    "cohere": ("cohere", {**GQA, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**GQA, **FIRST_SLIDES, "logit_scale": 0.3}),
    "cohere2_moe": ("cohere2_moe", {**GQA, **EXPERTS, **FIRST_SLIDES, "logit_scale": 0.3}),
    "ministral": ("ministral", {**GQA, **FIRST_SLIDES, "head_dim": 8}),
    "ministral3": ("ministral3", {**GQA, "head_dim": 8, "sliding_window": None}),
    "gemma3n": (
        "gemma3n_text",
        {
            **GQA,
            **FIRST_SLIDES,
            "head_dim": 8,
            "num_kv_shared_layers": 0,
            "intermediate_size": [48, 48],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "phimoe": ("phimoe", {**GQA, **EXPERTS, "sliding_window": 40, "attention_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**GQA, "head_dim": 8}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**GQA, **EXPERTS, "head_dim": 8, "moe_topk": [2, 2]}),
    "ernie4_5": ("ernie4_5", {**GQA, "head_dim": 8, "use_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**GQA, **EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "exaone4": ("exaone4", {**GQA, **FIRST_SLIDES, "sliding_window_pattern": 2}),
    "exaone_moe": (
        "exaone_moe",
        {**GQA, **EXPERTS, **FIRST_SLIDES, "num_shared_experts": 1, "head_dim": 8},
    ),
    "seed_oss": ("seed_oss", {**GQA, **WIDE, "attention_bias": True, "attention_out_bias": True}),
    "arcee": ("arcee", GQA),
    "apertus": ("apertus", GQA),
    "nemotron": ("nemotron", {**GQA, "partial_rotary_factor": 0.5}),
    "helium": ("helium", {**GQA, "head_dim": 8}),
    "granitemoe": ("granitemoe", {**GQA, **EXPERTS, "logits_scaling": 2.0}),
    "granitemoeshared": (
        "granitemoeshared",
        {**GQA, **EXPERTS, "logits_scaling": 2.0, "shared_intermediate_size": 16},
    ),
    "granite_swa": ("granite_swa", {**GQA, **FIRST_SLIDES, "logits_scaling": 2.0}),
    "granitemoe_swa": (
        "granitemoe_swa",
        {**GQA, **EXPERTS, **FIRST_SLIDES, "logits_scaling": 2.0},
    ),
    "dots1": ("dots1", {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8}),
    "jais2": ("jais2", {**GQA, "head_dim": 8}),
    "nanochat": ("nanochat", GQA),
    "cwm": ("cwm", {**GQA, **FIRST_SLIDES, "head_dim": 8}),
    "vaultgemma": ("vaultgemma", {**GQA, **FIRST_SLIDES, **WIDE, "query_pre_attn_scalar": 16}),
    "hyperclovax": ("hyperclovax", {**GQA, "logits_scaling": 2.0}),
    "solar_open": ("solar_open", {**GQA, **EXPERTS, "head_dim": 8}),
    "afmoe": (
        "afmoe",
        {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8, "num_dense_layers": 1},
    ),
    "laguna": (
        "laguna",
        {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8, "shared_expert_intermediate_size": 16},
    ),
    "minimax_m3": ("minimax_m3_vl_text", {**GQA, **EXPERTS, "head_dim": 8}),
    "hy_v3": ("hy_v3", {**GQA, **EXPERTS, "head_dim": 8}),
    "mellum": ("mellum", {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8}),
    "kolibri1": ("kolibri1", {**GQA, **EXPERTS}),
    "flint": (
        "flint",
        {**GQA, **EXPERTS, **FIRST_SLIDES, "head_dim": 8, "mlp_only_layers": [0]},
    ),
    "beam": ("beam", {**GQA, **EXPERTS}),
    "aria_text": ("aria_text", {**GQA, "moe_num_experts": 4, "moe_topk": 2}),
    "phi": ("phi", {**GQA, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "persimmon": ("persimmon", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "gpt_bigcode": ("gpt_bigcode", {"multi_query": True, "n_inner": 48}),
    "gpt_bigcode-mha": ("gpt_bigcode", {"multi_query": False, "n_inner": 48}),
    "biogpt": ("biogpt", {}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 4.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "modernbert-decoder": (
        "modernbert-decoder",
        {**FIRST_SLIDES, "local_attention": 80, "global_attn_every_n_layers": 2},
    ),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "deepseek_v2-direct": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT),
    "minicpm3": ("minicpm3", {**LATENT, "scale_emb": 2, "dim_model_base": 16}),
    "youtu": ("youtu", LATENT),
    "lfm2": (
        "lfm2",
        {
            **GQA,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "full_attention"],
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **GQA,
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "full_attention"],
            "num_dense_layers": 1,
        },
    ),
    "jamba": (
        "jamba",
        {
            **GQA,
            **EXPERTS,
            **MAMBA,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **GQA,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-*",
            "layers_block_type": ["mamba", "attention", "mlp", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 32,
            "use_mamba_kernels": False,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **GQA,
            **EXPERTS,
            **MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["attention", "mamba", "attention"],
            "shared_intermediate_size": 16,
            "logits_scaling": 2.0,
        },
    ),
    "bamba": (
        "bamba",
        {**GQA, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [0, 2]},
    ),
    "falcon_h1": (
        "falcon_h1",
        {**GQA, **MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "head_dim": 8},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **GQA,
            **EXPERTS,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **GQA,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **GQA,
            **EXPERTS,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "minimax": (
        "minimax",
        {
            **GQA,
            **EXPERTS,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "block_size": 32,
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "block_types": ["attention", "recurrent", "attention"],
            "attention_window_size": 40,
            "lru_width": 32,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **GQA,
            **FIRST_SLIDES,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "mimo": (
        "mimo_v2_flash",
        {
            **GQA,
            **EXPERTS,
            "head_dim": 12,
            "v_head_dim": 8,
            "swa_head_dim": 12,
            "swa_v_head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "sliding_window": 40,
            "hybrid_layer_pattern": [1, 0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 40}),
    "xglm": ("xglm", {"attention_heads": 4, "ffn_dim": 48}),
}

# families whose heads are not separable: refused by name, and by the check if a row is given
REFUSED: dict[str, tuple[str, dict]] = {
    "olmo2": ("olmo2", GQA),
    "olmoe": ("olmoe", {**GQA, **EXPERTS}),
    "bitnet": ("bitnet", GQA),
    "diffllama": ("diffllama", GQA),
    "doge": ("doge", GQA),
    "jetmoe": ("jetmoe", {"kv_channels": 8, "num_key_value_heads": 2, **EXPERTS}),
}

# layers differ in their heads' widths or key groups: no plan counts them once for all
UNEVEN = {"gemma4_text", "mimo_v2_flash"}

# a recurrence amplifies rounding; scaled up twentyfold nothing could be told from noise
SOFT = {"recurrent_gemma": 3.0, "gemma4": 8.0, "minicpm3": 8.0, "youtu": 4.0}
