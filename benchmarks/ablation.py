"""Exact zero ablation of every head of the patient beside a full forward pass a head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.brute_force import head_output, text_losses
from benchmarks.harness import Options, compare
from headwise.forward.interventions import ZERO
from headwise.forward.variant_losses import head_costs
from headwise.heads import all_heads
from headwise.models.architectures import geometry_of
from headwise.models.loading import load_model
from headwise.texts.batches import encode_texts
from headwise.texts.text_sets import default_texts


@dataclass(frozen=True)
class AblationRow:
    """Exact ablation beside brute force: seconds of each, their ratio, and how far they differ."""

    heads: int
    texts: int
    tokens: int
    headwise_cpu_s: float
    peer_cpu_s: float
    time_to_peer: float
    largest_difference_nats: float


def run(options: Options) -> list[AblationRow]:
    """The patient on 16 texts of 256 tokens, or on few short ones."""
    if options.quick:
        return bench_ablation(repeats=1, texts=4, length=128)
    return bench_ablation(repeats=options.repeats)


def bench_ablation(*, repeats: int = 3, texts: int = 16, length: int = 256) -> list[AblationRow]:
    """All heads of the patient, one thread."""
    loaded = load_model("patient")
    model = loaded.model
    encoded = encode_texts(
        loaded.tokenizer, default_texts("patient").texts[:texts], max_length=length
    )
    shape = geometry_of(model)
    heads = all_heads(shape.num_layers, shape.num_heads, shape.layers)
    ours, peer = [], []

    def brute_force() -> None:
        base = text_losses(model, encoded)
        costs = []
        for head in heads:
            with head_output(model, head, torch.zeros(())):
                costs.append(text_losses(model, encoded) - base)
        peer.append(np.stack(costs))

    pairs = compare(
        lambda: ours.append(head_costs(model, encoded, heads, [ZERO])[:, 0]),
        brute_force,
        repeats,
    )
    tokens = np.array([len(ids) - 1 for ids in encoded])
    return [
        AblationRow(
            heads=len(heads),
            texts=texts,
            tokens=int(tokens.sum()),
            headwise_cpu_s=round(pairs.ours, 2),
            peer_cpu_s=round(pairs.peer, 2),
            time_to_peer=round(pairs.ratio, 3),
            largest_difference_nats=max(
                float((abs(a - b) / tokens).max()) for a, b in zip(ours, peer, strict=True)
            ),
        )
    ]
