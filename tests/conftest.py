"""Tiny random models, one a row of the architecture table; no network, no files."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)

_COMMON = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GQA = {"num_key_value_heads": 2}

# name -> (model_type, extra config); several variants of a family are separate cases
TINY: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {}),
    "bloom-6h": ("bloom", {"num_attention_heads": 6, "hidden_size": 48}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "mpt-6h": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 512}),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False,
                                "new_decoder_architecture": False, "num_kv_heads": 4}),
    "falcon-mqa": ("falcon", {"multi_query": True, "new_decoder_architecture": False,
                              "parallel_attn": True}),
    "falcon-gqa": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 48}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "llama": ("llama", _GQA),
    "mistral": ("mistral", {**_GQA, "sliding_window": 40}),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("gemma2", {**_GQA, "head_dim": 16, "sliding_window": 40,
                          "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**_GQA, "head_dim": 16, "sliding_window": 40,
                               "layer_types": ["sliding_attention", "full_attention"]}),
    "smollm3": ("smollm3", {**_GQA, "no_rope_layers": [1, 0]}),
    "phi3": ("phi3", {**_GQA, "sliding_window": None}),
    "stablelm": ("stablelm", {**_GQA, "qk_layernorm": True}),
    "olmo": ("olmo", {**_GQA, "clip_qkv": 4.0}),
    "granite": ("granite", {**_GQA, "attention_multiplier": 0.3, "logits_scaling": 2.0,
                            "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "starcoder2": ("starcoder2", {**_GQA, "sliding_window": 64}),
}  # fmt: skip


def tiny_model(name: str, *, seed: int = 0, sharpen: float = 6.0, implementation: str = "eager"):
    """A 2-layer random model whose attention is sharp enough to tell heads apart."""
    family, extra = TINY[name]
    config = AutoConfig.for_model(family, **{**_COMMON, **extra})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if (
                parameter.dim() == 2
                and "embed" not in parameter_name
                and "wte" not in parameter_name
            ):
                parameter.mul_(sharpen)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="session", params=sorted(TINY))
def model(request):
    """Every tiny model in turn, loaded once."""
    return tiny_model(request.param)
