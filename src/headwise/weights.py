"""Slices of a model's weights: where a head's numbers are, and the patch that changes them.

A `Span` is a range of rows or columns of one parameter and `Span.of` is a view of it, never a copy.
`Patch` holds slices with what they replaced; it is the unit of saving, undoing, merging and
counting, and the only thing in headwise that writes to a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor
from transformers import PreTrainedModel

from headwise.architectures import (
    Role,
    architecture_of,
    geometry_of,
    is_transposed,
    projection_name,
    projection_of,
)
from headwise.artefacts import content_hash, write_atomically
from headwise.errors import ArtefactError
from headwise.heads import Head

PATCH_SCHEMA = "headwise.patch/1"


@dataclass(frozen=True, order=True)
class Span:
    """Rows (axis 0) or columns (axis 1) [start, stop) of one parameter."""

    parameter: str
    axis: int
    start: int
    stop: int

    def of(self, model: PreTrainedModel) -> Tensor:
        """The slice itself, as a view of the model's tensor."""
        return self.within(model.get_parameter(self.parameter))

    def within(self, tensor: Tensor) -> Tensor:
        """The same slice of any tensor of the parameter's shape."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


def head_spans(model: PreTrainedModel, head: Head, role: Role) -> dict[str, Span]:
    """The named slices of one role of one head: the weight, and the bias where there is one.

    With grouped-query attention k and v belong to the head's group and are named after it.
    """
    owner = slice_owner(model, head, role)
    start = _offset(model, head, role)
    stop = start + geometry_of(model).head_dim
    module = projection_of(model, head.layer, role)
    prefix = projection_name(model, head.layer, role)
    transposed = is_transposed(module)
    if role == "o":
        return {f"{owner}.o": Span(f"{prefix}.weight", 0 if transposed else 1, start, stop)}
    spans = {f"{owner}.{role}": Span(f"{prefix}.weight", 1 if transposed else 0, start, stop)}
    if getattr(module, "bias", None) is not None:
        spans[f"{owner}.{role}_bias"] = Span(f"{prefix}.bias", 0, start, stop)
    return spans


def slice_owner(model: PreTrainedModel, head: Head, role: Role) -> str:
    """Who a slice belongs to: `L5H14`, or `L5KV3` for keys and values that a group shares."""
    group = geometry_of(model).group
    if role in ("k", "v") and group > 1:
        return f"L{head.layer}KV{head.index // group}"
    return str(head)


def output_bias_span(model: PreTrainedModel, layer: int) -> dict[str, Span]:
    """The whole output bias of a layer, or nothing where the family has none."""
    module = projection_of(model, layer, "o")
    bias = getattr(module, "bias", None)
    if bias is None:
        return {}
    name = f"{projection_name(model, layer, 'o')}.bias"
    return {f"L{layer}.o_bias": Span(name, 0, 0, int(bias.shape[0]))}


def _offset(model: PreTrainedModel, head: Head, role: Role) -> int:
    geometry = geometry_of(model)
    row = architecture_of(model)
    group, dim = geometry.group, geometry.head_dim
    kv = head.index // group
    if role == "o":
        return head.index * dim
    if row.order == "split":
        return (head.index if role == "q" else kv) * dim
    if row.order == "concat":
        blocks = {"q": head.index, "k": geometry.num_heads + kv}
        return blocks.get(role, geometry.num_heads + geometry.num_kv_heads + kv) * dim
    inside = {"q": head.index % group, "k": group, "v": group + 1}[role]
    return (kv * (group + 2) + inside) * dim


@dataclass(frozen=True)
class Slice:
    """One changed range of weights: where, what it was and what it became."""

    span: Span
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Patch:
    """Changed slices by name, with provenance."""

    slices: Mapping[str, Slice] = field(repr=False)
    info: Mapping[str, Any]  # base model id, plan, settings: JSON values only

    @property
    def num_weights(self) -> int:
        """How many numbers the patch changes."""
        return sum(part.after.numel() for part in self.slices.values())

    @property
    def dtype(self) -> str:
        """The precision of the model it was made from, e.g. `float32`."""
        part = next(iter(self.slices.values()))
        return str(part.before.dtype).removeprefix("torch.")

    def base_fingerprint(self) -> str:
        """A hash of what the slices were: the patch fits any model that has these bits there."""
        return slices_fingerprint({name: part.before for name, part in self.slices.items()})

    def apply(self, model: PreTrainedModel, *, force: bool = False) -> None:
        """Write the `after` values; refuses a base whose slices differ unless forced."""
        self._require(model, "before", "apply", any_bits=force)
        write_slices(model, {part.span: part.after for part in self.slices.values()})

    def undo(self, model: PreTrainedModel, *, force: bool = False) -> None:
        """Write the `before` values back; refuses a model that does not carry this patch."""
        self._require(model, "after", "undo", any_bits=force)
        write_slices(model, {part.span: part.before for part in self.slices.values()})

    def _require(self, model: PreTrainedModel, state: str, verb: str, *, any_bits: bool) -> None:
        """Check every slice before one is written; `any_bits` asks for the right shape only."""
        named = dict(model.named_parameters())
        for name, part in self.slices.items():
            fits = _fits(part, named.get(part.span.parameter))
            expected = getattr(part, state)
            if not fits or not (any_bits or _same_bits(part.span.of(model), expected)):
                raise ArtefactError(
                    f"cannot {verb} the patch: {name} is not what it should be "
                    f"({'other bits' if fits else 'no such weights'})",
                    where=f"patch made for {self.info.get('base_model', 'an unknown model')}",
                    fix="use the model the patch was made from" + (", or --force" if fits else ""),
                )

    def save(self, path: Path) -> Path:
        """Write `patch.safetensors` atomically."""
        tensors = {}
        for name, part in self.slices.items():
            tensors[f"{name}.after"] = part.after.contiguous()
            tensors[f"{name}.before"] = part.before.contiguous()
        spans = {
            name: [part.span.parameter, part.span.axis, part.span.start, part.span.stop]
            for name, part in self.slices.items()
        }
        metadata = {
            "schema": PATCH_SCHEMA,
            "spans": json.dumps(spans, sort_keys=True),
            "info": json.dumps(dict(self.info), sort_keys=True),
            "base_slices_sha256": self.base_fingerprint(),
        }
        return write_safetensors(path, tensors, metadata)

    @staticmethod
    def load(path: Path) -> Patch:
        """Read a patch file; a cut-off or foreign file is an `ArtefactError`."""
        path = Path(path)
        tensors, metadata = read_safetensors(path)
        if metadata.get("schema") != PATCH_SCHEMA:
            raise ArtefactError("not a headwise patch", where=path, fix=f"expected {PATCH_SCHEMA}")
        slices = {
            name: Slice(Span(*span), tensors[f"{name}.before"], tensors[f"{name}.after"])
            for name, span in json.loads(metadata["spans"]).items()
        }
        patch = Patch(slices, json.loads(metadata["info"]))
        if patch.base_fingerprint() != metadata.get("base_slices_sha256"):
            raise ArtefactError("the patch is damaged: its base slices do not match", where=path)
        return patch


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, atomically; the library writes metadata in random order, we do not."""
    raw = save_safetensors(dict(tensors))
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    if metadata:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data stays aligned

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(memoryview(raw)[8 + size :])

    return write_atomically(path, write)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of one safetensors file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ArtefactError(
            f"not a complete safetensors file ({error})", where=path, fix="write or copy it again"
        ) from None


