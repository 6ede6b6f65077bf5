"""What the treatments need measured: how each head's query meets its sink, on training text.

The sink stands on the first token, or where `sinks` says that the head looks instead (p below). One
definition for every way of knowing positions. The pull of the sink on the query at t > p is the
slope of `s(t, p) - mean over the other j <= t of s(t, j)` by the output of the query projection:
kp - kbar where nothing stands between, turned back by the rotation under RoPE (so that its mean
over t keeps the slow pairs and loses the fast ones), and through the norm where queries have one.

A head whose query is a large multiple of the pull looks at the first token alone: it is parked. It
then gives the same output at every token, if texts start with a BOS; how far it does is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError
from headwise.forward.replaced_forward import frozen
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head
from headwise.models.architectures import (
    Geometry,
    architecture_of,
    backbone_of,
    device_of,
    geometry_of,
    projection_of,
)
from headwise.models.families.layout import Role
from headwise.models.slices import head_spans
from headwise.texts.batches import Batch
from headwise.texts.corpus import spread_blocks

MEASURED_BLOCKS = 32  # training blocks that directions are measured on
_RIDGE = 1e-4  # of the mean power: the inputs of a layer norm never fill all directions
_PARKED_BLOCKS = 4  # on which parked heads are watched
_TINY = 1e-12
_PARKED_LOGIT = 300.0  # by how much, on average, a parked query prefers the first key


@dataclass(frozen=True)
class LayerDirections:
    """One layer, on training text; queries and keys as their projections give them."""

    sink: Float[Tensor, "head dim"] = field(repr=False)  # unit vectors: the pull of the sink
    query_mean: Float[Tensor, "head dim"] = field(repr=False)  # over all queries but the first
    key_gap: Float[Tensor, "head dim"] = field(repr=False)  # mean key at the sink minus the others'
    sink_input: Float[Tensor, "head hidden"] = field(repr=False)  # mean, where the sink stands
    mean_input: Float[Tensor, "hidden"] = field(repr=False)  # of all tokens but the first
    constant: Float[Tensor, "hidden"] = field(repr=False)  # w: w.x is 1 on average, varies least
    parked_query: Float[Tensor, "head dim"] = field(repr=False)  # with it a head sees one key
    first_output: Float[Tensor, "head value"] = field(repr=False)  # of the first token
    mean_output: Float[Tensor, "head value"] = field(repr=False)  # over all tokens
    # of a parked head: the largest distance of its outputs from `first_output`, relative to it
    parked_error: Float[Tensor, "head"] = field(repr=False)
    # of the loss by the query weights; only where a treatment asks (`with_slopes`)
    query_slope: Float[Tensor, "head dim hidden"] | None = field(default=None, repr=False)


def measure_directions(
    model: PreTrainedModel,
    blocks: Sequence[Batch],
    layers: Sequence[int],
    sinks: Mapping[Head, int] | None = None,
) -> dict[int, LayerDirections]:
    """Directions of the chosen layers, at the first token or at the heads' own `sinks`."""
    geometry = geometry_of(model)
    if layers and not directions_are_known(model):
        raise ModelError(
            f"sink directions of this {model.config.model_type!r} model cannot be measured: its "
            "queries and keys are not as wide as its values, differ by layer, or share a part "
            "between heads",
            fix="choose a treatment that needs none, such as reinitialise; triage, release, centre "
            "and evict do",
        )
    sums = {layer: _Sums(geometry, model, layer, sinks or {}) for layer in sorted(set(layers))}
    if not sums:
        return {}
    with frozen(model), torch.no_grad():
        for block in spread_blocks(blocks, MEASURED_BLOCKS):
            with _watched(model, sums, block):
                backbone_of(model)(input_ids=block.ids.to(device_of(model)), use_cache=False)
    found = {layer: one.directions() for layer, one in sums.items()}
    return _with_parked_errors(model, spread_blocks(blocks, _PARKED_BLOCKS), found)


def directions_are_known(model: PreTrainedModel) -> bool:
    """Whether all layers' queries and keys are the heads' own, alike and as wide as values."""
    geometry = geometry_of(model)
    shapes = {geometry_of(model, layer) for layer in geometry.layers}
    latent = architecture_of(model).order == "latent"
    return not latent and geometry.key_dim == geometry.head_dim and len(shapes) == 1


