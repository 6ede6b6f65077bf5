"""Capture queries and keys from any model through the tap, as Parquet in the `sniffed-qk` layout.

Vectors are what the scores are made of: after query/key norms and after RoPE (before it on
request), unscaled, so that q.k * scale (+ the ALiBi bias, which is no part of the vectors) are the
model's own logits. Texts go in portions; each is flushed to disk before the next begins, so
memory is bounded and a killed capture goes on where it stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import own_folder, read_text, sweep, versions, write_text
from headwise.errors import ArtefactError, SelectionError
from headwise.forward.guard import guard
from headwise.forward.hooked_pass import Emit, HookedPass
from headwise.forward.measurements import Measurement, run_measurement
from headwise.forward.tap import LayerAttention, tapped
from headwise.forward.unrotated import before_rotation, require_unrotated
from headwise.heads import Head, all_heads, select_in_layers
from headwise.integrity.checksums import file_checksum
from headwise.integrity.locks import one_writer
from headwise.models.architectures import (
    backbone_of,
    device_of,
    geometry_of,
    layer_window,
    positions_of,
)
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.stored_weights import stored_weights
from headwise.plasticity.buckets import bucket_of, keep_probability
from headwise.plasticity.settings import CaptureSettings
from headwise.plasticity.values import CAPTURE, CaptureInfo
from headwise.plasticity.writer import (
    DATA,
    Rows,
    assemble,
    drop_staging,
    end_portion,
    is_whole,
    require_whole,
    stage_rows,
    vector_bytes,
)
from headwise.progress import Budget, Progress, Work, silent, track, unlimited
from headwise.provenance import STOCK
from headwise.ranks import by_the_first, each_writes, shared_out
from headwise.texts.batches import Batch, batches, encode_for, token_count
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.values import to_plain

STAGING = ".headwise-staging"
CARD, _TITLE = "README.md", "# Queries and keys of"


_PORTION_TEXTS = 8


Kind = Literal["q", "k"]


@takes_model
def capture(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    patches: Sequence[Patch | Path] = (),
    layers: str | None = None,
    heads: str | Sequence[Head] | None = None,
    settings: CaptureSettings | None = None,
    batch_size: int = 4,
    resume: bool = False,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> CaptureInfo:
    """Capture the chosen query heads (default all) and the key heads they use.

    `layers` ("0-5,29") and `heads` (a selection, indices such as "0-3,7", or a list) choose them.
    `patches` are on the model while it runs, and off it afterwards. `budget` hears how much work it
    is, before it starts.
    """
    read = [Patch.load(patch) if isinstance(patch, Path) else patch for patch in patches]
    chosen_texts, how = as_text_set(texts, loaded.id), settings or CaptureSettings()
    trained = [(patch.info.bos, "the patch") for patch in read]
    loaded = loaded.reading(how.bos, *trained, progress=progress)
    geometry = geometry_of(loaded.model)
    if heads is None or isinstance(heads, str):
        heads = select_in_layers(layers, heads, geometry.layers, geometry.num_heads)
    every = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
    chosen = sorted(every if heads is None else heads)
    if not chosen:
        raise SelectionError("no head is chosen", fix="choose other --layers or --heads")
    how = replace(how, bos=loaded.bos, max_length=loaded.length(how.max_length))
    tokens = token_count(loaded, chosen_texts.texts, how.max_length)
    less = "--texts, --max-length, --layers"
    batch = batch_size * how.max_length
    size = vector_bytes(tokens, heads, geometry)
    budget(loaded.model, Work(tokens, batch, written=size, waiting=tokens, less=less))
    info = _describe(loaded, chosen_texts, how, chosen)  # the base, before patches
    info = replace(info, patch=read[-1].fingerprint() if read else STOCK)
    with one_writer(Path(out)), applied(loaded.model, read):
        encoded = encode_for(loaded, chosen_texts.texts, max_length=how.max_length)
        folder = Path(out) if how.layout == "new" else Path(out) / re.sub(r"\W", "_", loaded.id)
        info = replace(info, folder=folder)
        finished = by_the_first(lambda: _finished(folder, info, resume))
        return finished or _capture_all(loaded.model, encoded, chosen, info, batch_size, progress)


def _capture_all(
    model: PreTrainedModel,
    encoded: list[list[int]],
    heads: list[Head],
    info: CaptureInfo,
    batch_size: int,
    progress: Progress,
) -> CaptureInfo:
    """Capture the portions that are not on disk, and make one file per head of all of them."""
    guard(model, max(map(len, encoded)))
    staging = by_the_first(lambda: _prepare(info))  # its sweep must not meet a writer
    portions = {
        staging / f"portion-{start:06d}": (start, encoded[start : start + _PORTION_TEXTS])
        for start in range(0, len(encoded), _PORTION_TEXTS)
    }

    def capture_missing(path: Path) -> None:
        if not is_whole(path, info.identity):
            with each_writes():
                capture_portion(model, portions[path], path, heads, info, batch_size)

    if stored_weights(model) is not None:
        missing = {
            path: part for path, part in portions.items() if not is_whole(path, info.identity)
        }
        work = _streamed_capture(model, missing, heads, info, batch_size)
        run_measurement(model, work, progress=progress)
    else:
        paths = list(portions)
        shared = shared_out(capture_missing, paths)
        for _ in track(shared, "capturing", progress, count=len(paths)):
            pass
    return by_the_first(lambda: _assemble(model, staging, heads, info))


def _assemble(
    model: PreTrainedModel, staging: Path, heads: list[Head], info: CaptureInfo
) -> CaptureInfo:
    """One file per head from all portions, and `capture.json` with their rows and checksums."""
    folder = staging.parent
    groups = {layer: geometry_of(model, layer).group for layer in geometry_of(model).layers}
    windows = {layer: layer_window(model, layer) for layer in groups}
    rows = assemble(staging, folder, heads, groups, windows, info.settings.buckets)
    checksums = {name: file_checksum(folder / name / DATA) for name in rows}
    if _is_own_card(folder / CARD):
        write_text(folder / CARD, _readme(info))
    info = replace(info, rows=rows, checksums=checksums, finished=True)
    info.save(folder)
    drop_staging(staging)
    return info


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


def _finished(folder: Path, info: CaptureInfo, resume: bool) -> CaptureInfo | None:
    """A finished capture with these settings, if that is what is here; others are refused."""
    if not (folder / CAPTURE).exists():
        return None
    before = CaptureInfo.load(folder)
    same = before.identity == info.identity
    if not resume or not same:
        raise ArtefactError(
            "there is a capture here already" + ("" if same else ", with other settings"),
            where=folder,
            fix="add --resume to go on with the same settings, or choose another --out",
        )
    if not before.finished:
        return None
    require_whole(folder, before)
    drop_staging(folder / STAGING)  # a kill may have come just before this
    return before


def _prepare(info: CaptureInfo) -> Path:
    """The staging folder, new or continued."""
    assert info.folder is not None
    folder = info.folder
    info.save(folder)
    staging = own_folder(folder / STAGING)
    staging.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    return staging


def capture_portion(
    model: PreTrainedModel,
    portion: tuple[int, list[list[int]]],
    path: Path,
    heads: list[Head],
    info: CaptureInfo,
    batch_size: int,
) -> None:
    """Run one portion of texts and put the kept vectors of each layer and kind on disk."""
    (first, encoded), settings = portion, info.settings
    layers = sorted({head.layer for head in heads})
    by_layer: dict[tuple[int, Kind], list[Rows]] = {}
    for batch in batches(encoded, batch_size, model=model):
        for layer, q, k in layer_vectors(model, batch.ids, layers, settings.pre_rope):
            for kind, rows in _rows(batch, first, layer, (q, k), settings):
                by_layer.setdefault((layer, kind), []).extend(rows)
    for (layer, kind), rows in by_layer.items():
        stage_rows(path, layer, kind, rows)
    end_portion(path, info.identity)


def _rows(
    batch: Batch,
    first: int,
    layer: int,
    vectors: tuple[Tensor, Tensor],
    settings: CaptureSettings,
) -> Iterator[tuple[Kind, list[Rows]]]:
    """What is kept of one layer of a batch whose texts are counted from `first`, by kind."""
    kinds: tuple[Kind, Kind] = ("q", "k")
    for kind, values in zip(kinds, vectors, strict=True):
        rows = []
        for row, text in enumerate(batch.index):
            keep = kept_positions(int(batch.lengths[row]), first + text, layer, kind, settings)
            position = np.flatnonzero(keep)
            value = values[row, :, torch.from_numpy(position)].float().cpu().numpy()
            rows.append((first + text, position, value))
        yield kind, rows


def _streamed_capture(
    model: PreTrainedModel,
    portions: dict[Path, tuple[int, list[list[int]]]],
    heads: list[Head],
    info: CaptureInfo,
    batch_size: int,
) -> Measurement[None]:
    """Capture all portions of a streamed model, one layer after the other.

    A portion's vectors of a layer are written as soon as its last batch has gone through.
    """
    layers, settings = sorted({head.layer for head in heads}), info.settings
    work = [
        (path, first, batch)
        for path, (first, encoded) in portions.items()
        for batch in batches(encoded, batch_size, model=model)
    ]
    last = {path: number for number, (path, _, _) in enumerate(work)}
    hidden = _needs_unrotated(model, settings.pre_rope)
    waiting: dict[Kind, list[Rows]] = {"q": [], "k": []}

    def take(number: int, layer: int | None, vectors: tuple[Tensor, Tensor] | None) -> None:
        if layer is None or vectors is None:
            return
        path, first, batch = work[number]
        for kind, rows in _rows(batch, first, layer, vectors, settings):
            waiting[kind] += rows
            if number == last[path]:
                stage_rows(path, layer, kind, waiting[kind])
                waiting[kind] = []

    def observe(_: int, attention: LayerAttention) -> tuple[Tensor, Tensor] | None:
        return (attention.scores.q, attention.scores.k) if attention.layer in layers else None

    def listen(_: int, emit: Emit[tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
        return before_rotation(model, layers, lambda layer, q, k: emit(layer, (q, k)))

    ids = [batch.ids for _, _, batch in work]
    yield HookedPass(
        [_padded(model, one) for one in ids] if hidden else ids,
        take,
        observe=None if hidden else observe,
        listen=listen if hidden else None,
        stop=layers[-1] + 1,
        title="capturing",
    )
    for path in portions:
        end_portion(path, info.identity)


def kept_positions(
    length: int, example: int, layer: int, kind: Kind, settings: CaptureSettings
) -> Bool[np.ndarray, "row"]:
    """Which positions are kept: one mask for all heads of a layer and kind, by seed."""
    bucket = bucket_of(settings.buckets, np.arange(length))
    share = keep_probability(settings.buckets, bucket, settings.base_rate)
    generator = np.random.default_rng([settings.seed, example, layer, "qk".index(kind)])
    return generator.random(length) < share


def layer_vectors(
    model: PreTrainedModel, ids: Tensor, layers: list[int], pre_rope: bool
) -> list[tuple[int, Tensor, Tensor]]:
    """(layer, q, k) of one batch, (text, head, position, dim), post- or pre-position."""
    seen: list[tuple[int, Tensor, Tensor]] = []

    def read(attention: LayerAttention) -> None:
        if attention.layer in layers:
            seen.append((attention.layer, attention.scores.q, attention.scores.k))

    device, length = device_of(model), ids.shape[1]
    with torch.inference_mode(), tapped(model, read):
        if not _needs_unrotated(model, pre_rope):
            backbone_of(model)(input_ids=ids.to(device), use_cache=False)
            return seen
        unrotated: list[tuple[int, Tensor, Tensor]] = []
        padded = _padded(model, ids).to(device)
        with before_rotation(model, layers, lambda *one: unrotated.append(one)):
            backbone_of(model)(input_ids=padded, use_cache=False)
    return [(n, q[:, :, :length], k[:, :, :length]) for n, q, k in unrotated]


def _needs_unrotated(model: PreTrainedModel, pre_rope: bool) -> bool:
    """Whether vectors are read before RoPE, by a hook of their own: the tap shows them after it."""
    wanted = pre_rope and positions_of(model) == "rope"
    if wanted:
        require_unrotated(model)
    return wanted


def _padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """One more token, which no earlier one sees, if positions could be taken for heads."""
    geometry = geometry_of(model)
    extra = ids.shape[1] in (geometry.num_heads, geometry.num_kv_heads)
    return torch.nn.functional.pad(ids, (0, int(extra)))


def _is_own_card(path: Path) -> bool:
    """Whether the dataset's card may be written: another README stays what it is."""
    return not path.exists() or read_text(path).startswith(_TITLE)


def _readme(info: CaptureInfo) -> str:
    lines = [
        f"{_TITLE} {info.model.id}",
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
