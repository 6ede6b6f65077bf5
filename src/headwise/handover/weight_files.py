"""Safetensors files rewritten tensor by tensor: what no patch touches keeps its bytes.

A tensor of the file is a model's parameter if its name is the parameter's, with or without the
name of the backbone in front (BLOOM's files leave out `transformer.`), and if it holds there what
the patch says; otherwise nothing is written and the caller saves the model another way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import (
    load_artefact,
    save_artefact,
    to_json,
    write_atomically,
    write_text,
)
from headwise.models.offloading import held_tensor, parameter_shapes
from headwise.models.patch import Patch, Slice

RECORD = "headwise_merge.json"
_INDEX = "model.safetensors.index.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_NOT_COPIED = (RECORD, "source.json")  # the latter is of headwise's own GGUF cache
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class MergeRecord:
    """What a merged directory was: patches inside it, and what widening changed."""

    patches: tuple[str, ...] = ()  # hashes of their base slices, in order
    narrow: Mapping[str, str] = field(default_factory=dict)  # tensor -> its type in the base
    files: Mapping[str, str] = field(default_factory=dict)  # texts of the base that changed

    @staticmethod
    def of(folder: Path) -> MergeRecord:
        """The record of a merged directory, an empty one of any other."""
        path = folder / RECORD
        if not path.exists():
            return MergeRecord()
        body = load_artefact(path, "merge")
        return MergeRecord(tuple(body["patches"]), body["narrow"], body["files"])

    def save(self, folder: Path) -> None:
        """Write `headwise_merge.json`; a directory without patches has none."""
        if self.patches:
            body = {"patches": self.patches, "narrow": self.narrow, "files": self.files}
            save_artefact(folder / RECORD, "merge", body)


def merge_files(base: Path, patches: Sequence[Patch], out: Path, *, undo: bool) -> bool:
    """Copy a model directory with patches merged or undone; False if its files do not fit."""
    shards = sorted(base.glob("*.safetensors"))
    record = MergeRecord.of(base)
    changed = _changed_tensors(shards, patches, undo)
    if changed is None:
        return False
    narrow = {
        name: record.narrow.get(name, _NAMES[old.dtype]) for name, (old, _) in changed.items()
    }
    held = {name: _held(new, _TYPES[narrow[name]]) for name, (_, new) in changed.items()}
    wide = {n: t for n, t in narrow.items() if _TYPES[t] != held[n].dtype}
    kept = {n: t for n, t in record.narrow.items() if n not in changed}
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(base.iterdir()):
        if path.suffix in _COPIED and path.name not in _NOT_COPIED and path.is_file():
            shutil.copyfile(path, out / path.name)
    for shard in shards:
        _write_shard(shard, held, out / shard.name)
    hashes = _hashes(record.patches, patches, undo)
    texts = _told(base, out, record, widest=_widest(held, {**kept, **wide}))
    MergeRecord(hashes, {**kept, **wide}, texts).save(out)
    return True


def holds(folder: Path, model: PreTrainedModel) -> bool:
    """Whether the files are this model as it is in memory, where it may have been changed."""
    names = _by_key(parameter_shapes(model))
    for shard in folder.glob("*.safetensors"):
        with safe_open(str(shard), framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                ours = held_tensor(model, names[key]).cpu()
                if not torch.equal(file.get_tensor(key).to(ours.dtype), ours):
                    return False
    return True


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
    found = [tensor.dtype for name, tensor in held.items() if name in wide]
    return max(found, key=lambda d: d.itemsize) if found else (torch.float32 if wide else None)


def _hashes(before: Sequence[str], patches: Sequence[Patch], undo: bool) -> tuple[str, ...]:
    names = [patch.base_fingerprint() for patch in patches]
    if not undo:
        return (*before, *names)
    return tuple(name for name in before if name not in names)


def _told(base: Path, out: Path, record: MergeRecord, widest: torch.dtype | None) -> dict[str, str]:
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
    config = json.loads(original["config.json"])
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    write_text(out / "config.json", to_json({**config, key: str(widest).removeprefix("torch.")}))
    if _INDEX in original:
        index = json.loads(original[_INDEX])
        size = sum(end - start for p in out.glob("*.safetensors") for start, end in _spans(p))
        index["metadata"] = {**index.get("metadata", {}), "total_size": size}
        write_text(out / _INDEX, to_json(index))
    return original


def _spans(path: Path) -> Iterator[tuple[int, int]]:
    header, _ = _header(path)
    for name, entry in header.items():
        if name != "__metadata__":
            yield entry["data_offsets"][0], entry["data_offsets"][1]


def _changed_tensors(
    shards: Sequence[Path], patches: Sequence[Patch], undo: bool
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Tensors of the files before and after; None if one is not where or what it should be."""
    parts = [part for patch in patches for part in patch.slices.values()]
    wanted = {part.span.parameter for part in parts}
    names = _by_key(wanted)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    places: dict[str, str] = {}
    for shard in shards:
        with safe_open(str(shard), framework="pt") as file:
            for key in names.keys() & set(file.keys()):
                tensor = file.get_tensor(key)
                found[key], places[names[key]] = (tensor, tensor), key
    if set(places) != wanted:
        return None
    for part in parts:
        key = places[part.span.parameter]
        new = _written(found[key][1], part, undo)
        if new is None or found[key][0].dtype not in _NAMES:
            return None
        found[key] = found[key][0], new
    return found


def _written(tensor: Tensor, part: Slice, undo: bool) -> Tensor | None:
    """The tensor with one slice changed, in the patch's precision; None if it does not fit."""
    old, new = (part.after, part.before) if undo else (part.before, part.after)
    wide = tensor.to(torch.promote_types(tensor.dtype, new.dtype))
    if wide.shape[part.span.axis] < part.span.stop or wide.dtype != new.dtype:
        return None  # the file is finer than the patch: undoing could not give its bits back
    wide = wide.clone()
    place = part.span.within(wide)
    if place.shape != old.shape or not torch.equal(place, old.to(place)):
        return None
    place.copy_(new)
    return wide


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and where its data begins."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def _write_shard(source: Path, held: Mapping[str, Tensor], target: Path) -> None:
    """The file with some tensors exchanged; order and metadata stay."""
    header, start = _header(source)
    names = [name for name in header if name != "__metadata__"]
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
