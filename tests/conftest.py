"""Tiny random models, one or more a row of the architecture table; no network, no files."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tiny import COMMON as _COMMON, MORE, SOFT, TINY

torch.set_num_threads(1)

UNSCALED = ("embed", "wte", "wpe")

SENTENCES = (
    "The lighthouse keeper counted the ships and wrote their names in a grey book.",
    "def area(width, height):\n    return width * height  # both in metres\n",
    "A small model learns small things, and forgets them in the order it learnt them.",
    "Le chat dort sur la chaise pendant que la pluie tombe sur le jardin du voisin.",
    "Wednesday was cold; Thursday was colder; on Friday the lake froze from shore to shore.",
)


def tiny_model(name: str, *, seed: int = 0, sharpen: float = 20.0, implementation: str = "eager"):
    """A 2-layer random model whose attention is sharp enough to tell heads apart."""
    family, extra = (TINY | MORE)[name]
    config = AutoConfig.for_model(family, **{**_COMMON, **extra})
    sharpen = SOFT.get(name, sharpen)
    return sharp_model(config, seed=seed, sharpen=sharpen, implementation=implementation)


def sharp_model(config, *, seed=0, sharpen=20.0, implementation="eager"):
    """A random model of any config, its matrices scaled up and its vectors made uneven."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not any(part in name for part in UNSCALED):
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
    family, row = (TINY | MORE)[name]
    vocabulary = {"vocab_size": len(tiny_tokenizer())}
    config = AutoConfig.for_model(family, **{**_COMMON, **row, **vocabulary, **extra})
    return sharp_model(config, sharpen=SOFT.get(name, 20.0))


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
