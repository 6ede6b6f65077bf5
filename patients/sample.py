"""Text that a model knows: samples from itself, as a corpus for one that has none.

python patients/sample.py MODEL --count 640 --out stories.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from headwise import LoadedModel, load_model
from headwise.artefacts import write_text

BATCH, TOKENS, TEMPERATURE, TOP = 64, 230, 0.9, 200
SHORTEST = 200  # characters


def main() -> None:
    """Read the command line and write a .jsonl of texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=640)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.manual_seed(0)
    loaded = load_model(asked.model)
    texts: list[str] = []
    while len(texts) < asked.count:
        texts += [text for text in sampled(loaded) if len(text) > SHORTEST]
    lines = [json.dumps({"text": text}) for text in texts[: asked.count]]
    write_text(asked.out, "\n".join(lines) + "\n")


def sampled(loaded: LoadedModel) -> list[str]:
    """A batch of texts, each up to where the model ends it or begins another."""
    start = loaded.tokenizer.bos_token_id
    ids = torch.full((BATCH, 1), start)
    with torch.inference_mode():
        made = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=TOKENS,
            temperature=TEMPERATURE,
            top_k=TOP,
            pad_token_id=loaded.tokenizer.eos_token_id,
        )
    ends = {start, loaded.tokenizer.eos_token_id}
    return [str(loaded.tokenizer.decode(until(row[1:].tolist(), ends))) for row in made]


def until(ids: list[int], ends: set[int]) -> list[int]:
    """What stands before the first of the ends."""
    return ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids))]


if __name__ == "__main__":
    main()
