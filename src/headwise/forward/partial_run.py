"""Run a model from layer L on, from stored inputs of that layer.

The layers below are replaced by a pass-through for one call and layer L's input is swapped. So
whatever the family does around its layers (masks, rotary tables, final norm) stays its own code.
Used to skip frozen layers in training and to price ablations without re-running what cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from headwise.forward.replaced_forward import replaced_forward
from headwise.models.architectures import (
    architecture_of,
    attention_modules,
    attention_of,
    backbone_of,
    layers_of,
)

Keywords = dict[str, Any]  # of a module's call, as torch hands them to a hook
Hidden = Float[Tensor, "text position hidden"]
Rerun = Callable[[], Any]  # calls a module once more with the arguments it was called with
LayerInput = Float[Tensor, "*stream text position hidden"]  # gemma3n has several streams


class SeenError(Exception):
    """Not a failure: ends a forward pass once a hook has seen what was wanted."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen


def run_until_seen(model: PreTrainedModel, ids: Int[Tensor, "text position"]) -> Any:
    """Run the backbone until a hook raises `SeenError`, and return what the hook has seen."""
    try:
        backbone_of(model)(input_ids=ids, use_cache=False)
    except SeenError as end:
        return end.seen
    raise AssertionError("the layer did not run")


def layer_input(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], layer: int
) -> LayerInput:
    """The hidden states that enter `layer`; later layers do not run."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        raise SeenError(_first(args, kwargs).detach())

    with layers_of(model)[layer].register_forward_pre_hook(stop, with_kwargs=True):
        hidden: Tensor = run_until_seen(model, ids)
    return hidden


def layer_inputs(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], attended_layers: Collection[int] = ()
) -> tuple[list[LayerInput], dict[int, Any], Hidden]:
    """The inputs of all layers, what attention modules returned, and the last hidden states.

    From one forward pass; an attention module's output is kept as it returns it, often a tuple, and
    only for `attended_layers`.
    """
    inputs: list[Tensor] = []
    attended: dict[int, Any] = {}

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        inputs.append(_first(args, kwargs).detach())

    def keep_output(layer: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        attended[layer] = output

    with ExitStack() as hooks:
        for one in layers_of(model):
            hooks.enter_context(one.register_forward_pre_hook(keep, with_kwargs=True))
        for layer, module in attention_modules(model).items():
            if layer in attended_layers:
                hooks.enter_context(module.register_forward_hook(partial(keep_output, layer)))
        last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return inputs, attended, last


@contextmanager
def attention_calls(
    model: PreTrainedModel, layers: Collection[int] | None = None
) -> Iterator[dict[int, Rerun]]:
    """The calls of attention modules in the forward pass inside, by layer; default: all layers.

    A module that is called again is seen by an open tap.
    """
    calls: dict[int, Rerun] = {}

    def keep(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        calls[layer] = partial(module, *args, **kwargs)

    with ExitStack() as hooks:
        for layer, module in attention_modules(model).items():
            if layers is None or layer in layers:
                hook = partial(keep, layer)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield calls


def replaced_attention(
    model: PreTrainedModel, layer: int, output: Any
) -> AbstractContextManager[None]:
    """The attention module of one layer does not run: it returns `output`."""
    return replaced_forward(
        [attention_of(model, layer)],
        lambda module, previous: lambda *args, **kwargs: output,
        around_hooks=True,
    )


def _first(args: tuple[Any, ...], kwargs: Keywords) -> Tensor:
    value: Tensor = args[0] if args else kwargs["hidden_states"]
    return value


def run_from(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], layer: int, hidden: LayerInput
) -> Hidden:
    """The last hidden states when `hidden` enters `layer`; `ids` only gives the shape."""
    with _passing_through(model, layer), _swapped_input(layers_of(model)[layer], hidden):
        last: Tensor = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return last


def run_layer(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], layer: int, hidden: LayerInput
) -> LayerInput:
    """What one layer makes of `hidden`; no other layer runs."""

    def stop(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise SeenError(output[0] if isinstance(output, tuple) else output)

    module = layers_of(model)[layer]
    stopped = module.register_forward_hook(stop)
    with _passing_through(model, layer), _swapped_input(module, hidden), stopped:
        result: Tensor = run_until_seen(model, ids)
    return result


def after_layers(
    model: PreTrainedModel, ids: Int[Tensor, "text position"], hidden: LayerInput
) -> Hidden:
    """The last hidden states when `hidden` leaves the last layer; no layer runs."""
    given = (hidden, None) if architecture_of(model).layer_returns_tuple else hidden
    layers = layers_of(model)
    with replaced_forward(
        layers, lambda layer, previous: lambda *_, **__: given, around_hooks=True
    ):
        last: Tensor = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return last


def _swapped_input(layer: nn.Module, hidden: LayerInput) -> RemovableHandle:
    def swap(_: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> Any:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    return layer.register_forward_pre_hook(swap, with_kwargs=True)


def _passing_through(model: PreTrainedModel, stop: int) -> AbstractContextManager[None]:
    """Layers below `stop` do not run, nor do their hooks: no weights are brought for them."""
    as_tuple = architecture_of(model).layer_returns_tuple

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        hidden = _first(args, kwargs)
        return (hidden, None) if as_tuple else hidden

    return replaced_forward(
        layers_of(model)[:stop], lambda layer, previous: pass_on, around_hooks=True
    )