def _with_parked_errors(
    model: PreTrainedModel, blocks: Sequence[Batch], directions: dict[int, LayerDirections]
) -> dict[int, LayerDirections]:
    """Park every head of every layer and see what it gives; each layer meets what it always meets.

    The first run keeps the layers' outputs, and the second puts them in the place of parked ones.
    """
    errors = {layer: torch.zeros(len(one.sink)) for layer, one in directions.items()}
    for block in blocks:
        outputs: dict[int, Tensor] = {}
        ids = block.ids.to(device_of(model))
        real = (torch.arange(ids.shape[1])[None] < block.lengths[:, None])[:, None, :, None]

        def keep(attention: LayerAttention, outputs: dict[int, Tensor] = outputs) -> None:
            if attention.layer in directions:
                outputs[attention.layer] = attention.out

        def compare(
            attention: LayerAttention, outputs: dict[int, Tensor] = outputs, real: Tensor = real
        ) -> Tensor | None:
            layer = attention.layer
            if layer not in directions:
                return None
            constant = directions[layer].first_output[None, :, None]
            apart = torch.where(real, attention.out.float().cpu() - constant, 0.0)
            error = apart.norm(dim=-1).amax((0, 2)) / constant.norm(dim=-1)[0, :, 0]
            errors[layer] = torch.maximum(errors[layer], error.nan_to_num(torch.inf))
            return outputs[layer]

        with torch.inference_mode():
            with tapped(model, keep):
                backbone_of(model)(input_ids=ids, use_cache=False)
            with _parked(model, directions), tapped(model, compare):
                backbone_of(model)(input_ids=ids, use_cache=False)
    return {n: replace(one, parked_error=errors[n]) for n, one in directions.items()}


@contextmanager
def _parked(model: PreTrainedModel, directions: Mapping[int, LayerDirections]) -> Iterator[None]:
    """Every head of the layers gets its parked query, as `parked_slices` would make it."""
    with ExitStack() as stack:
        for layer, one in directions.items():
            module = projection_of(model, layer, "q")

            def park(
                module: nn.Module,
                args: tuple[Any, ...],
                output: Tensor,
                layer: int = layer,
                one: LayerDirections = one,
            ) -> Tensor:
                x, changed = args[0], output.clone()
                biased = getattr(module, "bias", None) is not None
                amount = torch.ones_like(x[..., 0]) if biased else x @ one.constant.to(x)
                for index, query in enumerate(one.parked_query):
                    span = next(iter(head_spans(model, Head(layer, index), "q").values()))
                    changed[..., span.start : span.stop] = amount[..., None] * query.to(x)
                return changed

            stack.callback(module.register_forward_hook(park).remove)
        yield


def with_directions(
    known: Mapping[int, LayerDirections],
    model: PreTrainedModel,
    blocks: Sequence[Batch],
    layers: Sequence[int],
    sinks: Mapping[Head, int],
) -> dict[int, LayerDirections]:
    """The known directions, and those of the layers that are missing among them.

    A layer's directions have the same bits whichever layers are measured with it.
    """
    missing = sorted(set(layers) - set(known))
    return {**known, **measure_directions(model, blocks, missing, sinks)}


@contextmanager
def _watched(model: PreTrainedModel, sums: dict[int, _Sums], block: Batch) -> Iterator[None]:
    """Hooks on the projections of the layers, and the tap that sees where their queries go."""
    with ExitStack() as stack:
        for layer, found in sums.items():
            found.block = block
            modules: dict[int, tuple[nn.Module, str]] = {}
            for role in ("q", "k"):
                module = projection_of(model, layer, role)
                modules[id(module)] = (module, modules.get(id(module), (module, ""))[1] + role)
            for module, roles in modules.values():
                stack.callback(module.register_forward_hook(found.hook(roles)).remove)

        def read(attention: LayerAttention) -> Tensor | None:
            return sums[attention.layer].read(attention) if attention.layer in sums else None

        with tapped(model, read):
            yield


