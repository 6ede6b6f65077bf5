"""Is the attention that headwise computes the model's own? Behaviour decides, never a row.

`compare_runs` is the long proof: past every window, chunk and cache boundary that the config names,
with padding on both sides, against each of the model's own implementations. `found_difference` is
the short one that `guard` runs before a verb's work: one text, tapped and untapped. In half
precision every layer is compared on the same input, so that rounding does not add up and what is
allowed can be as small as the rounding of one layer.

Logits are compared at every position, or at `compared_positions` where the vocabulary is so large
that all of them would outweigh the model; hidden states of all positions are behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError, UnknownArchitectureError, reported_as
from headwise.forward.attention import mass_at, moments
from headwise.forward.losses import logits_of
from headwise.forward.tap import LayerAttention, own_implementation, tapped, using_implementation
from headwise.models.architectures import (
    architecture_of,
    attention_layers,
    backbone_of,
    device_of,
    geometry_of,
    layers_of,
    max_positions,
    projection_of,
    weight_of,
)
from headwise.progress import Progress, silent, track

PAST = 64  # tokens behind the farthest boundary
SHORTEST = 128
_BOUNDARY = re.compile(r"window|chunk|cache|local_attention|block_size|_block_len")
_DENSE = 2**28  # numbers of one layer's T x T attention that a comparison with eager may hold
_SHOWN = 2**26  # numbers of all layers' attention together, where the model shows it
_LOGITS, _FEWEST = 2**21, 48  # logits of one text that are compared, and positions at least

# Of the logits' size: sums in another order, rounded to the model's type
_TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.05}
_EXACT = 2e-4
_GUARDED = 2e-3  # looser than the proof: a router may send one token to another expert
_GUARDED_SHARE = 0.01  # of positions
# What one layer's rounding does to what it adds to a position, in units of the type's epsilon.
# 97 tiny models and four real ones, bfloat16 and float16: at the median position at most 2.4, at
# the worst 16 (44 in one position of one model), in the mean over positions 0.27.
_ROUNDED_TYPICAL, _ROUNDED_WORST, _ROUNDED_MEAN = 6.0, 64.0, 0.6
_RESIDUAL = 1 / 16  # of the residual stream's size: what its own rounding may hide


@dataclass(frozen=True)
class Difference:
    """How far tapped runs are from the model's own, at worst, of its logits' size."""

    length: int
    positions: int  # whose logits were compared
    implementations: tuple[str, ...]
    logits: float
    contributions: float  # what the tap shows of heads, against what the output projection reads
    losses: float  # the hidden states through the loss path's head, against the model's logits
    attention: float | None  # masses and entropies; None where the model shows no attention
    layers: str = ""  # in half precision: which layer is not its own, in words


def tolerance_of(model: PreTrainedModel) -> float:
    """What rounding alone may change of the logits, through all layers."""
    return _TOLERANCE.get(model.dtype, _EXACT)


def is_half(model: PreTrainedModel) -> bool:
    """Whether the model computes in half precision."""
    return torch.finfo(model.dtype).bits < 32


def require_eval(model: PreTrainedModel) -> None:
    """Refuse a model in training mode whose dropout would change its logits from run to run."""
    config = model.config.get_text_config().to_dict()
    rates = [v for name, v in config.items() if "drop" in str(name) and isinstance(v, float)]
    if model.training and any(rates):
        raise ModelError(
            f"this {model.config.model_type!r} model is in training mode, and its dropout makes "
            "every run another one",
            where=model.config._name_or_path or None,
            fix="call model.eval() first",
        )


def boundaries(model: PreTrainedModel) -> dict[str, int]:
    """Windows, chunks and caches that the config names, in tokens."""
    numbers = dict(_numbers(model.config.get_text_config().to_dict()))
    return {name: value for name, value in numbers.items() if _BOUNDARY.search(name) and value > 1}


def _numbers(config: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(name), value


def proof_length(model: PreTrainedModel) -> int:
    """Tokens that pass every boundary by 64, as far as the model has positions."""
    wanted = max(SHORTEST, *(value + PAST for value in (0, *boundaries(model).values())))
    return min(wanted, max_positions(model) or wanted)


def random_ids(
    model: PreTrainedModel, texts: int, length: int, seed: int = 0
) -> Int[Tensor, "text position"]:
    """Token ids of the whole vocabulary, but not its first few, which tend to be special."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = len(weight_of(model.get_input_embeddings()))
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (texts, length), generator=generator)
    return ids.to(device_of(model))


