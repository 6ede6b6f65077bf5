"""What interventions on one head cost: exact changes of loss, document by document.

`zero` takes the head's output away, `mean` replaces it by its mean over tokens, `unsink` hides the
first key from it (its other weights are renormalised; the first query keeps its only key), and a
treatment's name means the head with the queries of a patch. Each changes one head's output in its
layer, so all stand on `replaced_outputs`: one base pass, then only what comes after the head. New
outputs of all heads of a layer come from one run of its attention: queries of other heads do not
matter to a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.diagnosis.head_slopes import head_slopes
from headwise.diagnosis.mean_outputs import head_mean
from headwise.errors import SettingsError
from headwise.forward.attention import attend
from headwise.forward.frozen import frozen
from headwise.forward.partial_run import RecordedCall, attention_calls
from headwise.forward.replaced_outputs import (
    BasePass,
    Losses,
    Replaced,
    base_pass,
    replaced_losses,
    stack_size,
)
from headwise.forward.replacements import Variant, variant_losses
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head
from headwise.models.architectures import projection_of
from headwise.models.patch import Patch, Slice
from headwise.models.stored_weights import stored_weights
from headwise.progress import Progress, silent, told
from headwise.ranks import shared_out
from headwise.texts.batches import Batch, batches

Outs = Float[Tensor, "text head query value"]


@dataclass(frozen=True)
class InterventionCosts:
    """Change of summed loss of every document for every head and intervention."""

    heads: tuple[Head, ...]
    kinds: tuple[str, ...]
    base: Losses = field(repr=False)
    deltas: Float[np.ndarray, "head kind document"] = field(repr=False)
    tokens: Int[np.ndarray, "document"] = field(repr=False)


@dataclass(frozen=True)
class Interventions:
    """What is done to each head in turn: which kinds, and what they need."""

    means: Float[Tensor, "layer head value"] | None = field(default=None, repr=False)
    treated: Mapping[str, Patch] = field(default_factory=dict)
    zero: bool = True
    unsink: bool = True

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names, in the order of `InterventionCosts.deltas`."""
        plain = {"zero": self.zero, "mean": self.means is not None, "unsink": self.unsink}
        return (*(name for name, wanted in plain.items() if wanted), *self.treated)


def head_costs(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    interventions: Interventions,
    *,
    batch_size: int = 1,
    stack: int | None = None,
    progress: Progress = silent,
) -> InterventionCosts:
    """Exact change of loss for each head alone under each intervention."""
    for name, patch in interventions.treated.items():
        _require_queries_only(name, patch)
    chosen, kinds = tuple(sorted(heads)), interventions.kinds
    if stored_weights(model) is not None:
        return _streamed_costs(model, encoded, chosen, interventions, batch_size, progress)
    base = np.zeros(len(encoded))
    deltas = np.zeros((len(chosen), len(kinds), len(encoded)))
    work = list(batches(encoded, batch_size))

    def costs(batch: Batch) -> tuple[Losses, Float[np.ndarray, "head kind document"]]:
        with torch.inference_mode():
            passed, layers = intervened_outputs(model, batch, chosen, interventions)
            changes = np.zeros((len(chosen), len(kinds), len(passed.losses)))
            for jobs in _jobs(chosen, len(kinds), stack or stack_size(passed)):
                replaced = [
                    Replaced(chosen[h], layers[chosen[h].layer][kinds[k]][:, chosen[h].index])
                    for h, k in jobs
                ]
                found = replaced_losses(model, passed, replaced) - passed.losses
                for (h, k), row in zip(jobs, found, strict=True):
                    changes[h, k] = row
        return passed.losses, changes

    for batch, (losses, changes) in told(
        shared_out(costs, work), len(work), "costs of heads", progress
    ):
        base[list(batch.index)] = losses
        deltas[:, :, list(batch.index)] = changes
    tokens = np.array([len(ids) - 1 for ids in encoded])
    return InterventionCosts(chosen, kinds, base, deltas, tokens)


def first_order_costs(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    interventions: Interventions,
    *,
    progress: Progress = silent,
) -> Float[np.ndarray, "head kind document"]:
    """Estimated change of every document's summed loss, in the order of the heads.

    About three forward passes a text for all heads and interventions, instead of half a pass each.
    """
    work, kinds = list(batches(encoded, 1)), interventions.kinds
    found = np.zeros((len(heads), len(kinds), len(encoded)))

    def estimate(batch: Batch) -> Float[np.ndarray, "head kind document"]:
        with torch.inference_mode():
            _, changed = intervened_outputs(model, batch, heads, interventions)
        slopes = head_slopes(model, batch)
        with torch.inference_mode():
            rows = [
                [_first_order(head, slopes, changed[head.layer][kind]) for kind in kinds]
                for head in heads
            ]
        return np.array(rows)

    with frozen(model):
        for batch, rows in told(
            shared_out(estimate, work), len(work), "first-order estimates", progress
        ):
            found[:, :, list(batch.index)] = rows
    return found


def _first_order(
    head: Head, slopes: dict[int, tuple[Outs, Outs]], changed: Outs
) -> Float[np.ndarray, "document"]:
    out, slope = (part[:, head.index] for part in slopes[head.layer])
    products = (changed[:, head.index] - out).double() * slope.double()
    total: Float[np.ndarray, "document"] = products.sum((1, 2)).cpu().numpy()
    return total