class _Sums:
    """Running sums of one layer, in float64."""

    def __init__(
        self, geometry: Geometry, model: PreTrainedModel, layer: int, sinks: Mapping[Head, int]
    ) -> None:
        self.geometry, self.model, self.layer = geometry, model, layer
        hidden = int(model.config.get_text_config().hidden_size)
        heads, dim = geometry.num_heads, geometry.head_dim
        self.at = torch.tensor([sinks.get(Head(layer, index), 0) for index in range(heads)])
        self.pull, self.first_pull = torch.zeros(2, heads, dim, dtype=torch.float64)
        self.first_output, self.output = torch.zeros(2, heads, dim, dtype=torch.float64)
        self.scale = 1.0
        self.query = torch.zeros(heads, dim, dtype=torch.float64)
        self.sink_key, self.key = torch.zeros(2, heads, dim, dtype=torch.float64)
        self.sink_input = torch.zeros(heads, hidden, dtype=torch.float64)
        self.input = torch.zeros(hidden, dtype=torch.float64)
        self.sink_rows = torch.zeros(heads, dtype=torch.float64)  # texts that reach the sink
        self.power = torch.zeros(hidden, hidden, dtype=torch.float64)
        self.rows = self.tokens = 0
        self.block: Batch | None = None
        self.leaf: Tensor | None = None

    def hook(self, roles: str) -> Any:
        """A forward hook for the module that projects queries, keys or both."""

        def keep(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if "k" in roles:
                self._add_keys(output)
            if "q" not in roles:
                return None
            self._add_inputs(args[0])
            self._add_queries(output)
            self.leaf = output.detach().requires_grad_(True)
            torch.set_grad_enabled(True)  # until the tap has read this layer
            return self.leaf.clone()  # olmo clips its queries in place, and a leaf cannot be

        return keep

    def read(self, attention: LayerAttention) -> Tensor:
        """Add the slope of the pull by the projection's output; the run goes on without slopes."""
        assert self.leaf is not None
        length = attention.scores.length
        real = self._real(length)
        pulls = [self._pull(attention, self.at)]
        if bool(self.at.any()):
            pulls.append(self._pull(attention, torch.zeros_like(self.at)))
        slopes = [
            torch.autograd.grad(pull, self.leaf, retain_graph=pull is not pulls[-1])[0]
            for pull in pulls
        ]
        torch.set_grad_enabled(False)
        self.leaf = None
        own, first = (self._heads(one, "q").sum((0, 1)) for one in (slopes[0], slopes[-1]))
        self.pull += own
        self.first_pull += first
        self.scale = attention.scores.scale
        out = attention.out.detach()
        self.first_output += out[:, :, 0].sum(0).double().cpu()
        self.output += torch.where(real[:, None, :, None], out.double().cpu(), 0.0).sum((0, 2))
        return out

    def _pull(self, attention: LayerAttention, at: Tensor) -> Tensor:
        """How much more the real queries after it get from the key at `at` than from others."""
        k = attention.scores.k.detach().repeat_interleave(self.geometry.group, 1)
        length, heads = k.shape[2], torch.arange(k.shape[1])
        position = torch.arange(length, device=k.device)
        sink = k[:, heads, at.clamp(max=length - 1)][:, :, None]
        others = (k.cumsum(2) - sink) / position.clamp(min=1)[:, None]  # of the other keys up to t
        after = self._real(length)[:, None] & (torch.arange(length) > at[:, None])
        pull = attention.scores.q * (sink - others) * after[..., None].to(k)
        return pull.sum()

    def _real(self, length: int) -> Tensor:
        assert self.block is not None
        return torch.arange(length)[None] < self.block.lengths[:, None]

    def _heads(self, output: Tensor, role: Role) -> Float[Tensor, "text token head d"]:
        """The part of a projection's output that each head reads, in float64 on the CPU."""
        spans = [
            next(iter(head_spans(self.model, Head(self.layer, index), role).values()))
            for index in range(self.geometry.num_heads)
        ]
        parts = [output.detach()[..., span.start : span.stop] for span in spans]
        return torch.stack(parts, 2).double().cpu()

    def _others(self, length: int) -> Tensor:
        real = self._real(length)
        real[:, 0] = False
        return real

    def _at_sinks(self, length: int) -> tuple[Bool[Tensor, "text head"], Int[Tensor, "head"]]:
        """Which texts reach each head's sink, and where it stands."""
        return self._real(length)[:, self.at.clamp(max=length - 1)] & (self.at < length), self.at

    def _add_keys(self, output: Tensor) -> None:
        keys = self._heads(output, "k")
        reached, at = self._at_sinks(keys.shape[1])
        heads = torch.arange(len(at))
        sink = keys[:, at.clamp(max=keys.shape[1] - 1), heads]  # (text, head, dim)
        self.sink_key += (sink * reached[..., None]).sum(0)
        self.key += keys[self._others(keys.shape[1])].sum(0)

    def _add_queries(self, output: Tensor) -> None:
        queries = self._heads(output, "q")
        others = self._others(queries.shape[1])
        self.query += queries[others].sum(0)
        self.rows += len(queries)
        self.tokens += int(others.sum())

    def _add_inputs(self, inputs: Tensor) -> None:
        x = inputs.detach().double().cpu()
        rest = x[self._others(x.shape[1])]
        reached, at = self._at_sinks(x.shape[1])
        self.sink_rows += reached.sum(0)
        self.sink_input += (x[:, at.clamp(max=x.shape[1] - 1)] * reached[..., None]).sum(0)
        self.input += rest.sum(0)
        self.power += rest.T @ rest

    def directions(self) -> LayerDirections:
        """The means of all that was added."""
        mean = self.input / self.tokens
        power = self.power / self.tokens
        ridge = _RIDGE * power.diagonal().mean() * torch.eye(len(power), dtype=power.dtype)
        solved = torch.linalg.solve(power + ridge, mean)
        rows = self.sink_rows.clamp_min(1)[:, None]
        first_pull = self.first_pull * self.scale / self.tokens  # in logits
        power_of_pull = first_pull.square().sum(1, keepdim=True)
        parked = _PARKED_LOGIT * first_pull / power_of_pull.clamp_min(_TINY)
        return LayerDirections(
            sink=torch.nn.functional.normalize(self.pull, dim=1).float(),
            query_mean=(self.query / self.tokens).float(),
            key_gap=(self.sink_key / rows - self.key / self.tokens).float(),
            sink_input=(self.sink_input / rows).float(),
            mean_input=mean.float(),
            constant=(solved / (mean @ solved)).float(),
            parked_query=parked.float(),
            first_output=(self.first_output / self.rows).float(),
            mean_output=(self.output / (self.tokens + self.rows)).float(),
            parked_error=torch.full((len(parked),), torch.inf),
        )
