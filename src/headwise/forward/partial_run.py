"""Run a model from layer L on, from stored inputs of that layer.

The layers below are replaced by a pass-through for one call and layer L's input is swapped. So
whatever the family does around its layers (masks, rotary tables, final norm) stays its own code.
Used to skip frozen layers in training and to price ablations without re-running what cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.models.architectures import attention_of, blocks_of

Hidden = Float[Tensor, "text position hidden"]


class _StopError(Exception):
    """Ends a forward pass once the wanted layer input has been seen."""


def layer_input(model: PreTrainedModel, ids: Int[Tensor, "text position"], layer: int) -> Hidden:
    """The hidden states that enter `layer`; later layers do not run."""
    seen: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_first(args, kwargs).detach())
        raise _StopError

    handle = blocks_of(model)[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.base_model(input_ids=ids, use_cache=False)
    except _StopError:
        return seen[0]
    finally:
        handle.remove()
    raise AssertionError(f"layer {layer} did not run")


def layer_inputs(
    model: PreTrainedModel, ids: Int[Tensor, "text position"]
) -> tuple[list[Hidden], list[Any], Hidden]:
    """The inputs of all layers, the outputs of their attention modules, and the last hidden states.

    From one forward pass; an attention module's output is kept as it returns it, often a tuple.
    """
    inputs: list[Tensor] = []
    attended: list[Any] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(_first(args, kwargs).detach())

    def keep_attention(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        attended.append(output)

    handles = [b.register_forward_pre_hook(keep, with_kwargs=True) for b in blocks_of(model)]
    modules = [attention_of(model, layer) for layer in range(len(handles))]
    handles.extend(module.register_forward_hook(keep_attention) for module in modules)
    try:
        last = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return inputs, attended, last


@contextmanager
def replaced_attention(model: PreTrainedModel, layer: int, output: Any) -> Iterator[None]:
    """The attention module of one layer does not run: it returns `output`."""
    module = attention_of(model, layer)
    before = module.__dict__.get("forward")  # an open tap or accelerate may have put one there
    module.__dict__["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value: Tensor = args[0] if args else kwargs["hidden_states"]
    return value


def run_from(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], layer: int, hidden: Hidden
) -> Hidden:
    """The last hidden states when `hidden` enters `layer`; `ids` only gives the shape."""
    if layer == 0:
        with _swapped_input(blocks_of(model)[0], hidden):
            return _last(model, ids)
    with (
        _passing_through(blocks_of(model)[:layer]),
        _swapped_input(blocks_of(model)[layer], hidden),
    ):
        return _last(model, ids)


def _last(model: PreTrainedModel, ids: Tensor) -> Tensor:
    last: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return last


@contextmanager
def _swapped_input(block: nn.Module, hidden: Hidden) -> Iterator[None]:
    def swap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    handle = block.register_forward_pre_hook(swap, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _passing_through(blocks: list[nn.Module]) -> Iterator[None]:
    try:
        for block in blocks:
            block.__dict__["forward"] = _pass_through(_returns_tuple(block))
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _pass_through(as_tuple: bool) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _first(args, kwargs)
        return (hidden, None) if as_tuple else hidden

    return forward


# Families whose layers return (hidden, weights) rather than hidden alone
_TUPLES = ("BloomBlock", "MptBlock", "FalconDecoderLayer", "GPTJBlock")


def _returns_tuple(block: nn.Module) -> bool:
    return type(block).__name__ in _TUPLES