def _streamed_costs(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: tuple[Head, ...],
    interventions: Interventions,
    batch_size: int,
    progress: Progress,
) -> InterventionCosts:
    """The same of a model on disk: all heads and texts go through one layer before the next."""
    work, kinds = list(batches(encoded, batch_size)), interventions.kinds

    def give(attention: LayerAttention, call: RecordedCall) -> dict[str, Outs]:
        treated = {
            name: _treated_outs(model, call, attention.layer, patch)
            for name, patch in interventions.treated.items()
        }
        return {**_plain_outs(model, attention, interventions), **treated}

    found = variant_losses(
        model,
        [(batch.ids, batch.lengths) for batch in work],
        [Variant((head,), kind) for head in heads for kind in kinds],
        give,
        title="costs of heads",
        progress=progress,
    )
    texts = np.argsort([text for batch in work for text in batch.index])
    deltas = (found.changed - found.base)[:, texts].reshape(len(heads), len(kinds), -1)
    tokens = np.array([len(ids) - 1 for ids in encoded])
    return InterventionCosts(heads, kinds, found.base[texts], deltas, tokens)


def _jobs(heads: Sequence[Head], kinds: int, stack: int) -> Iterator[list[tuple[int, int]]]:
    """(head, kind) pairs of one layer at a time, at most `stack` together."""
    for layer in sorted({head.layer for head in heads}):
        pairs = [
            (h, k) for h, head in enumerate(heads) if head.layer == layer for k in range(kinds)
        ]
        yield from (pairs[at : at + stack] for at in range(0, len(pairs), stack))


def intervened_outputs(
    model: PreTrainedModel, batch: Batch, heads: Sequence[Head], interventions: Interventions
) -> tuple[BasePass, dict[int, dict[str, Outs]]]:
    """The base pass, and what the heads of each wanted layer give under each intervention."""
    layers = sorted({head.layer for head in heads})
    found: dict[int, dict[str, Outs]] = {layer: {} for layer in layers}

    def read(attention: LayerAttention) -> None:
        if attention.layer in found:
            found[attention.layer] = _plain_outs(model, attention, interventions)

    with attention_calls(model) as calls:
        passed = base_pass(model, batch.ids, batch.lengths, read)
    for name, patch in interventions.treated.items():
        for layer in layers:
            found[layer][name] = _treated_outs(model, calls[layer], layer, patch)
    return passed, found


def _plain_outs(
    model: PreTrainedModel, attention: LayerAttention, interventions: Interventions
) -> dict[str, Outs]:
    outs = {"zero": torch.zeros_like(attention.out)} if interventions.zero else {}
    if interventions.means is not None:
        heads = [Head(attention.layer, index) for index in range(attention.out.shape[1])]
        means = torch.stack([head_mean(model, interventions.means, head) for head in heads])
        outs["mean"] = means[None, :, None].to(attention.out).expand_as(attention.out)
    if interventions.unsink:
        outs["unsink"] = unsunk(attention)
    return outs


def unsunk(attention: LayerAttention) -> Outs:
    """The heads' outputs without the first key; the first query has no other and keeps it."""
    scores = attention.scores
    visible = scores.visible
    if visible is None:
        visible = torch.ones(len(scores.q), scores.length, dtype=torch.bool, device=scores.q.device)
    visible = visible.clone()
    visible[:, 0] = False
    out, _ = attend(replace(scores, visible=visible), attention.v)
    if attention.before_gate is not None:  # the gate does not depend on where the head looks
        own = attention.before_gate
        out = out * torch.where(own == 0, 0.0, attention.out / own)
    return torch.cat([attention.out[:, :, :1], out[:, :, 1:]], 2)


def _treated_outs(model: PreTrainedModel, call: RecordedCall, layer: int, patch: Patch) -> Outs:
    """The outputs of one layer's heads with the patch's queries, by the family's own code."""
    outs: list[Tensor] = []
    parts = [p for name, p in patch.slices.items() if _is_query(name) and _layer(name) == layer]
    with (
        _changed_queries(projection_of(model, layer, "q"), parts),
        tapped(model, lambda attention: outs.append(attention.out)),
    ):
        call.again()
    return outs[0]


def _is_query(name: str) -> bool:
    return name.rsplit(".", 1)[1] in ("q", "q_bias")


def _layer(name: str) -> int:
    return Head.parse(name.rsplit(".", 1)[0]).layer


@contextmanager
def _changed_queries(projection: nn.Module, parts: Sequence[Slice]) -> Iterator[None]:
    """The query projection gives what it would with other slices; its weights stay."""

    def change(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        changed = output.clone()
        for part in parts:
            span, delta = part.span, (part.after - part.before).to(output)
            if span.parameter.endswith("bias"):
                changed[..., span.start : span.stop] += delta
            else:
                changed[..., span.start : span.stop] += args[0] @ (delta if span.axis else delta.T)
        return changed

    handle = projection.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def _require_queries_only(name: str, patch: Patch) -> None:
    """Only a change of queries stays inside one head's output."""
    others = [
        part
        for part, found in patch.slices.items()
        if not _is_query(part) and not torch.equal(found.before, found.after)
    ]
    if others:
        raise SettingsError(
            f"the cost of {name!r} cannot be measured head by head: it changes {others[0]}",
            fix="measure treatments that write queries only, such as release and centre",
        )
