"""A model with the tokens alone that its texts use: the same texts, a third of the work.

    python patients/trim.py stories15M --texts SAMPLES.jsonl --out stories15M-trimmed

Most of a small model's work is its vocabulary (stories15M: 9.2 of 15.2 million weights). Kept are
the tokens in the texts, what they are merged from, and bytes, so that any other text can be read
too. Every text is cut into the same pieces as before, which is checked. Losses are a little lower,
because fewer tokens compete.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headwise import load_model, read_texts


def main() -> None:
    """Read the command line and write the smaller model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    texts = list(read_texts([asked.texts]).texts)
    loaded = load_model(asked.model)
    whole = Tokenizer.from_file(str(Path(asked.model) / "tokenizer.json"))
    plain = json.loads(whole.to_str())
    kept = kept_tokens(plain, {token for text in texts for token in whole.encode(text).tokens})
    rows = torch.tensor([plain["model"]["vocab"][token] for token in kept])
    trimmed = Tokenizer.from_str(json.dumps(with_tokens(plain, kept)))
    for text in texts:
        if trimmed.encode(text).tokens != whole.encode(text).tokens:
            raise SystemExit(f"cut into other pieces: {text[:60]!r}")
    model = smaller(loaded.model, rows)
    model.save_pretrained(asked.out)
    trimmed.save(str(asked.out / "tokenizer.json"))
    name = "tokenizer_config.json"
    (asked.out / name).write_text((Path(asked.model) / name).read_text())
    sys.stdout.write(f"{len(kept)} of {whole.get_vocab_size()} tokens, the same pieces\n")


def kept_tokens(plain: dict, used: set[str]) -> list[str]:
    """Special tokens, bytes, ASCII, the used tokens and what these are merged from, in order."""
    vocabulary = plain["model"]["vocab"]
    parts: dict[str, list[str]] = {}
    for left, right in plain["model"]["merges"]:
        parts.setdefault(left + right, []).extend((left, right))
    special = {row["content"] for row in plain["added_tokens"]}
    kept: set[str] = set()
    waiting = [t for t in vocabulary if t in special or (len(t) == 1 and t.isascii())]
    waiting += [f"<0x{byte:02X}>" for byte in range(256)]
    waiting += used
    while waiting:
        token = waiting.pop()
        if token not in kept:
            kept.add(token)
            waiting += parts.get(token, [])
    return sorted(kept & vocabulary.keys(), key=vocabulary.__getitem__)


def with_tokens(plain: dict, kept: list[str]) -> dict:
    """The tokenizer that knows these tokens alone; the first ones, special, keep their number."""
    order = {token: number for number, token in enumerate(kept)}
    merges = [
        [left, right]
        for left, right in plain["model"]["merges"]
        if {left, right, left + right} <= order.keys()
    ]
    return {**plain, "model": {**plain["model"], "vocab": order, "merges": merges}}


def smaller(model: torch.nn.Module, rows: torch.Tensor) -> torch.nn.Module:
    """A copy with these rows of the embedding, and of the output where it is not tied."""
    config = type(model.config).from_dict({**model.config.to_dict(), "vocab_size": len(rows)})
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = model.config.vocab_size
    weights = {
        name: value[rows] if value.shape[:1] == (size,) else value
        for name, value in model.state_dict().items()
    }
    small.load_state_dict(weights)
    return small


if __name__ == "__main__":
    main()
