"""Train a small healthy model of another family: a base for patients that `auto` was not made for.

    python patients/small.py gpt2 --out base
    python patients/sicken.py base --texts texts.jsonl --heads L1H0-2,L2H1-3,L3H0 --out asleep

The text and the tokenizer are the bundled patient's; sizes and ways of knowing positions differ:
learned (gpt2), ALiBi (bloom), rotary with grouped keys and a norm on queries and keys (qwen3).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headwise import load_model
from headwise.models.patient import patient_texts
from headwise.texts.batches import encode_for

STEPS, ROWS, LENGTH, SHORTEST, RATE, WARMUP = 900, 16, 192, 160, 2e-3, 50
SIZES: dict[str, dict[str, int | float | bool]] = {
    "bloom": {"hidden_size": 128, "n_layer": 4, "n_head": 4},
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "qwen3": {
        "hidden_size": 160,
        "intermediate_size": 400,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    """Read the command line and write a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=SIZES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    patient = load_model("patient")
    model = new_model(asked.family, len(patient.tokenizer))
    texts = encode_for(patient, patient_texts("train"), max_length=LENGTH)
    train(model, [ids for ids in texts if len(ids) >= SHORTEST], asked.steps)
    model.save_pretrained(asked.out)
    patient.tokenizer.save_pretrained(asked.out)


def new_model(family: str, vocabulary: int) -> PreTrainedModel:
    """A random model of the family's size here, without dropout."""
    torch.manual_seed(1)
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(family, **SIZES[family], **tokens)
    for name in (n for n in vars(config) if "pdrop" in n or n.endswith("dropout")):
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config)


def train(model: PreTrainedModel, texts: list[list[int]], steps: int) -> None:
    """AdamW with a linear rate; every row is the start of one text, padding is not predicted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    chosen = random.Random(0)
    for step in range(steps):
        rows = [ids + [-1] * (LENGTH - len(ids)) for ids in chosen.sample(texts, ROWS)]
        ids = torch.tensor(rows)
        loss = model(input_ids=ids.clamp_min(0), labels=ids.masked_fill(ids < 0, -100)).loss
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARMUP, 1.05 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