def write_slices(model: PreTrainedModel, values: Mapping[Span, Tensor]) -> None:
    """Copy values into the model's own tensors, rounding to their type."""
    with torch.no_grad():
        for span, value in values.items():
            span.of(model).copy_(value)


def read_slices(model: PreTrainedModel, spans: Mapping[str, Span]) -> dict[str, Tensor]:
    """Copies of named slices as they are now."""
    return {name: span.of(model).detach().clone() for name, span in spans.items()}


def spans_of(model: PreTrainedModel, heads: Iterable[Head], roles: str = "qkvo") -> dict[str, Span]:
    """The named slices of several heads; shared slices appear once."""
    spans: dict[str, Span] = {}
    for head in heads:
        for role in roles:
            spans |= head_spans(model, head, role)  # type: ignore[arg-type]
    return spans


def slices_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of named tensors: names, types, shapes and bits."""
    parts: list[bytes | str] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        parts += [name, f"{tensor.dtype}{tuple(tensor.shape)}", _bytes(tensor)]
    return content_hash(parts)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _fits(part: Slice, tensor: Tensor | None) -> bool:
    if tensor is None or tensor.shape[part.span.axis] < part.span.stop:
        return False
    return part.span.within(tensor).shape == part.after.shape


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.detach().cpu(), right.detach().cpu())
