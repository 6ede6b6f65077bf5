"""Capture queries and keys from any model through the tap, as Parquet in the `sniffed-qk` layout.

Vectors are what the scores are made of: after query/key norms and after RoPE (before it on
request), unscaled, so that q.k * scale (+ the ALiBi bias, which is no part of the vectors) are the
model's own logits. Texts go in portions; each is flushed to disk before the next begins, so
memory is bounded and a killed capture goes on where it stopped.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.artefacts import sweep, versions, write_text
from headwise.errors import ArtefactError, SelectionError
from headwise.forward.guard import guard
from headwise.forward.tap import Sight, tapped
from headwise.heads import Head, all_heads
from headwise.integrity.checksums import file_checksum
from headwise.integrity.locks import one_writer
from headwise.models.architectures import (
    architecture_of,
    attention_of,
    backbone_of,
    device_of,
    geometry_of,
    positions_of,
    projection_of,
)
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.tensor_files import write_safetensors
from headwise.plasticity.buckets import Buckets
from headwise.plasticity.capture_info import FILE, CaptureInfo, CaptureSettings
from headwise.plasticity.writer import (
    DATA,
    DONE,
    assemble,
    is_whole,
    require_whole,
    staged_file,
    vector_bytes,
)
from headwise.progress import Budget, Progress, Work, silent, told, unlimited
from headwise.ranks import by_the_first, each_writes, shared_out
from headwise.texts.batches import batches, encode_for, token_count
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.values import to_plain

STAGING = ".staging"


_PORTION_TEXTS = 8


Kind = Literal["q", "k"]


@dataclass(frozen=True)
class Captured:
    """What a capture wrote."""

    folder: Path
    rows: dict[str, int] = field(repr=False)  # `l00h00q` -> rows
    note: str = ""


@takes_model
def capture(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    patches: Sequence[Patch | Path] = (),
    heads: Sequence[Head] | None = None,
    settings: CaptureSettings | None = None,
    batch_size: int = 4,
    resume: bool = False,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> Captured:
    """Capture the chosen query heads (default all) and the key heads they use.

    `patches` are on the model while it runs, and off it afterwards. `budget` hears how much work it
    is, before it starts.
    """
    read = [Patch.load(patch) if isinstance(patch, Path) else patch for patch in patches]
    found, how = as_text_set(texts, loaded.id), settings or CaptureSettings()
    loaded = loaded.starting_with(how.bos)
    for patch in read:
        loaded = loaded.inheriting(patch.info.bos, "the patch")
    how = replace(how, bos=loaded.bos, max_length=loaded.length(how.max_length))
    tokens = token_count(loaded, found.texts, how.max_length)
    less = "--texts, --max-length, --layers"
    size = vector_bytes(tokens, heads, geometry_of(loaded.model))
    budget(loaded.model, Work(tokens, batch_size * how.max_length, written=size, less=less))
    with one_writer(Path(out)), applied(loaded.model, read):
        return _capture_as_it_is(loaded, found, Path(out), heads, how, batch_size, resume, progress)


def _capture_as_it_is(
    loaded: LoadedModel,
    texts: TextSet,
    out: Path,
    heads: Sequence[Head] | None,
    settings: CaptureSettings,
    batch_size: int,
    resume: bool,
    progress: Progress,
) -> Captured:
    model = loaded.model
    geometry = geometry_of(model)
    every = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
    chosen = sorted(every if heads is None else heads)
    if not chosen:
        raise SelectionError("no head is chosen", fix="choose other --layers or --heads")
    encoded = encode_for(loaded, texts.texts, max_length=settings.max_length)
    folder = out if settings.layout == "new" else out / re.sub(r"\W", "_", loaded.id)
    info = _describe(loaded, texts, settings, chosen)
    finished = by_the_first(lambda: _finished(folder, info, resume))
    if finished is not None:
        return finished
    guard(model, max(map(len, encoded)))
    staging = by_the_first(lambda: _prepare(folder, info))  # its sweep must not meet a writer
    portions = list(range(0, len(encoded), _PORTION_TEXTS))

    def portion(start: int) -> None:
        path = staging / f"portion-{start:06d}"
        if not is_whole(path):
            part = encoded[start : start + _PORTION_TEXTS]
            with each_writes():
                _capture_portion(model, part, start, path, chosen, settings, batch_size)

    for _ in told(shared_out(portion, portions), len(portions), "capturing", progress):
        pass
    rows = by_the_first(lambda: _assemble(model, staging, folder, chosen, info))
    return Captured(folder, rows, info.note)


def _assemble(
    model: PreTrainedModel, staging: Path, folder: Path, heads: list[Head], info: CaptureInfo
) -> dict[str, int]:
    """One file per head from all portions, and what is told about them."""
    groups = {layer: geometry_of(model, layer).group for layer in geometry_of(model).layers}
    buckets = Buckets.parse(info.settings.buckets)
    rows = assemble(staging, folder, heads, groups, _windows(model), buckets)
    checksums = {name: file_checksum(folder / name / DATA) for name in rows}
    write_text(folder / "README.md", _readme(info))
    replace(info, rows=rows, checksums=checksums, finished=True).save(folder)
    shutil.rmtree(staging)
    return rows


def _describe(
    loaded: LoadedModel, texts: TextSet, settings: CaptureSettings, heads: list[Head]
) -> CaptureInfo:
    model, geometry = loaded.model, geometry_of(loaded.model)
    every = len(heads) == geometry.num_layers * geometry.num_heads
    note = ""
    if positions_of(model) == "alibi":
        note = (
            "ALiBi adds a bias on keys that is no part of these vectors: plasticity here speaks of "
            "content only; pairs of keys d apart differ by slope * d in their logits besides"
        )
    return CaptureInfo(
        model=loaded.describe(),
        texts=texts.describe(),
        settings=settings,
        heads=tuple(str(head) for head in heads),
        capture_point=_capture_point(positions_of(model), settings.pre_rope),
        note=note,
        versions=versions(),
        head_sampling=None if every else "selection",
    )


def _capture_point(positions: str, pre_rope: bool) -> str:
    if positions != "rope":
        return f"as scored ({positions} positions: nothing is rotated)"
    return "before RoPE" if pre_rope else "as scored (after RoPE)"


def _finished(folder: Path, info: CaptureInfo, resume: bool) -> Captured | None:
    """A finished capture with these settings, if that is what is here; others are refused."""
    if not (folder / FILE).exists():
        return None
    before = CaptureInfo.load(folder)
    same = before.same_work(info)
    if not resume or not same:
        raise ArtefactError(
            "there is a capture here already" + ("" if same else ", with other settings"),
            where=folder,
            fix="add --resume to go on with the same settings, or choose another --out",
        )
    if not before.finished:
        return None
    require_whole(folder, before)
    shutil.rmtree(folder / STAGING, ignore_errors=True)  # a kill may have come just before this
    return Captured(folder, before.rows, info.note)


def _prepare(folder: Path, info: CaptureInfo) -> Path:
    """The staging folder, new or continued."""
    info.save(folder)
    staging = folder / STAGING
    staging.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    return staging


def _capture_portion(
    model: PreTrainedModel,
    encoded: list[list[int]],
    first: int,
    path: Path,
    heads: list[Head],
    settings: CaptureSettings,
    batch_size: int,
) -> None:
    """Run one portion of texts and put the kept vectors of each layer and kind on disk."""
    layers = sorted({head.layer for head in heads})
    found: dict[tuple[int, Kind], list[tuple[int, np.ndarray, np.ndarray]]] = {}
    for batch in batches(encoded, batch_size):
        for layer, q, k in _vectors(model, batch.ids, layers, settings.pre_rope):
            for kind, vectors in (("q", q), ("k", k)):
                for row, text in enumerate(batch.index):
                    length = int(batch.lengths[row])
                    keep = _kept(length, first + text, layer, kind, settings)  # type: ignore[arg-type]
                    position = np.flatnonzero(keep)
                    value = vectors[row, :, torch.from_numpy(position)].float().cpu().numpy()
                    found.setdefault((layer, kind), []).append((first + text, position, value))  # type: ignore[arg-type]
    for (layer, kind), parts in found.items():
        parts.sort(key=lambda part: part[0])
        example = np.concatenate([np.full(len(p), e) for e, p, _ in parts])
        position = np.concatenate([p for _, p, _ in parts])
        stacked = np.concatenate([v for _, _, v in parts], axis=1)  # (head, row, dim)
        arrays = {"example": example, "position": position, "vectors": stacked}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        write_safetensors(staged_file(path, layer, kind), tensors)
    write_text(path / DONE, "\n".join(sorted(file.name for file in path.glob("*.safetensors"))))


def _kept(
    length: int, example: int, layer: int, kind: Kind, settings: CaptureSettings
) -> Bool[np.ndarray, "row"]:
    """Which positions are kept: one mask for all heads of a layer and kind, by seed."""
    buckets = Buckets.parse(settings.buckets)
    share = buckets.keep_probability(buckets.of(np.arange(length)), settings.base_rate)
    generator = np.random.default_rng([settings.seed, example, layer, "qk".index(kind)])
    return generator.random(length) < share


def _vectors(
    model: PreTrainedModel, ids: Tensor, layers: list[int], pre_rope: bool
) -> list[tuple[int, Tensor, Tensor]]:
    """(layer, q, k) of one batch, (text, head, position, dim), post- or pre-position."""
    seen: list[tuple[int, Tensor, Tensor]] = []

    def read(sight: Sight) -> None:
        if sight.layer in layers:
            seen.append((sight.layer, sight.scores.q, sight.scores.k))

    device = device_of(model)
    with torch.inference_mode(), tapped(model, read):
        if not pre_rope or positions_of(model) != "rope":
            backbone_of(model)(input_ids=ids.to(device), use_cache=False)
            return seen
        _require_unrotated(model)
        # One more token, which no earlier one sees, if positions could be taken for heads
        geometry, length = geometry_of(model), ids.shape[1]
        extra = length in (geometry.num_heads, geometry.num_kv_heads)
        padded = torch.nn.functional.pad(ids, (0, int(extra)))
        with _before_rotation(model, layers) as unrotated:
            backbone_of(model)(input_ids=padded.to(device), use_cache=False)
    cut = {n: (q[:, :, :length], k[:, :, :length]) for n, (q, k) in unrotated.items()}
    return [(n, cut[n][0], cut[n][1]) for n in layers]


@contextmanager
def _before_rotation(
    model: PreTrainedModel, layers: list[int]
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Queries and keys after projection and norm, before RoPE."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    parts: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}

    def hook(layer: int, role: str) -> Any:
        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            parts[layer][role] = output.detach()
            if {"q", "k"} <= set(parts[layer]) or "qkv" in parts[layer]:
                found[layer] = _split(model, layer, parts[layer])

        return keep

    handles = []
    for layer in layers:
        module = attention_of(model, layer)
        fused = len(architecture_of(model).projections) == 1
        roles = ("qkv",) if fused else ("q", "k")
        for role in roles:
            source = _pre_rotation_module(model, module, layer, role)
            handles.append(source.register_forward_hook(hook(layer, role)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _pre_rotation_module(
    model: PreTrainedModel, module: nn.Module, layer: int, role: str
) -> nn.Module:
    """The last module before rotation: the norm where a family has one, else the projection."""
    if role == "qkv":
        return projection_of(model, layer, "q")
    for name in (f"{role}_norm", f"{role}_layernorm"):
        norm = getattr(module, name, None)
        if isinstance(norm, nn.Module):
            return norm
    return projection_of(model, layer, "q" if role == "q" else "k")


def _require_unrotated(model: PreTrainedModel) -> None:
    row = architecture_of(model)
    if row.order == "latent" or row.gate_in_query:
        raise ArtefactError(
            "queries and keys before RoPE do not come out of one projection in this family",
            where=f"model_type={model.config.model_type!r}",
            fix="capture them as scored: without --pre-rope",
        )


def _split(model: PreTrainedModel, layer: int, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    geometry = geometry_of(model, layer)
    name = architecture_of(model).clip
    clip = getattr(model.config.get_text_config(), name, None) if name else None
    if clip is not None:
        parts = {role: value.clamp(-clip, clip) for role, value in parts.items()}
    heads, kv, dim = geometry.num_heads, geometry.num_kv_heads, geometry.key_dim
    if "qkv" not in parts:
        return _by_head(parts["q"], heads, dim), _by_head(parts["k"], kv, dim)
    fused = parts["qkv"]
    if architecture_of(model).order == "concat":
        q, k = fused[..., : heads * dim], fused[..., heads * dim : (heads + kv) * dim]
        return _by_head(q, heads, dim), _by_head(k, kv, dim)
    grouped = fused.unflatten(-1, (kv, geometry.group + 2, dim))
    return (
        grouped[..., : geometry.group, :].flatten(2, 3).transpose(1, 2),
        grouped[..., geometry.group, :].transpose(1, 2),
    )


def _by_head(value: Tensor, heads: int, dim: int) -> Float[Tensor, "text head position dim"]:
    """A projection is (text, position, head * dim); a norm may run before or after the turn."""
    if value.dim() == 3:
        value = value.unflatten(-1, (heads, dim))  # a plain projection
    return value.transpose(1, 2) if value.shape[2] == heads else value


def _windows(model: PreTrainedModel) -> dict[int, int | None]:
    """The sliding window of each layer in tokens, None for full attention."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    layers = geometry_of(model).layers
    if kinds is None:
        return dict.fromkeys(layers, window)
    return {layer: window if kinds[layer] == "sliding_attention" else None for layer in layers}


def _readme(info: CaptureInfo) -> str:
    lines = [
        f"# Queries and keys of {info.model.id}",
        "",
        f"Captured with headwise {info.versions.get('headwise', '')}, {info.capture_point}.",
        "One Parquet file a layer, head and kind: `lLLhHH{q|k}/data.parquet` with the columns "
        "bucket, example_id, position, vector, sliding_window.",
        info.note,
        "",
        "```json",
        json.dumps(to_plain({"settings": info.settings, "texts": info.texts}), indent=1),
        "```",
    ]
    return "\n".join(lines) + "\n"
