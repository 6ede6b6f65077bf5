"""`headwise bench ablation`: exact ablation of every head beside full forward passes."""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median
from typing import Any

Rows = list[dict[str, Any]]


def bench_ablation(
    *, repeats: int = 3, layers: int = 6, heads: int = 8, hidden: int = 192, texts: int = 16,
    length: int = 256,
) -> Rows:  # fmt: skip
    """Exact zero ablation of every head of a patient-like model beside brute force."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headwise.ablation import ablate_heads
    from headwise.heads import all_heads

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bloom", vocab_size=2048, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    encoded = torch.randint(2048, (texts, length)).tolist()
    chosen = [[head] for head in all_heads(layers, heads)]
    pairs, error = [], 0.0
    with _threads(1):
        for _ in range(repeats):
            started = time.process_time()
            ours = ablate_heads(model, encoded, chosen).deltas
            between = time.process_time()
            peer = _brute_force(model, encoded, chosen)
            pairs.append((between - started, time.process_time() - between))
            error = max(error, float(abs(ours - peer).max() / length))
    return [{
        "heads": len(chosen),
        "texts": texts,
        "length": length,
        "headwise_cpu_s": round(median(fast for fast, _ in pairs), 2),
        "peer_cpu_s": round(median(slow for _, slow in pairs), 2),
        "time_to_peer": round(median(fast / slow for fast, slow in pairs), 3),
        "largest_difference_nats": error,
    }]  # fmt: skip


def _brute_force(model: Any, encoded: list[list[int]], chosen: list[Any]) -> Any:
    """One full forward pass of transformers' own model a head and batch of texts."""
    import numpy as np
    import torch

    from headwise.architectures import geometry_of, projection_of

    ids = torch.tensor(encoded)
    dim = geometry_of(model).head_dim

    def losses() -> Any:
        found = []
        with torch.inference_mode():
            for part in ids.split(4):
                logits = model(part, use_cache=False).logits[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(
                    logits, part[:, 1:].flatten(), reduction="none"
                )
                found.append(loss.view(len(part), -1).double().sum(1))
        return torch.cat(found).numpy()

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
