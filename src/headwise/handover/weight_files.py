"""Safetensors files rewritten tensor by tensor: what no patch touches keeps its bytes.

A tensor of the file is a model's parameter if its name is the parameter's, with or without the
name of the backbone in front (BLOOM's files leave out `transformer.`), and if it holds there what
the patch says; otherwise nothing is written and the caller saves the model another way.

Undoing gives back the same files. Where a patch holds less precision than the file (made in
bfloat16, merged into float32) or was forced onto another base, it does not have the bits it
replaces: these go into `REPLACED`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import (
    load_artefact,
    parse_json,
    save_artefact,
    to_json,
    write_atomically,
    write_text,
)
from headwise.models.offloading import held_tensor, parameter_shapes
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span
from headwise.models.tensor_files import (
    METADATA,
    TYPES,
    read_header,
    read_safetensors,
    weight_files,
    write_safetensors,
)
from headwise.values import from_plain

RECORD = "headwise_merge.json"
REPLACED = "headwise_merge.safetensors"  # patch.slice -> what stood there, in the file's precision
_SCHEMA = "headwise.merge/1"
_INDEX = "model.safetensors.index.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_NOT_COPIED = (RECORD, "source.json")  # the latter is of headwise's own GGUF cache
_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class MergeRecord:
    """What a merged directory was: patches inside it, and what widening changed."""

    patches: tuple[str, ...]  # hashes of their base slices, in order
    narrow: dict[str, Literal["F64", "F32", "F16", "BF16"]]  # tensor -> its type in the base
    files: dict[str, str]  # texts of the base that changed

    @staticmethod
    def of(folder: Path) -> MergeRecord:
        """The record of a merged directory, an empty one of any other."""
        path = folder / RECORD
        if not path.exists():
            return MergeRecord((), {}, {})
        return from_plain(MergeRecord, load_artefact(path, "merge"), path)

    def save(self, folder: Path) -> None:
        """Write `headwise_merge.json`; a directory without patches has none."""
        if self.patches:
            body = {"patches": self.patches, "narrow": self.narrow, "files": self.files}
            save_artefact(folder / RECORD, "merge", body)


def merge_files(
    base: Path, patches: Sequence[Patch], out: Path, *, undo: bool, force: bool = False
) -> bool:
    """Copy a model directory with patches merged or undone; False if its files do not fit."""
    shards = weight_files(base)
    record, replaced = MergeRecord.of(base), _replaced(base)
    changed = _changed_tensors(shards, patches, replaced, undo=undo, force=force)
    if changed is None:
        return False
    narrow: dict[str, Any] = {
        name: record.narrow.get(name, _NAMES[old.dtype]) for name, (old, _) in changed.items()
    }
    held = {name: _held(new, TYPES[narrow[name]]) for name, (_, new) in changed.items()}
    wide = {n: t for n, t in narrow.items() if TYPES[t] != held[n].dtype}
    kept = {n: t for n, t in record.narrow.items() if n not in changed}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(base.iterdir()):
        if path.suffix in _COPIED and path.name not in _NOT_COPIED and path.is_file():
            shutil.copyfile(path, out / path.name)
    for shard in shards:
        _write_shard(shard, held, out / shard.name)
    if replaced:
        write_safetensors(out / REPLACED, replaced, {"schema": _SCHEMA})
    hashes = [patch.base_fingerprint() for patch in patches]
    left = [name for name in record.patches if name not in hashes]
    texts = _write_texts(base, out, record, widest=_widest(held, {**kept, **wide}))
    merged = tuple(left) if undo else (*record.patches, *hashes)
    MergeRecord(merged, {**kept, **wide}, texts).save(out)
    return True


def _replaced(folder: Path) -> dict[str, Tensor]:
    path = folder / REPLACED
    return read_safetensors(path, _SCHEMA)[0] if path.exists() else {}


def replaced_slices(folder: Path, patches: Sequence[Patch]) -> dict[Span, Tensor]:
    """What patches replaced in a merged directory, where that is not what they say."""
    kept = _replaced(folder)
    parts = [
        (_identity(patch, name), part) for patch in patches for name, part in patch.slices.items()
    ]
    return {part.span: kept[identity] for identity, part in parts if identity in kept}


def _identity(patch: Patch, name: str) -> str:
    return f"{patch.base_fingerprint()}.{name}"


def holds(folder: Path, model: PreTrainedModel) -> bool:
    """Whether the files are this model as it is in memory, where it may have been changed."""
    names = _by_key(parameter_shapes(model))
    for shard in weight_files(folder):
        with safe_open(str(shard), framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                ours = held_tensor(model, names[key]).cpu()
                if not torch.equal(file.get_tensor(key).to(ours.dtype), ours):
                    return False
    return True


def carries(folder: Path, patch: Patch) -> bool:
    """Whether the safetensors of a model directory hold what a patch's slices became."""
    parts: dict[str, list[Slice]] = {}
    for part in patch.slices.values():
        parts.setdefault(part.span.parameter, []).append(part)
    names, seen = _by_key(parts), set()
    for shard in folder.glob("*.safetensors"):
        with safe_open(str(shard), framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                tensor = file.get_tensor(key)
                for part in parts[names[key]]:
                    if (
                        tensor.dim() <= part.span.axis
                        or tensor.shape[part.span.axis] < part.span.stop
                    ):
                        return False
                    if not torch.equal(part.span.within(tensor).to(part.after.dtype), part.after):
                        return False
                seen.add(names[key])
    return seen == set(parts)


def _by_key(names: Iterable[str]) -> dict[str, str]:
    """Parameters by what a file may call them: their name, with or without its first part."""
    names = list(names)
    return {name.partition(".")[2]: name for name in names} | {name: name for name in names}


def _held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In this precision if every value fits."""
    small = tensor.to(dtype)
    return small if torch.equal(small.to(tensor.dtype), tensor) else tensor


def _widest(held: Mapping[str, Tensor], wide: Mapping[str, str]) -> torch.dtype | None:
    """The precision that the widened tensors need; None if none is widened."""
    types = [tensor.dtype for name, tensor in held.items() if name in wide]
    return max(types, key=lambda d: d.itemsize) if types else (torch.float32 if wide else None)


def _write_texts(
    base: Path, out: Path, record: MergeRecord, widest: torch.dtype | None
) -> dict[str, str]:
    """Make config and index say what the weights are; returns what they said in the base."""
    original = {
        name: record.files.get(name, (base / name).read_text(encoding="utf-8"))
        for name in ("config.json", _INDEX)
        if (base / name).exists()
    }
    if widest is None:  # as the base was
        for name, text in original.items():
            write_text(out / name, text)
        return {}
    config = parse_json(original["config.json"], base / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    write_text(out / "config.json", to_json({**config, key: str(widest).removeprefix("torch.")}))
    if _INDEX in original:
        index = parse_json(original[_INDEX], base / _INDEX)
        headers = [read_header(path)[0] for path in weight_files(out)]
        ends = [e["data_offsets"] for h in headers for name, e in h.items() if name != METADATA]
        size = sum(stop - start for start, stop in ends)
        index["metadata"] = {**index.get("metadata", {}), "total_size": size}
        write_text(out / _INDEX, to_json(index))
    return original


def _changed_tensors(
    shards: Sequence[Path],
    patches: Sequence[Patch],
    replaced: dict[str, Tensor],
    *,
    undo: bool,
    force: bool,
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Tensors of the files before and after; None if one is not where or what it should be.

    `replaced` gains what the patches do not hold, and loses what is undone.
    """
    parts = [
        (_identity(patch, name), part) for patch in patches for name, part in patch.slices.items()
    ]
    parameters = {part.span.parameter for _, part in parts}
    names = _by_key(parameters)
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    places: dict[str, str] = {}
    for shard in shards:
        with safe_open(str(shard), framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                tensor = file.get_tensor(key)
                tensors[key], places[names[key]] = (tensor, tensor), key
    if set(places) != parameters:
        return None
    for identity, part in parts:
        key = places[part.span.parameter]
        original, current = tensors[key]
        new = None
        if original.dtype in _NAMES and current.shape[part.span.axis] >= part.span.stop:
            new = _exchanged(current, part, identity, replaced, undo=undo, force=force)
        if new is None:
            return None
        tensors[key] = original, new
    return tensors


def _exchanged(
    tensor: Tensor,
    part: Slice,
    identity: str,
    replaced: dict[str, Tensor],
    *,
    undo: bool,
    force: bool,
) -> Tensor | None:
    """The tensor with one slice exchanged, in the finer of two precisions; None if it misfits.

    With `force` other numbers may stand there than the patch was made of.
    """
    old, new = (part.after, part.before) if undo else (part.before, part.after)
    wide = tensor.to(torch.promote_types(tensor.dtype, new.dtype)).clone()
    place = part.span.within(wide)
    if place.shape != old.shape or wide.dtype not in (tensor.dtype, new.dtype):
        return None
    if undo and identity in replaced:
        if not torch.equal(place, old.to(place)):
            return None  # its bits were changed since
        place.copy_(replaced.pop(identity))
        return wide
    # a file that is finer than the patch holds the numbers that were rounded to make it
    finer, fits = wide.dtype != new.dtype, torch.equal(place.to(old.dtype), old)
    if (undo and (finer or not fits)) or not (fits or force):
        return None
    if finer or not fits:
        replaced[identity] = place.clone()
    place.copy_(new)
    return wide


def _write_shard(source: Path, held: Mapping[str, Tensor], target: Path) -> None:
    """The file with some tensors exchanged; order and metadata stay."""
    header, start = read_header(source)
    names = [name for name in header if name != METADATA]
    names.sort(key=lambda name: int(header[name]["data_offsets"][0]))
    ours = {name: held[name] for name in names if name in held}
    if not ours:
        shutil.copyfile(source, target)
        return
    spans = {name: header[name]["data_offsets"] for name in names}
    at = 0
    for name in names:
        length = spans[name][1] - spans[name][0]
        if name in ours:
            length = ours[name].numel() * ours[name].element_size()
            header[name] = {**header[name], "dtype": _NAMES[ours[name].dtype]}
        header[name] = {**header[name], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        with source.open("rb") as old:
            for name in names:
                old.seek(start + spans[name][0])
                kept = old.read(spans[name][1] - spans[name][0])
                file.write(_raw(ours[name]) if name in ours else kept)

    write_atomically(target, write)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
