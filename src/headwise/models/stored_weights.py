"""Weights that stay in their safetensors files and are read when they are wanted, by name.

For models larger than memory: the model has its modules, its buffers and no weights; accelerate's
hooks bring those of a module while it runs. Files are read, not mapped, so that memory is what the
process asked for and nothing else. They are never written to: what a patch changes is kept in
memory, slice by slice, and laid over a weight whenever it is read.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headwise.errors import ModelError
from headwise.models.tensor_files import StoredTensor, stored_tensors

PIECE = 2**24  # numbers of a weight that are read at once where it need not be whole
_EMPTY = torch.empty
_STORED = "_headwise_stored"  # on the model itself
Place = tuple[int, int, int]  # axis, start and stop of a slice


@dataclass(frozen=True)
class StoredWeights(Mapping[str, Tensor]):
    """All weights of a model by their names in it, in one precision."""

    tensors: Mapping[str, StoredTensor] = field(repr=False)
    dtype: torch.dtype
    changes: dict[str, dict[Place, Tensor]] = field(default_factory=dict, repr=False)
    known: dict[str, str] = field(default_factory=dict, repr=False)  # what reading all has shown

    def __getitem__(self, name: str) -> Tensor:
        stored = self.tensors[name]
        tensor = stored.read(0, stored.numel).to(self.dtype).view(stored.shape)
        for (axis, start, stop), value in self.changes.get(name, {}).items():
            tensor.narrow(axis, start, stop - start).copy_(value)
        return tensor

    def change(self, name: str, place: Place, value: Tensor) -> None:
        """From now on a slice has other numbers; its file stays as it is."""
        changed = self.changes.setdefault(name, {})
        changed.pop(place, None)  # the last one written lies on top
        changed[place] = value.detach().cpu().to(self.dtype, copy=True)
        self.known.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A weight in order, whole rows at a time, each with the number of its first row."""
        stored = self.tensors[name]
        width = stored.numel // stored.shape[0] if stored.shape else 1
        rows = max(1, PIECE // max(width, 1))
        if name in self.changes:
            yield from ((n * rows, part) for n, part in enumerate(self[name].split(rows)))
            return
        for start in range(0, stored.shape[0] if stored.shape else 1, rows):
            stop = min(start + rows, stored.shape[0] if stored.shape else 1)
            piece = stored.read(start * width, stop * width).to(self.dtype)
            yield start, piece.view(stop - start, *stored.shape[1:])

    def rows(self, name: str, chosen: Int[Tensor, "..."]) -> Float[Tensor, "... width"]:
        """Some rows of a matrix; each of them is read once."""
        stored = self.tensors[name]
        distinct, places = chosen.unique(return_inverse=True)
        width = stored.shape[1]
        rows = torch.stack([stored.read(n * width, (n + 1) * width) for n in distinct.tolist()])
        return rows.to(self.dtype)[places]

    @property
    def num_bytes(self) -> int:
        """On disk; what is tied lies there once."""
        distinct = {(t.file, t.offset): t for t in self.tensors.values()}
        return sum(tensor.numel * tensor.dtype.itemsize for tensor in distinct.values())


class _NoMemory(TorchFunctionMode):
    """While open what modules make for their weights takes no memory, not even for a moment.

    accelerate lets each weight be made and then throws it away: an embedding larger than what the
    process may have would end it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _EMPTY and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def empty_model(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The model of a directory with hooks that read each module's weights when it runs."""
    config = AutoConfig.from_pretrained(folder, **options)
    with init_empty_weights(), _NoMemory():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    stored = stored_tensors(folder)
    weights = StoredWeights(_by_name(model, stored, folder), dtype)
    for name, buffer in model.named_buffers():
        if name in stored:
            tensor = stored[name]
            buffer.copy_(tensor.read(0, tensor.numel).view(tensor.shape))
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    vars(model)[_STORED] = weights
    model.config._name_or_path = str(folder)
    model.eval()
    return model


def _by_name(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """Stored tensors by the model's names: some files have the base model's prefix, some do not."""
    prefix = f"{model.base_model_prefix}."
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    by_name = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = [name, name.removeprefix(prefix), prefix + name]
        source = tied.get(name, name)
        names += [source, source.removeprefix(prefix), prefix + source]
        place = next((known for known in names if known in stored), None)
        if place is None or stored[place].shape != tuple(parameter.shape):
            raise ModelError(
                f"this checkpoint cannot be streamed: it has no tensor that is {name}",
                where=folder,
                fix="load it whole (without --stream), on a machine with memory for it",
            )
        if not stored[place].dtype.is_floating_point:
            raise ModelError(
                f"this checkpoint cannot be streamed: {name} is stored quantised, or as whole "
                "numbers",
                where=folder,
                fix="stream a checkpoint in float32, bfloat16 or float16 of the same model",
            )
        by_name[name] = stored[place]
    return by_name


def stored_weights(model: nn.Module) -> StoredWeights | None:
    """The weights of a streamed model; None for any other."""
    return vars(model).get(_STORED)


@contextmanager
def at_hand(model: PreTrainedModel, prefix: str) -> Iterator[dict[str, Tensor]]:
    """While open the weights of one module are in memory: its hooks read nothing."""
    weights = stored_weights(model)
    assert weights is not None
    tensors = {name: weights[name] for name in weights if name.startswith(f"{prefix}.")}
    hooked = [
        (f"{prefix}.{path}." if path else f"{prefix}.", vars(module)["_hf_hook"])
        for path, module in model.get_submodule(prefix).named_modules()
        if "_hf_hook" in vars(module)
    ]
    before = [hook.weights_map for _, hook in hooked]
    try:
        for start, hook in hooked:
            own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            hook.weights_map = ChainMap(own, hook.weights_map)
        yield tensors
    finally:
        for (_, hook), weights_map in zip(hooked, before, strict=True):
            hook.weights_map = weights_map
