"""The costs that triage rests on, beside a full forward pass a head and intervention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.brute_force import head_output, text_losses
from benchmarks.harness import Options, compare
from headwise.diagnosis.diagnose import diagnose
from headwise.forward.interventions import (
    UNSINK,
    ZERO,
    Intervention,
    mean_output,
    patched_queries,
    without_key,
)
from headwise.forward.mean_outputs import measure_means
from headwise.forward.tap import LayerAttention, tapped
from headwise.forward.variant_losses import head_costs
from headwise.heads import Head, all_heads
from headwise.models.architectures import geometry_of
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patch import Patch
from headwise.models.slices import write_slices
from headwise.surgery.sink_directions import measure_directions
from headwise.texts.batches import batches, encode_texts
from headwise.texts.text_sets import TextSet
from headwise.triaging.texts import triage_texts
from headwise.triaging.triage import query_plan, treated_queries

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Rows = list[dict[str, Any]]

TEXTS = 8


def run(options: Options) -> Rows:
    """Texts of 256 tokens, or short ones."""
    if options.quick:
        return bench_triage(model=options.model, repeats=1, length=32)
    return bench_triage(model=options.model, repeats=options.repeats)


def bench_triage(
    *, model: str | None = None, repeats: int = 3, sample: int = 10, length: int = 256
) -> Rows:
    """Exact costs beside brute force, one thread: all heads of the patient on 8 texts.

    Of another model a sample of heads, evenly over its layers, on 2 texts: brute force takes hours.
    The time for all heads and 8 texts is then that of the sample, by its share.
    """
    texts = 2 if model else TEXTS
    loaded = load_model(model or "patient")
    chosen = triage_texts(model or "patient").texts[:texts]
    encoded = encode_texts(loaded.tokenizer, chosen, max_length=length)
    shape = geometry_of(loaded.model)
    every = all_heads(shape.num_layers, shape.num_heads, shape.layers)
    count = min(sample, len(every)) if model else len(every)
    heads = [every[int(at)] for at in np.linspace(0, len(every) - 1, count)]
    means, treated = _measured(loaded, chosen, encoded, heads)
    kinds: list[Intervention] = [ZERO, mean_output(loaded.model, means), UNSINK]
    kinds += [patched_queries(loaded.model, name, patch) for name, patch in treated.items()]
    ours: list[np.ndarray] = []
    peer: list[np.ndarray] = []

    def contexts() -> list[list[AbstractContextManager[None]]]:
        return [
            [_intervened(loaded.model, head, kind.name, means, treated) for kind in kinds]
            for head in heads
        ]

    pairs = compare(
        lambda: ours.append(head_costs(loaded.model, encoded, heads, kinds)),
        lambda: peer.append(_brute_force(loaded.model, encoded, contexts())),
        repeats,
    )
    tokens = np.array([len(ids) - 1 for ids in encoded])
    return [
        {
            "model": loaded.id,
            "heads": len(heads),
            "interventions": len(kinds),
            "texts": len(encoded),
            "tokens": int(tokens.sum()),
            "headwise_cpu_s": round(pairs.ours, 2),
            "peer_cpu_s": round(pairs.peer, 2),
            "time_to_peer": round(pairs.ratio, 3),
            "all_heads": len(every),
            "all_heads_8_texts_cpu_s": round(pairs.ours * len(every) / count * TEXTS / texts, 1),
            "largest_difference_nats": max(
                float((np.abs(a - b) / tokens).max()) for a, b in zip(ours, peer, strict=True)
            ),
        }
    ]


def _measured(
    loaded: LoadedModel, texts: tuple[str, ...], encoded: list[list[int]], heads: list[Head]
) -> tuple[Tensor, dict[str, Patch]]:
    """The heads' mean outputs, and patches with their treated queries."""
    model = loaded.model
    diagnosis = diagnose(loaded, TextSet("bench", texts[:2]))
    blocks = list(batches(encoded, 4))
    directions = measure_directions(model, blocks, sorted({head.layer for head in heads}))
    plan = query_plan(diagnosis, heads)
    return measure_means(model, blocks), treated_queries(model, plan, 1.0, directions)


def _brute_force(
    model: PreTrainedModel,
    encoded: list[list[int]],
    contexts: list[list[AbstractContextManager[None]]],  # by head and intervention
) -> np.ndarray:
    """One full forward pass of the whole model a head, intervention and batch of texts."""
    base = text_losses(model, encoded)
    costs = np.zeros((len(contexts), len(contexts[0]), len(encoded)))
    for row, of_head in enumerate(contexts):
        for place, intervened in enumerate(of_head):
            with intervened:
                costs[row, place] = text_losses(model, encoded) - base
    return costs


@contextmanager
def _intervened(
    model: PreTrainedModel, head: Head, kind: str, means: Tensor, treated: dict[str, Patch]
) -> Iterator[None]:
    """The model with one intervention on one head: a hook, the tap, or written weights."""
    if kind in treated:
        slices = treated[kind].slices
        parts = [part for name, part in slices.items() if name.split(".")[0] == str(head)]
        write_slices(model, {part.span: part.after for part in parts})
        try:
            yield
        finally:
            write_slices(model, {part.span: part.before for part in parts})
    elif kind == "unsink":
        with tapped(model, _unsinking(head)):
            yield
    else:
        value = means[head.layer, head.index] if kind == "mean" else torch.zeros(())
        with head_output(model, head, value):
            yield


def _unsinking(head: Head) -> Any:
    def read(attention: LayerAttention) -> Tensor | None:
        if attention.layer != head.layer:
            return None
        out = attention.out.clone()
        out[:, head.index] = without_key(attention, 0)[:, head.index]
        return out

    return read
