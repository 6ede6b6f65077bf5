"""Dormant MLP neurons: by weight norms as the paper counts them, and by activations.

The weight rule multiplies the norm of what a neuron reads by the norm of what it writes. It is a
function of MLP weights alone, so it *cannot* change when only attention is trained: an unchanged
count confirms nothing. The activation rule (ReDo: mean |activation| at most tau of the layer's
mean) can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.diagnosis.values import Dormancy
from headwise.forward.hooked_pass import Emit, HookedPass
from headwise.forward.measurements import Measurement
from headwise.models.architectures import architecture_of, dense_weight, layers_of
from headwise.texts.batches import Batch

WEIGHT_THRESHOLD = 0.01
ACTIVATION_TAU = 0.025


def dormancy_of(
    dormant: Sequence[Bool[Tensor, "neuron"] | None], threshold: float = WEIGHT_THRESHOLD
) -> Dormancy | None:
    """Share of neurons whose weight-norm product is below the threshold, per layer and overall.

    None where the family's row names no MLP: of experts no neuron sees every token.
    """
    rule = f"norm(in) * norm(out) < {threshold} (gated: geometric mean of both in-norms)"
    known = [one for one in dormant if one is not None]
    return _summary(known, rule=rule) if known else None


def dormant_weights(
    model: PreTrainedModel, layer: int, threshold: float = WEIGHT_THRESHOLD
) -> Bool[Tensor, "neuron"] | None:
    """Which neurons of one layer are below the threshold."""
    if not architecture_of(model).mlp_in:
        return None
    return _importance(model, layers_of(model)[layer]) < threshold


def _importance(model: PreTrainedModel, layer: nn.Module) -> Float[Tensor, "neuron"]:
    row = architecture_of(model)
    norms = [norm for name in row.mlp_in for norm in _row_norms(layer, name)]
    down = dense_weight(layer.get_submodule(row.mlp_out))
    reads = torch.stack(norms).prod(0) ** (1 / len(norms))
    writes: Tensor = down.norm(dim=0)
    return reads * writes


def _row_norms(layer: nn.Module, name: str) -> list[Tensor]:
    name, _, parts = name.partition("*")
    norms = dense_weight(layer.get_submodule(name)).norm(dim=1)
    return list(norms.chunk(int(parts or 1)))


def dormancy_measurement(
    model: PreTrainedModel, batches: Iterable[Batch], tau: float = ACTIVATION_TAU
) -> Measurement[Dormancy | None]:
    """Share of neurons whose mean |activation| is at most `tau` of their layer's mean."""
    work = list(batches) if architecture_of(model).mlp_in else []
    totals: dict[int, Tensor] = {}

    def take(_: int, layer: int | None, seen: Tensor) -> None:
        assert layer is not None
        totals[layer] = totals[layer] + seen if layer in totals else seen

    def listen(number: int, emit: Emit[Tensor]) -> AbstractContextManager[object]:
        return _activation_hooks(model, work[number], emit)

    yield HookedPass([batch.ids for batch in work], take, listen=listen)
    if not work:
        return None
    dormant = [totals[layer] <= tau * totals[layer].mean() for layer in sorted(totals)]
    return _summary(dormant, rule=f"mean |activation| <= {tau} of the layer's mean")


@contextmanager
def _activation_hooks(model: PreTrainedModel, batch: Batch, emit: Emit[Tensor]) -> Iterator[None]:
    """While open `emit` gets each layer's sums of |activation| over the batch's real tokens."""
    real = (torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]).float()

    def hook(layer: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # OPT flattens (text, position) before its MLP; both orders agree with `real`
        flat = inputs[0].detach().float().abs().reshape(-1, inputs[0].shape[-1])
        emit(layer, (flat * real.to(flat.device).reshape(-1, 1)).sum(0).cpu())

    name = architecture_of(model).mlp_out
    with ExitStack() as hooks:
        for number, layer in enumerate(layers_of(model)):
            module = layer.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(hook, number)))
        yield


def _summary(dormant: list[Tensor], rule: str) -> Dormancy:
    return Dormancy(
        rule,
        share=float(torch.cat(dormant).float().mean()),
        num_dormant=int(sum(int(d.sum()) for d in dormant)),
        num_neurons=int(sum(d.numel() for d in dormant)),
        share_by_layer=tuple(float(d.float().mean()) for d in dormant),
    )
