"""Patches merged into an ordinary model directory, or taken out again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from headwise.errors import ModelError
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import quietly
from headwise.models.patch import Patch


def apply_patches(
    loaded: LoadedModel,
    patches: Sequence[Patch],
    out: Path | str,
    *,
    undo: bool = False,
    force: bool = False,
) -> Path:
    """Merge patches in order (or undo them in reverse) and save an ordinary model directory."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(
            "the output folder is a file, or not empty", where=out, fix="choose another --out"
        )
    for patch in reversed(patches) if undo else patches:
        (patch.undo if undo else patch.apply)(loaded.model, force=force)
    staging = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        with quietly():
            loaded.model.save_pretrained(staging)
            loaded.tokenizer.save_pretrained(staging)
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