def compared_positions(
    model: PreTrainedModel, length: int, everything: bool = False
) -> Int[Tensor, "place"]:
    """Where logits are compared: everywhere, or at the end and evenly before it if they are many.

    A window or chunk that is read wrongly changes every position behind it.
    """
    count = max(_FEWEST, _LOGITS // len(weight_of(model.get_input_embeddings())))
    if everything or count >= length:
        return torch.arange(length)
    half = count // 2
    before = torch.linspace(0, length - half - 1, count - half).long()
    places: Tensor = torch.cat([before, torch.arange(length - half, length)])
    return places


@contextmanager
def _logits_at(model: PreTrainedModel, places: Int[Tensor, "place"], length: int) -> Iterator[None]:
    """While open the output head reads these positions only of a text of this length."""

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        whole = inputs[0].dim() == 3 and inputs[0].shape[1] == length > len(places)
        return (inputs[0][:, places], *inputs[1:]) if whole else None

    with model.get_output_embeddings().register_forward_pre_hook(choose):
        yield


@torch.inference_mode()
def compare_runs(
    model: PreTrainedModel,
    *,
    seed: int = 0,
    everything: bool = False,
    progress: Progress = silent,
) -> Difference:
    """The long proof, on random tokens; `everything` compares the logits of all positions."""
    length = proof_length(model)
    ids = random_ids(model, 2, length, seed)
    names, places = _implementations(model), compared_positions(model, length, everything)
    masks = [_padding(ids, "left"), _padding(ids, "right"), torch.ones_like(ids[:1])]
    changes, losses = [], torch.inf
    for mask in track(masks, "comparing runs", progress):
        some = ids[: len(mask)]
        plain = {name: _own_logits(model, some, places, mask, name) for name in names}
        _require_numbers(model, plain.values())
        if _agree(model, plain.values()):
            with tapped(model):  # one run for all: the tap takes the place of each of them
                seen = _own_logits(model, some, places, mask)
            changes += [relative(seen, one) for one in plain.values()]
        if len(mask) == 1:
            hidden = backbone_of(model)(some, use_cache=False).last_hidden_state[0, places]
            losses = relative(logits_of(model, hidden), plain[names[0]])
    if not changes:
        raise UnknownArchitectureError(
            f"this {model.config.model_type!r} model does not agree with itself: run as "
            f"{' and as '.join(names)} its logits differ",
            fix="nothing measured on it would be true; try --dtype float32",
        )
    return Difference(
        length,
        len(places),
        names,
        logits=max(changes),
        contributions=_contribution_error(model, ids[:1]),
        losses=losses,
        attention=_attention_error(model, ids[:1]),
        layers=_layer_difference(model, ids[:1]) if is_half(model) else "",
    )


def _implementations(model: PreTrainedModel) -> tuple[str, ...]:
    """The model's own, and sdpa and eager where one module can be run as both."""
    own = own_implementation(model)
    if architecture_of(model).attention_call is not None:
        return (own,)
    others = ("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",)
    return tuple(dict.fromkeys((own, *(o for o in others if o == "sdpa" or _is_small(model)))))


def _is_small(model: PreTrainedModel) -> bool:
    return proof_length(model) ** 2 * geometry_of(model).num_heads <= _DENSE


def _padding(ids: Tensor, side: str) -> Int[Tensor, "text position"]:
    """The second text is three quarters as long as the first."""
    mask = torch.ones_like(ids)
    missing = ids.shape[1] // 4
    mask[1, slice(0, missing) if side == "left" else slice(ids.shape[1] - missing, None)] = 0
    return mask


def _own_logits(
    model: PreTrainedModel, ids: Tensor, places: Tensor, mask: Tensor, name: str | None = None
) -> Float[Tensor, "real_place token"]:
    """The logits of real tokens at some positions, by the implementation of that name if any."""
    with using_implementation(model, name) if name else nullcontext():
        return _model_logits(model, ids, places, mask)[mask[:, places].bool()]


def _model_logits(
    model: PreTrainedModel, ids: Tensor, places: Tensor, mask: Tensor | None = None
) -> Float[Tensor, "text place token"]:
    """The model as it is: what it cannot run itself is no fault of a row."""
    with (
        _logits_at(model, places, ids.shape[1]),
        reported_as(
            ModelError,
            f"this {model.config.model_type!r} model does not run",
            *(RuntimeError, ValueError, TypeError, LookupError, AttributeError),
            where=model.config._name_or_path or None,
            fix="check its config.json; transformers alone cannot run it either",
        ),
    ):
        logits: Tensor = model(ids, attention_mask=mask, use_cache=False).logits
    # a family whose head is no module call gives all of them
    return logits if logits.shape[1] == len(places) else logits[:, places]


def _agree(model: PreTrainedModel, plain: Iterable[Tensor]) -> bool:
    """Whether the model agrees with itself: some recurrences read what padding happens to hold."""
    first, *others = plain
    return all(relative(other, first) < tolerance_of(model) for other in others)


def _contribution_error(model: PreTrainedModel, ids: Tensor) -> float:
    """Nothing may happen to a head's output between the tap and the output projection."""
    entered: dict[int, Tensor] = {}
    shown: dict[int, Tensor] = {}

    def enter(layer: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        entered[layer] = inputs[0]

    def show(attention: LayerAttention) -> None:
        shown[attention.layer] = attention.out.transpose(1, 2).flatten(2)

    layers = attention_layers(model)
    with ExitStack() as hooks:
        for n in layers:
            projection = projection_of(model, n, "o")
            hooks.enter_context(projection.register_forward_pre_hook(partial(enter, n)))
        with tapped(model, show):
            backbone_of(model)(ids, use_cache=False)
    return max(relative(shown[n], entered[n].reshape(shown[n].shape)) for n in layers)


def relative(left: Tensor, right: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((left - right).abs().max() / right.abs().max().clamp_min(1e-6))


def _attention_error(model: PreTrainedModel, ids: Tensor) -> float | None:
    """First-token mass, previous-token mass and entropy of every query, against dense attention."""
    geometry = geometry_of(model)
    ids = ids[:, : int((_SHOWN / (geometry.num_layers * geometry.num_heads)) ** 0.5)]
    interface = architecture_of(model).attention_call is None
    if not interface and own_implementation(model) != "eager":
        # Falcon's sdpa code shows attention that it did not compute with: not masked, or with its
        # ALiBi bias taken twice (transformers 5.22)
        return None
    with using_implementation(model, "eager") if interface else nullcontext():
        dense = _dense_attention(model, ids)
        if dense is None:
            return None
        errors: list[float] = []

        def read(attention: LayerAttention) -> None:
            p = _with_sinks(dense[layers.index(attention.layer)].float(), attention)
            entropy = torch.special.entr(p).sum(-1)
            # what no key receives is the share of a learned sink, which is an outcome too
            entropy = entropy + torch.special.entr((1 - p.sum(-1)).clamp_min(0))
            first = mass_at(attention.scores, attention.lse, None)
            previous = mass_at(attention.scores, attention.lse, 1)[..., 1:]
            errors.append(float((first - p[..., 0]).abs().max()))
            errors.append(float((previous - p.diagonal(-1, 2, 3)).abs().max()))
            moment = moments(attention.scores, attention.lse)
            errors.append(float((moment.entropy - entropy).mean(-1).abs().max()))

        layers = attention_layers(model)
        with tapped(model, read):
            backbone_of(model)(ids, use_cache=False)
    return max(errors)


def _with_sinks(
    p: Float[Tensor, "batch head query key"], attention: LayerAttention
) -> Float[Tensor, "batch head query key"]:
    """Some families show their attention before the learned sink takes its share."""
    sinks = attention.scores.sinks
    if sinks is None or bool((p.sum(-1) < 1 - 1e-4).any()):
        return p
    return p * (1 - (sinks.float()[None, :, None] - attention.lse).exp())[..., None]


def _dense_attention(model: PreTrainedModel, ids: Tensor) -> list[Tensor] | None:
    """The model's own T x T attention by layer, None where it gives none."""
    with _logits_at(model, torch.tensor([0]), ids.shape[1]):
        output = model(ids, use_cache=False, output_attentions=True)
    square = (ids.shape[1], ids.shape[1])
    shown = getattr(output, "attentions", None) or ()
    dense = [p for p in shown if p is not None and p.shape[-2:] == square]
    return dense if len(dense) == len(attention_layers(model)) else None


def _require_numbers(model: PreTrainedModel, logits: Iterable[Tensor]) -> None:
    """Refuse a model that gives NaN of its own: no difference from it means a thing."""
    if not all(bool(one.isfinite().any()) for one in logits):
        raise ModelError(
            f"this {model.config.model_type!r} model's own logits are NaN or infinite everywhere",
            where=model.config._name_or_path or None,
            fix="check its config.json (rope_parameters, norm epsilons); try --dtype float32",
        )


@torch.inference_mode()
def found_difference(model: PreTrainedModel, longest: int) -> str:
    """The short proof: what differs when headwise runs one text, in words; nothing if nothing does.

    Through the tap and the loss path at once, two forward passes in all; past every boundary that a
    text of the `longest` length meets, and no longer than that takes.
    """
    enough = proof_length(model) if boundaries(model) else min(PAST, max_positions(model) or PAST)
    ids = random_ids(model, 1, max(2, min(longest, enough)))
    if is_half(model):
        return _layer_difference(model, ids)
    places = compared_positions(model, ids.shape[1])
    plain = _model_logits(model, ids, places)[0]
    _require_numbers(model, [plain])
    with tapped(model):
        hidden = backbone_of(model)(ids, use_cache=False).last_hidden_state[0, places]
    seen = logits_of(model, hidden)
    errors = (seen - plain).abs().amax(-1) / plain.abs().max().clamp_min(1e-6)
    wrong = errors.isnan() | (errors > _GUARDED)
    wrong &= plain.isfinite().all(-1)  # a model that overflows is told by its measures
    if int(wrong.sum()) <= max(1, int(_GUARDED_SHARE * wrong.numel())):
        return ""
    worst, count = float(errors.max()), f"{int(wrong.sum())} of {wrong.numel()} positions"
    return f"its logits differ by {worst:.1e} of their size in {count}"


def _layer_difference(model: PreTrainedModel, ids: Int[Tensor, "1 position"]) -> str:
    """Every layer and the output head, run by headwise on what the model's own run gave them."""
    own: list[Tensor] = []
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own.append((args[0] if args else kwargs["hidden_states"]).detach())

    def swap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach())
        given = own[len(seen) - 1]
        return ((given, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": given})

    with ExitStack() as hooks:
        for layer in layers_of(model):
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        places = compared_positions(model, ids.shape[1])
        plain = _model_logits(model, ids, places)[0]
    _require_numbers(model, [plain])
    with tapped(model), ExitStack() as hooks:
        for layer in layers_of(model):
            hooks.enter_context(layer.register_forward_pre_hook(swap, with_kwargs=True))
        hidden = backbone_of(model)(ids, use_cache=False).last_hidden_state[0, places]
    for number in range(1, len(own)):
        apart = beyond_rounding(seen[number], own[number], own[number - 1])
        if apart:
            return f"layer {number - 1} adds something else to the text, by {apart:.1e} of its size"
    logits = logits_of(model, hidden)
    apart = beyond_rounding(logits, plain, torch.zeros_like(plain))
    return f"its logits differ by {apart:.1e} of their size" if apart else ""


def beyond_rounding(
    seen: Float[Tensor, "*batch hidden"],
    own: Float[Tensor, "*batch hidden"],
    before: Float[Tensor, "*batch hidden"],
) -> float:
    """How far a layer's output is from its own, of what it adds to `before`; 0 within rounding.

    Rounding is small at most positions and cancels over them; a lost bias does not.
    """
    epsilon = torch.finfo(own.dtype).eps
    finite = own.isfinite().all(-1)  # a model that overflows is told by its measures
    seen, own, before = (part[finite].double() for part in (seen, own, before))
    if not own.numel():
        return 0.0
    size = (own - before).norm(dim=-1) + _RESIDUAL * own.norm(dim=-1)
    size = size.clamp_min(torch.finfo(torch.float32).tiny)
    errors = ((seen - own).norm(dim=-1) / size).nan_to_num(nan=torch.inf)
    typical, wrong = float(errors.median()), errors > _ROUNDED_WORST * epsilon
    if typical > _ROUNDED_TYPICAL * epsilon:
        return typical
    if int(wrong.sum()) > max(1, int(_GUARDED_SHARE * wrong.numel())):
        return float(errors.max())
    usual = errors <= max(4 * typical, epsilon)  # a router may send a token to another expert
    shift = float((seen - own)[usual].mean(0).norm() / size[usual].mean())
    return shift if shift > _ROUNDED_MEAN * epsilon else 0.0
