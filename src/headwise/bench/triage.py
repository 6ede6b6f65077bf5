"""`headwise bench triage`: the costs that triage rests on, beside brute force."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.mean_outputs import measure_means
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head, all_heads
from headwise.models.architectures import geometry_of, projection_of
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.slices import write_slices
from headwise.proof.head_costs import InterventionCosts, Interventions, head_costs, unsunk
from headwise.surgery.sink_directions import measure_directions
from headwise.texts.batches import batches, encode_texts
from headwise.texts.corpus import triage_texts
from headwise.texts.text_sets import TextSet
from headwise.therapy.triage import HANDLES, query_plan, treated_queries

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Rows = list[dict[str, Any]]

TEXTS = 8


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
    wanted = _interventions(loaded, chosen, encoded, heads)
    pairs, error = [], 0.0
    with one_thread():
        for _ in range(repeats):
            started = time.process_time()
            ours = head_costs(loaded.model, encoded, heads, wanted)
            between = time.process_time()
            peer = _brute_force(loaded.model, encoded, ours, wanted)
            pairs.append((between - started, time.process_time() - between))
            error = max(error, float((np.abs(ours.deltas - peer) / ours.tokens).max()))
    fast, slow = (median(pair[side] for pair in pairs) for side in (0, 1))
    return [
        {
            "model": loaded.id,
            "heads": len(heads),
            "interventions": len(wanted.kinds),
            "texts": len(encoded),
            "tokens": int(ours.tokens.sum()),
            "headwise_cpu_s": round(fast, 2),
            "peer_cpu_s": round(slow, 2),
            "time_to_peer": round(median(a / b for a, b in pairs), 3),
            "all_heads": len(every),
            "all_heads_8_texts_cpu_s": round(fast * len(every) / count * TEXTS / texts, 1),
            "largest_difference_nats": error,
        }
    ]


def _interventions(
    loaded: LoadedModel, texts: tuple[str, ...], encoded: list[list[int]], heads: list[Head]
) -> Interventions:
    model = loaded.model
    diagnosis = diagnose(loaded, TextSet("bench", texts[:2]))
    blocks = list(batches(encoded, 4))
    directions = measure_directions(model, blocks, sorted({head.layer for head in heads}))
    plan = query_plan(diagnosis, heads)
    treated = {n: treated_queries(model, plan, n, 1.0, directions) for n in HANDLES}
    return Interventions(measure_means(model, blocks), treated)


def _brute_force(
    model: PreTrainedModel, encoded: list[list[int]], ours: InterventionCosts, wanted: Interventions
) -> np.ndarray:
    """One full forward pass of the whole model a head, intervention and batch of texts."""
    base = _losses(model, encoded)
    found = np.zeros_like(ours.deltas)
    for row, head in enumerate(ours.heads):
        for place, kind in enumerate(ours.kinds):
            with _intervened(model, head, kind, wanted):
                found[row, place] = _losses(model, encoded) - base
    return found


@contextmanager
def _intervened(
    model: PreTrainedModel, head: Head, kind: str, wanted: Interventions
) -> Iterator[None]:
    """The model with one intervention on one head: a hook, the tap, or written weights."""
    if kind in wanted.treated:
        slices = wanted.treated[kind].slices
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
        assert wanted.means is not None
        value = wanted.means[head.layer, head.index] if kind == "mean" else torch.zeros(())
        with _output(model, head, value):
            yield


@contextmanager
def _output(model: PreTrainedModel, head: Head, value: Tensor) -> Iterator[None]:
    dim = geometry_of(model).head_dim

    def replace(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        out = inputs[0].clone()
        out[..., head.index * dim : (head.index + 1) * dim] = value.to(out)
        return (out, *inputs[1:])

    handle = projection_of(model, head.layer, "o").register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _unsinking(head: Head) -> Any:
    def read(attention: LayerAttention) -> Tensor | None:
        if attention.layer != head.layer:
            return None
        out = attention.out.clone()
        out[:, head.index] = unsunk(attention)[:, head.index]
        return out

    return read


def _losses(model: PreTrainedModel, encoded: list[list[int]]) -> np.ndarray:
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
