"""Tiny random models, one or more a row of the architecture table; no network, no files."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

_COMMON = {
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
_GQA = {"num_key_value_heads": 2}
_SIX = {"num_attention_heads": 6, "hidden_size": 48}  # not a power of two: other ALiBi slopes
_FIRST_SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}

# name -> (model_type, extra config); several variants of a family are separate cases
TINY: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", {}),
    "bloom-6h": ("bloom", _SIX),
    "mpt": ("mpt", {"max_seq_len": 512}),
    "mpt-6h": ("mpt", {**_SIX, "max_seq_len": 512}),
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
    "llama": ("llama", _GQA),
    "llama-mha-bias": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {**_GQA, "sliding_window": 40}),
    "qwen2": ("qwen2", _GQA),
    "qwen2-window": ("qwen2", {**_GQA, **_FIRST_SLIDES, "use_sliding_window": True}),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **_GQA,
            "head_dim": 16,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 1.0,  # low enough for tiny logits to feel it
        },
    ),
    "gemma3": (
        "gemma3_text",
        {**_GQA, **_FIRST_SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    "smollm3": ("smollm3", {**_GQA, "no_rope_layers": [1, 0]}),
    "phi3": ("phi3", {**_GQA, "sliding_window": None}),
    "phi3-window": ("phi3", {**_GQA, "sliding_window": 40}),
    "stablelm": ("stablelm", {**_GQA, "qk_layernorm": True}),
    "olmo": ("olmo", {**_GQA, "clip_qkv": 4.0}),
    "granite": (
        "granite",
        {
            **_GQA,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
        },
    ),
    "starcoder2": ("starcoder2", {**_GQA, "sliding_window": 64}),
}

SENTENCES = (
    "The lighthouse keeper counted the ships and wrote their names in a grey book.",
    "def area(width, height):\n    return width * height  # both in metres\n",
    "A small model learns small things, and forgets them in the order it learnt them.",
    "Le chat dort sur la chaise pendant que la pluie tombe sur le jardin du voisin.",
    "Wednesday was cold; Thursday was colder; on Friday the lake froze from shore to shore.",
)


def tiny_model(name: str, *, seed: int = 0, sharpen: float = 20.0, implementation: str = "eager"):
    """A 2-layer random model whose attention is sharp enough to tell heads apart."""
    family, extra = TINY[name]
    config = AutoConfig.for_model(family, **{**_COMMON, **extra})
    return sharp_model(config, seed=seed, sharpen=sharpen, implementation=implementation)


def sharp_model(config, *, seed=0, sharpen=20.0, implementation="eager"):
    """A random model of any config, its matrices scaled up and its vectors made uneven."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not any(part in name for part in ("embed", "wte", "wpe")):
                parameter.mul_(sharpen)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
                parameter.add_(1.0)  # a norm of q and k undoes the scaling of their weights
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences; like BLOOM's it adds no BOS itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def tiny_language_model(name: str = "llama", **extra):
    """A tiny model of one row with the vocabulary of `tiny_tokenizer`."""
    family, row = TINY[name]
    vocabulary = {"vocab_size": len(tiny_tokenizer())}
    return sharp_model(AutoConfig.for_model(family, **{**_COMMON, **row, **vocabulary, **extra}))


@pytest.fixture(scope="session", params=sorted(TINY))
def model(request):
    """Every tiny model in turn, loaded once."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny tokenizer."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    """A saved tiny llama (2 layers, 4 heads on 2 key/value heads) with its tokenizer.

    Shared by all tests of a process: copy it before changing a file.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_language_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
