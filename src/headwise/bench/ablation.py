"""`headwise bench ablation`: exact ablation of every head beside full forward passes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any


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


def bench_ablation(*, repeats: int = 3, texts: int = 16, length: int = 256) -> list[AblationRow]:
    """Exact zero ablation of every head of the patient beside brute force, one thread."""
    from headwise.heads import all_heads
    from headwise.models.architectures import geometry_of
    from headwise.models.loading import load_model
    from headwise.proof.ablation import ablate_heads
    from headwise.texts.batches import encode_texts
    from headwise.texts.text_sets import default_texts

    loaded = load_model("patient")
    encoded = encode_texts(
        loaded.tokenizer, default_texts("patient").texts[:texts], max_length=length
    )
    shape = geometry_of(loaded.model)
    chosen = [[head] for head in all_heads(shape.num_layers, shape.num_heads, shape.layers)]
    pairs, error = [], 0.0
    with _threads(1):
        for _ in range(repeats):
            started = time.process_time()
            ours = ablate_heads(loaded.model, encoded, chosen)
            between = time.process_time()
            peer = _brute_force(loaded.model, encoded, chosen)
            pairs.append((between - started, time.process_time() - between))
            error = max(error, float((abs(ours.deltas - peer) / ours.tokens).max()))
    return [
        AblationRow(
            heads=len(chosen),
            texts=texts,
            tokens=int(ours.tokens.sum()),
            headwise_cpu_s=round(median(fast for fast, _ in pairs), 2),
            peer_cpu_s=round(median(slow for _, slow in pairs), 2),
            time_to_peer=round(median(fast / slow for fast, slow in pairs), 3),
            largest_difference_nats=error,
        )
    ]


def _brute_force(model: Any, encoded: list[list[int]], chosen: list[Any]) -> Any:
    """One full forward pass of transformers' own model per head and batch of texts."""
    import numpy as np
    import torch

    from headwise.models.architectures import geometry_of, projection_of
    from headwise.texts.batches import batches

    dim = geometry_of(model).head_dim

    def losses() -> Any:
        found = np.zeros(len(encoded))
        with torch.inference_mode():
            for batch in batches(encoded, 4):
                logits = model(batch.ids, use_cache=False).logits[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(
                    logits, batch.ids[:, 1:].flatten(), reduction="none"
                ).view(len(batch.ids), -1)
                real = torch.arange(1, batch.ids.shape[1]) < batch.lengths[:, None]
                found[list(batch.index)] = (loss.double() * real).sum(1)
        return found

    def silenced(head: Any) -> Any:
        def zero(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            out = inputs[0].clone()
            out[..., head.index * dim : (head.index + 1) * dim] = 0
            return (out, *inputs[1:])

        handle = projection_of(model, head.layer, "o").register_forward_pre_hook(zero)
        try:
            return losses()
        finally:
            handle.remove()

    base = losses()
    return np.stack([silenced(heads[0]) - base for heads in chosen])


@contextmanager
def _threads(count: int) -> Any:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
