"""A patch handed to llama.cpp: the base's GGUF file with the patch inside, or a LoRA beside it.

A patched file is the base's bytes with other numbers in the quantisation blocks that the patch
touches. Everything else is copied, and compared once more when the file is written. Blocks keep
their type where gguf-py can quantise to it; a K-quant becomes Q8_0, and the tensor table says so.

llama.cpp orders some tensors in another way than transformers (rotary halves, fused projections).
Which number went where is not written down again here: transformers' own reader is given a tensor
that holds its own indices, and where they come out is the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from jaxtyping import Float32, Int64
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from headwise.artefacts import write_atomically
from headwise.errors import HeadwiseError, ModelError
from headwise.handover.adapter import Exported, factors_of
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch

_FALLBACK = Type.Q8_0  # for types that gguf-py reads and cannot write


def export_gguf(
    loaded: LoadedModel, patch: Patch, out: Path | str, *, force: bool = False
) -> Exported:
    """Write the base's GGUF file with the patch inside; every byte outside it is the base's."""
    source, out = _source(loaded), Path(out)
    _require_change(patch)
    with patch.applied(loaded.model, force=force):
        pass  # refuses another base
    base = _Base(source, loaded.model)
    blocks = {name: base.patched(name, places) for name, places in base.by_tensor(patch).items()}
    header, order = base.header(blocks)

    def write(file: Any) -> None:
        file.write(header)
        with source.open("rb") as old:
            for tensor in order:
                file.write(b"\0" * (-file.tell() % base.reader.alignment))
                if tensor.name in blocks:
                    file.write(blocks[tensor.name].data.tobytes())
                else:
                    old.seek(int(tensor.data_offset))
                    file.write(old.read(int(tensor.n_bytes)))

    write_atomically(out, write)
    _require_same_elsewhere(base, out, blocks)
    stored, total = (
        {n: one.tensor_type.name for n, one in sorted(blocks.items())},
        out.stat().st_size,
    )
    retyped = [
        f"\n{name} was {old}, which gguf-py cannot write, and is {new} now"
        for name, new in stored.items()
        if (old := base.tensors[name].tensor_type.name) != new
    ]
    return Exported(
        out,
        stored,
        base.rounding,
        f"{len(blocks)} tensors patched, {base.changed:,} of {total:,} bytes; patched values are "
        f"rounded by {base.rounding:.1%} of their tensor's largest at most; every other byte is "
        f"the base's{''.join(retyped)}",
    )


def export_lora_gguf(
    loaded: LoadedModel, patch: Patch, out: Path | str, *, force: bool = False
) -> Exported:
    """Write a patch of low rank as a LoRA that llama.cpp adds to the base's GGUF file."""
    source, out = _source(loaded), Path(out)
    _require_change(patch)
    with patch.applied(loaded.model, force=force):
        factors = factors_of(loaded.model, patch)
    high = [one.module for one in factors if not one.is_low or one.bias is not None]
    if high:
        raise HeadwiseError(
            "llama.cpp takes low-rank changes of weights only",
            where=high[0],
            fix="write the whole file: `headwise export PATCH --gguf FILE`",
        )
    base = _Base(source, loaded.model)
    writer = gguf.GGUFWriter(str(out), base.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    names = {}
    for one in factors:
        name = base.name_of(f"{one.module}.weight")
        rows = _row_order(base.order(name))
        if rows is None:
            raise HeadwiseError(
                "llama.cpp stores this projection in another order than by rows",
                where=name,
                fix="write the whole file: `headwise export PATCH --gguf FILE`",
            )
        b = np.empty(one.b.shape, np.float32)
        b[rows] = one.b.float().numpy()
        writer.add_tensor(f"{name}.lora_a", one.a.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", b)
        names[name] = Type.F32.name
    # llama.cpp scales by alpha / rank of each pair: 0 means that it does not scale at all
    writer.add_float32("adapter.lora.alpha", 0.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    size = out.stat().st_size
    summary = f"a LoRA of {len(names)} tensors in float32, {size:,} bytes"
    return Exported(out, names, 0.0, summary)


class _Base:
    """A GGUF file, and where transformers takes each of a model's numbers from in it."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self.path, self.reader = path, gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self.reader.fields["general.architecture"].contents())
        kind = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)
        self.processor = kind(config=load_gguf_checkpoint(str(path))["config"])
        self.changed, self.rounding = 0, 0.0  # bytes that were patched, and the worst error of it
        self.names = get_gguf_hf_weights_map(model, self.processor)

    def name_of(self, parameter: str) -> str:
        """The tensor that a parameter is read from."""
        names = [ours for ours, theirs in self.names.items() if theirs == parameter]
        if len(names) != 1 or names[0] not in self.tensors:
            raise ModelError(
                f"no tensor of the file holds {parameter} alone",
                where=self.path,
                fix="merge the patch into a model directory: `headwise apply`",
            )
        return str(names[0])

    def order(self, name: str) -> Int64[np.ndarray, "..."]:
        """For every number of the parameter, its place in the tensor (row-major)."""
        shape = tuple(int(n) for n in reversed(self.tensors[name].shape))
        places = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        order = np.asarray(self.processor.process(weights=places, name=name).weights)
        if not np.array_equal(np.sort(order, axis=None), places.ravel()):
            raise ModelError(
                f"{name} is not stored number by number",
                where=self.path,
                fix="merge the patch into a model directory: `headwise apply`",
            )
        return order.astype(np.int64)

    def by_tensor(self, patch: Patch) -> dict[str, list[tuple[np.ndarray, torch.Tensor]]]:
        """Each changed tensor with (places, values) of the slices that change it."""
        changes: dict[str, list[tuple[np.ndarray, torch.Tensor]]] = {}
        for part in patch.without_unchanged().slices.values():
            name = self.name_of(part.span.parameter)
            places = part.span.within(torch.from_numpy(self.order(name))).numpy()
            changes.setdefault(name, []).append((places, part.after))
        return changes

    def patched(
        self, name: str, changes: Sequence[tuple[np.ndarray, torch.Tensor]]
    ) -> gguf.ReaderTensor:
        """The tensor with other values at some places, quantised again where they changed."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted: Float32[np.ndarray, "..."] = np.array(values, np.float32)
        touched = np.zeros(wanted.size, bool)
        for places, after in changes:
            wanted.reshape(-1)[places.ravel()] = after.float().numpy().ravel()
            touched[places.ravel()] = True
        kind, raw = _quantised(wanted, tensor.tensor_type)
        if kind == tensor.tensor_type:  # untouched blocks keep their very bytes
            numbers, size = gguf.GGML_QUANT_SIZES[kind]
            blocks: np.ndarray = np.any(touched.reshape(-1, numbers), axis=1)
            old = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, size)
            raw = np.where(blocks[:, None], raw.view(np.uint8).reshape(-1, size), old)
            changed = int(blocks.sum()) * size
        else:
            changed = raw.nbytes
        again = gguf.quants.dequantize(raw.view(np.uint8).reshape(_byte_shape(wanted, kind)), kind)
        error = np.abs(again.reshape(-1)[touched] - wanted.reshape(-1)[touched]).max()
        largest = float(np.abs(wanted).max()) or 1.0
        self.changed, self.rounding = (
            self.changed + changed,
            max(self.rounding, float(error) / largest),
        )
        return tensor._replace(tensor_type=kind, n_bytes=raw.nbytes, data=raw)

    def header(self, blocks: Mapping[str, gguf.ReaderTensor]) -> tuple[bytes, list[Any]]:
        """All before the data, with the types and offsets of the new file; tensors in order."""
        order = sorted(self.reader.tensors, key=lambda tensor: int(tensor.data_offset))
        with self.path.open("rb") as file:
            header = bytearray(file.read(self.reader.data_offset))
        at = 0
        for tensor in order:
            at += -at % self.reader.alignment
            new = blocks.get(tensor.name, tensor)
            # the table's entry: length and text of the name, dimensions, then these two
            start = tensor.field.offset + sum(part.nbytes for part in tensor.field.parts[:-2])
            header[start : start + 4] = int(new.tensor_type).to_bytes(4, "little")
            header[start + 4 : start + 12] = at.to_bytes(8, "little")
            at += int(new.n_bytes)
        return bytes(header), order


def _quantised(values: Float32[np.ndarray, "..."], kind: Type) -> tuple[Type, np.ndarray]:
    """The values in this type, or in the fallback where gguf-py cannot write it."""
    try:
        return kind, np.ascontiguousarray(gguf.quants.quantize(values, kind))
    except NotImplementedError:
        return _FALLBACK, np.ascontiguousarray(gguf.quants.quantize(values, _FALLBACK))


def _byte_shape(values: np.ndarray, kind: Type) -> tuple[int, ...]:
    return tuple(gguf.quant_shape_to_byte_shape(values.shape, kind))


def _row_order(order: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "row"] | None:
    """Where each row of the parameter stands in the tensor; None if rows are not kept whole."""
    rows, columns = order.shape[0], int(np.prod(order.shape[1:]))
    starts = order.reshape(rows, columns)[:, 0]
    whole = starts[:, None] + np.arange(columns)
    if (starts % columns).any() or not np.array_equal(order.reshape(rows, columns), whole):
        return None
    found: Int64[np.ndarray, "row"] = starts // columns
    return found


def _source(loaded: LoadedModel) -> Path:
    path = Path(loaded.id)
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelError(
            "a GGUF file can be patched only if the base is one",
            where=loaded.id,
            fix="pass --model BASE.gguf, the file that the patch was made on",
        )
    return path


def _require_change(patch: Patch) -> None:
    if patch.without_unchanged().is_empty:
        raise HeadwiseError("the patch changes nothing", fix="the base file is as good without it")


def _require_same_elsewhere(
    base: _Base, out: Path, blocks: Mapping[str, gguf.ReaderTensor]
) -> None:
    """Raise unless metadata and every tensor outside the patch have the base's bytes."""
    new = gguf.GGUFReader(out)
    written = {tensor.name: tensor for tensor in new.tensors}
    differing = [
        name
        for name, tensor in base.tensors.items()
        if name not in blocks
        and (
            written[name].tensor_type != tensor.tensor_type
            or not np.array_equal(written[name].data, tensor.data)
        )
    ]
    keys = [
        key
        for key, field in base.reader.fields.items()
        if [p.tobytes() for p in field.parts] != [p.tobytes() for p in new.fields[key].parts]
    ]
    if differing or keys:
        out.unlink()
        raise HeadwiseError(
            "the written file differs outside the patch, and was removed",
            where=(differing + keys)[0],
            fix="report this with the base's name; `headwise apply` writes a model directory",
        )
