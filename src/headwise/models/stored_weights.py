"""Weights that stay in their safetensors files and are read when they are wanted, by name.

For models larger than memory: the model has its modules, its buffers and no weights; accelerate's
hooks bring those of a module while it runs. Files are read, not mapped, so that memory is what the
process asked for and nothing else. They are never written to: what a patch changes is kept in
memory, slice by slice, and laid over a weight whenever it is read.
"""

from __future__ import annotations

import json
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
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headwise.artefacts import is_there, read_json, require_regular
from headwise.errors import ModelError
from headwise.models.tensor_files import LARGEST_HEADER, require_length
from headwise.values import MOST

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


PIECE = 2**24  # numbers of a weight that are read at once where it need not be whole


_WEIGHTS = "model.safetensors"


_EMPTY = torch.empty


_STORED = "_headwise_stored"  # on the model itself


Place = tuple[int, int, int]  # axis, start and stop of a slice


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers from `start` to `stop`, as one row."""
        size = self.dtype.itemsize
        buffer = bytearray((stop - start) * size)
        with self.file.open("rb") as file:
            file.seek(self.offset + start * size)
            if file.readinto(buffer) != len(buffer):
                raise ModelError("the weight file is cut off", where=self.file, fix="copy it again")
        return torch.frombuffer(buffer, dtype=self.dtype) if buffer else torch.empty(0)

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StoredWeights(Mapping[str, Tensor]):
    """All weights of a model by their names in it, in one precision."""

    tensors: Mapping[str, StoredTensor] = field(repr=False)
    dtype: torch.dtype
    changes: dict[str, dict[Place, Tensor]] = field(default_factory=dict, repr=False)
    known: dict[str, str] = field(default_factory=dict, repr=False)  # what reading all has shown

    def __getitem__(self, name: str) -> Tensor:
        stored = self.tensors[name]
        found = stored.read(0, stored.numel).to(self.dtype).view(stored.shape)
        for (axis, start, stop), value in self.changes.get(name, {}).items():
            found.narrow(axis, start, stop - start).copy_(value)
        return found

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
        wanted, places = chosen.unique(return_inverse=True)
        width = stored.shape[1]
        found = torch.stack([stored.read(n * width, (n + 1) * width) for n in wanted.tolist()])
        return found.to(self.dtype)[places]

    @property
    def num_bytes(self) -> int:
        """On disk; what is tied lies there once."""
        places = {(one.file, one.offset): one for one in self.tensors.values()}
        return sum(one.numel * one.dtype.itemsize for one in places.values())


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all safetensors files of a model directory."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            found |= _tensors_of(path)
        except (SafetensorError, OSError, ValueError, LookupError) as error:
            raise ModelError(
                f"the weight file is damaged or cut off ({str(error)[:200]})",
                where=path,
                fix="download or copy the weights again",
            ) from None
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read; others may lie beside them."""
    if is_there(folder / _WEIGHTS):
        return [folder / _WEIGHTS]
    path = folder / f"{_WEIGHTS}.index.json"
    if not is_there(path):
        return sorted(folder.glob("*.safetensors"))
    names = read_json(path).get("weight_map")
    named = set(names.values()) if isinstance(names, dict) else set()
    if not named or not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise ModelError(
            "its index does not name weight files of this folder",
            where=path,
            fix="download or copy the model again; a shard lies beside its index",
        )
    return [folder / name for name in sorted(named)]


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    # Checks places, types and shapes of all tensors. For "pt" the file would be mapped twice,
    # which a process that is limited to less than two of its files cannot.
    with safe_open(str(path), framework="numpy"):
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, LARGEST_HEADER)))
    header.pop("__metadata__", None)
    require_length(header, 8 + size, path.stat().st_size)
    return {
        name: StoredTensor(
            path,
            8 + size + int(entry["data_offsets"][0]),
            _TYPES.get(entry["dtype"], torch.uint8),
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }


def stored_bytes(folder: Path) -> int:
    """The size of a model directory's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


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
            one = stored[name]
            buffer.copy_(one.read(0, one.numel).view(one.shape))
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
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = [name, name.removeprefix(prefix), prefix + name]
        source = tied.get(name, name)
        names += [source, source.removeprefix(prefix), prefix + source]
        place = next((one for one in names if one in stored), None)
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
        found[name] = stored[place]
    return found


def stored_weights(model: nn.Module) -> StoredWeights | None:
    """The weights of a streamed model; None for any other."""
    return vars(model).get(_STORED)


@contextmanager
def at_hand(model: PreTrainedModel, prefix: str) -> Iterator[dict[str, Tensor]]:
    """While open the weights of one module are in memory: its hooks read nothing."""
    weights = stored_weights(model)
    assert weights is not None
    found = {name: weights[name] for name in weights if name.startswith(f"{prefix}.")}
    hooked = [
        (f"{prefix}.{path}." if path else f"{prefix}.", vars(module)["_hf_hook"])
        for path, module in model.get_submodule(prefix).named_modules()
        if "_hf_hook" in vars(module)
    ]
    before = [hook.weights_map for _, hook in hooked]
    try:
        for start, hook in hooked:
            own = {n.removeprefix(start): t for n, t in found.items() if n.startswith(start)}
            hook.weights_map = ChainMap(own, hook.weights_map)
        yield found
    finally:
        for (_, hook), weights_map in zip(hooked, before, strict=True):
            hook.weights_map = weights_map


# --- before transformers is let at a folder: it builds what a config says, then reads weights -----

CONFIG = "config.json"
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_key_value_heads")
_COUNTS = (*_LAYERS, *_HEADS, "num_labels", "num_experts", "num_local_experts", "n_routed_experts")


def require_sound_folder(folder: Path) -> None:
    """Refuse a model directory with a pipe for a file, or a config of absurd counts."""
    for part in (folder, *folder.iterdir()):
        if is_there(part):
            require_regular(part)
    path = folder / CONFIG
    if not is_there(path):
        return  # an adapter, or nothing: transformers says which
    layers = 0
    for name, value in _counts(read_json(path)):
        if value > MOST:
            raise ModelError(
                f"its config has {name} {value:,}", where=path, fix="correct its config.json"
            )
        layers = max(layers, value if name in _LAYERS else 0)
    stored = len(stored_tensors(folder))
    if stored and layers > stored:
        raise ModelError(
            f"its config has {layers:,} layers, its weight files hold {stored:,} tensors",
            where=path,
            fix="use the config.json that belongs to these weights",
        )


def _counts(body: Mapping[str, object], depth: int = 0) -> Iterator[tuple[str, int]]:
    """The counts of a config and of the configs inside it."""
    for name, value in body.items():
        if name in _COUNTS and isinstance(value, int):
            yield name, value
        elif isinstance(value, Mapping) and depth < 3:
            yield from _counts(value, depth + 1)
