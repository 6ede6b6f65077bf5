"""Does "training without surgery recovers nothing" rest on bfloat16? The patient, both ways.

    python patients/masters.py --out masters.jsonl --rates 3e-3,5e-5 --seeds 0,1,2

The slices of all sick heads are trained as they are, from the same bfloat16 values and on the same
blocks: once in float32, once as the paper did, with weights, gradients and AdamW's moments in
bfloat16 and no master. The passes are in float32 both times (bfloat16 products are some 400 times
slower on a CPU without them), so this isolates what the optimizer loses. The rate is constant.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headwise import LoadedModel, diagnose, load_model, make_plan
from headwise.models.patient import patient_texts
from headwise.surgery.operation import unchanged
from headwise.surgery.slice_training import (
    Master,
    make_masters,
    training_slices,
    write_masters,
)
from headwise.texts.batches import encode_for

HELD, MAPPED, BLOCK, BATCH = 48, 12, 256, 4


def main() -> None:
    """Read the command line and append the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default="3e-3,5e-5")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    rows = asked.out.read_text().splitlines() if asked.out.exists() else []
    done = {tuple(json.loads(row)[name] for name in ("rate", "seed", "kind")) for row in rows}
    loaded = load_model("patient")
    found = diagnose(loaded, patient_texts("train")[:MAPPED], max_length=BLOCK)
    start = unchanged(loaded.model, make_plan(found, heads="sick"))
    for rate in map(float, asked.rates.split(",")):
        for seed in map(int, asked.seeds.split(",")):
            for kind in ("float32", "bfloat16"):
                if (rate, seed, kind) in done:
                    continue
                masters = rounded(make_masters(start.slices, loaded.model), kind)
                write_masters(loaded.model, masters)
                row = {"rate": rate, "seed": seed, "kind": kind, "steps": asked.steps}
                row |= trained(loaded, masters, rate, seed, asked.steps)
                start.undo(loaded.model, force=True)
                with asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def rounded(masters: Sequence[Master], kind: str) -> list[Master]:
    """Masters with the values that bfloat16 can hold, as bfloat16 itself or as float32."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    values = [nn.Parameter(master.value.detach().bfloat16().to(dtype)) for master in masters]
    return [replace(master, value=value) for master, value in zip(masters, values, strict=True)]


def trained(
    loaded: LoadedModel, masters: list[Master], rate: float, seed: int, steps: int
) -> dict[str, object]:
    """Held-out losses before and after, how many heads are sick, and how many weights moved."""
    ids = blocks_of(loaded)
    values = [master.value for master in masters]
    first = [value.detach().clone() for value in values]
    before = held_losses(loaded)
    optimizer = torch.optim.AdamW(values, lr=rate, weight_decay=0.0)
    draw = np.random.default_rng(seed)
    with training_slices(loaded.model, masters):
        for _ in range(steps):
            block = ids[draw.choice(len(ids), BATCH, replace=False)]
            loaded.model(block, labels=block).loss.backward()
            nn.utils.clip_grad_norm_(values, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            write_masters(loaded.model, masters)
    after = held_losses(loaded)
    found = diagnose(loaded, patient_texts("heldout")[:MAPPED], max_length=BLOCK)
    mass = np.array(found.maps["first_token_mass"])
    moved = sum(int((old != new).sum()) for old, new in zip(first, values, strict=True))
    return {
        "moved": moved / sum(value.numel() for value in values),
        "sick": int((mass > 0.5).sum()),
        "tokens": [count for _, count in after],
        "before": [loss for loss, _ in before],
        "after": [loss for loss, _ in after],
    }


def blocks_of(loaded: LoadedModel) -> Tensor:
    """The training text in a row, cut into blocks."""
    encoded = encode_for(loaded, patient_texts("train"), max_length=BLOCK)
    joined = torch.tensor([token for text in encoded for token in text])
    return joined[: len(joined) // BLOCK * BLOCK].view(-1, BLOCK)


@torch.inference_mode()
def held_losses(loaded: LoadedModel) -> list[tuple[float, int]]:
    """Summed loss and predicted tokens of each held-out document."""
    encoded = encode_for(loaded, patient_texts("heldout")[:HELD], max_length=BLOCK)
    found: list[tuple[float, int]] = []
    for text in encoded:
        ids = torch.tensor([text])
        loss = loaded.model(ids, labels=ids, use_cache=False).loss
        found.append((float(loss) * (len(text) - 1), len(text) - 1))
    return found


if __name__ == "__main__":
    main()
