"""A tiny model that reads only behind a BOS: a GPT-2 that learnt the bundled samples by heart.

It knows them by position, so that without the BOS, one place further left, it reads nothing.
"""

from __future__ import annotations

import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import tiny_tokenizer
from headwise.bundled import DATA
from headwise.models.first_token import _SAMPLES

POSITIONS = 256


def sample_texts() -> list[str]:
    """The texts by which a first token is measured."""
    return [(DATA / "texts" / f"{name}.txt").read_text("utf-8")[:260] for name in _SAMPLES]


def gpt2(seed=0):
    """A random GPT-2 with 256 positions and the vocabulary of the tiny tokenizer."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tiny_tokenizer()),
        n_positions=POSITIONS,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config).eval()


def reader(steps=150):
    """The same GPT-2 after learning the samples behind a BOS, never without one."""
    model, tokenizer = gpt2(), tiny_tokenizer()
    rows = [[1, *tokenizer(text)["input_ids"]][:90] for text in sample_texts()]
    ids = torch.tensor([row + [0] * (90 - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def saved(model, folder, **told):
    """The model and its tokenizer as a directory; `told` goes into the tokenizer's settings."""
    tokenizer = tiny_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    return folder
