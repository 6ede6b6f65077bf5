"""Patches merged into an ordinary model directory, or taken out again.

Where the model lies on disk as safetensors, its files are copied and only the bytes of changed
tensors are written: config, tokenizer, shards, tied weights and every other bit stay by
construction. A changed tensor keeps its precision if its values fit; if not (float32 slices in a
float16 file) it is widened and the config says so, and `headwise_merge.json` remembers what was
there, so that undoing gives back the same files. A patch in less precision than the files leaves
them theirs. Any other model is saved by transformers. The model in memory stays as it was.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from headwise.artefacts import TEMPORARY, is_temporary, temporary_beside
from headwise.errors import ModelError
from headwise.handover.shrinking import shrink as cut_retired
from headwise.handover.weight_files import holds, merge_files, replaced_slices
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import converted_gguf, quietly
from headwise.models.patch import Patch
from headwise.models.patient import patient_dir
from headwise.models.slices import write_slices
from headwise.models.tensor_files import stored_tensors


def apply_patches(
    loaded: LoadedModel,
    patches: Sequence[Patch],
    out: Path | str,
    *,
    undo: bool = False,
    shrink: bool = False,
    force: bool = False,
) -> Path:
    """Merge patches in order (or undo them in reverse) and save an ordinary model directory.

    With `shrink` the heads that the last patch retired are cut out, where the family allows it.
    """
    out, ordered = Path(out), list(reversed(patches) if undo else patches)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(
            "the output folder is a file, or not empty", where=out, fix="choose another --out"
        )
    staging = temporary_beside(out)
    for left in out.parent.glob(f".{glob.escape(out.name)}.*{TEMPORARY}"):  # by a killed process
        if left.is_dir() and is_temporary(left):
            shutil.rmtree(left, ignore_errors=True)
    try:
        with ExitStack() as stack:
            for patch in ordered:
                context = patch.undone if undo else patch.applied
                stack.enter_context(context(loaded.model, force=force))
            if undo and (base := folder_of(loaded.id)):
                write_slices(loaded.model, replaced_slices(base, ordered))
            if shrink and not undo:
                cut_retired(loaded, ordered[-1], staging)
            else:
                _write(loaded, ordered, staging, undo=undo, force=force)
        os.replace(staging, out)  # noqa: PTH105 - only this takes the place of an empty folder
    except (OSError, SafetensorError) as error:  # safetensors tells a full disk in its own words
        raise ModelError(
            f"cannot write the model ({error})",
            where=out,
            fix="free disk space or choose a writable --out; nothing was left behind",
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _write(
    loaded: LoadedModel, patches: Sequence[Patch], out: Path, *, undo: bool, force: bool
) -> None:
    """The base's own files with the changed bytes, or what transformers makes of the model."""
    base = folder_of(loaded.id)
    written = base is not None and merge_files(base, patches, out, undo=undo, force=force)
    if written and holds(out, loaded.model):
        return
    shutil.rmtree(out, ignore_errors=True)
    types = [] if base is None else [tensor.dtype for tensor in stored_tensors(base).values()]
    finest = max(types, key=lambda dtype: dtype.itemsize, default=loaded.model.dtype)
    if finest.itemsize > loaded.model.dtype.itemsize:
        names = [str(dtype).removeprefix("torch.") for dtype in (finest, loaded.model.dtype)]
        raise ModelError(
            f"the model's files are {names[0]} and it is loaded in {names[1]}, and they lack "
            "what the patch replaces: writing it would round every weight for good",
            where=base,
            fix=f"use the model the patch was made from, or --dtype {names[0]} --force",
        )
    with quietly():
        loaded.model.save_pretrained(out)
        loaded.tokenizer.save_pretrained(out)


def folder_of(name: str) -> Path | None:
    """Where the files of a model are, as `load_model` read them; None if it has none."""
    path = patient_dir() if name == "patient" else Path(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return converted_gguf(path)
    if name.count("/") != 1 or path.exists():
        return None
    found = cached_file(
        name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else Path(found).parent
