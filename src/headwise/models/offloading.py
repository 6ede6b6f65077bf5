"""Weights that accelerate keeps off the model and brings only while a module runs.

Such a parameter is on the `meta` device between forward passes; its numbers are in the hook's
`weights_map`, on the CPU or on disk. Here they are read from there. What is written stays in memory
and lies over them: files on disk may be the user's own checkpoint and are never touched.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ModelError
from headwise.models.stored_weights import stored_weights


def held_tensor(root: nn.Module, name: str) -> Tensor:
    """A parameter by its dotted name, detached; of an offloaded one a copy where it would run."""
    parameter = _tensor(root, name).detach()
    if not parameter.is_meta:
        return parameter
    hook, inner = _offload(root, name)
    value: Tensor = hook.weights_map[inner]
    return value.detach().to(hook.execution_device)


def plain_parts(value: Tensor) -> list[Tensor]:
    """The tensors that a packed one (torchao's and its like) is made of; itself if it is plain."""
    if type(value) in (Tensor, nn.Parameter) or not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(value, name))]


def held_pieces(model: PreTrainedModel, name: str) -> Iterator[Tensor]:
    """A parameter in order, in pieces where it is stored in a file and need not be whole."""
    stored = stored_weights(model)
    if stored is None:
        yield held_tensor(model, name)
    else:
        yield from (piece for _, piece in stored.pieces(name))


def parameter_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """The model's parameters by name; tied ones once, though offloading unties them."""
    parameters = dict(model.named_parameters())
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    copies = {n for n, p in parameters.items() if p.is_meta and tied.get(n) in parameters}
    return {name: p.shape for name, p in parameters.items() if name not in copies}


def execution_device(root: nn.Module, name: str) -> torch.device:
    """Where a parameter is when its module runs."""
    parameter = _tensor(root, name)
    if not parameter.is_meta:
        return parameter.device
    return torch.device(_offload(root, name)[0].execution_device)


def writable_tensor(root: nn.Module, name: str) -> Tensor:
    """A parameter that keeps what is written to it; of an offloaded one its copy in memory."""
    parameter = _tensor(root, name).detach()
    if not parameter.is_meta:
        return parameter
    hook, inner = _offload(root, name)
    if not isinstance(hook.weights_map, ChainMap):
        hook.weights_map = ChainMap({}, hook.weights_map)
    written: Any = hook.weights_map.maps[0]
    if inner not in written:
        written[inner] = hook.weights_map[inner].detach().cpu().clone()
    tensor: Tensor = written[inner]
    return tensor


def _tensor(root: nn.Module, name: str) -> Tensor:
    owner, _, own = name.rpartition(".")
    tensor = getattr(root.get_submodule(owner), own)
    assert isinstance(tensor, Tensor)
    return tensor


def _offload(root: nn.Module, name: str) -> tuple[Any, str]:
    """The hook that loads a parameter, and its name there: on its module or one around it."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        hook: Any = vars(root.get_submodule(".".join(parts[:depth]))).get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):  # a SequentialHook holds several
            if getattr(part, "offload", False):
                return part, ".".join(parts[depth:])
    raise ModelError(
        "a weight has no numbers: it is on the meta device and no accelerate hook loads it",
        where=name,
        fix="load the model with its weights",
    )
