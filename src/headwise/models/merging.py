"""Patches merged into an ordinary model directory, or taken out again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    for patch in reversed(patches) if undo else patches:
        (patch.undo if undo else patch.apply)(loaded.model, force=force)
    if out.exists() and any(out.iterdir()):
        raise ModelError("the output folder is not empty", where=out, fix="choose another --out")
    try:
        with quietly():
            loaded.model.save_pretrained(out)
            loaded.tokenizer.save_pretrained(out)
    except OSError as error:
        raise ModelError(f"cannot write the model ({error})", where=out) from None
    return out
