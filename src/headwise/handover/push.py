"""A model directory or an adapter, with its card, to the hub or to a folder that stands for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open

from headwise.artefacts import write_text
from headwise.errors import ModelError
from headwise.handover.adapter import ADAPTED_PATCH, WEIGHTS
from headwise.handover.card import model_card
from headwise.handover.weight_files import carries
from headwise.models.patch import Patch
from headwise.provenance import Origin, require_same_origin
from headwise.surgery.values import PATCH

_NEEDED = ("config.json", "adapter_config.json")


def push(
    folder: Path | str, to: str, *, run: Path | str | None = None, private: bool = False
) -> str:
    """Upload a folder; with a `run` its model card and its patch go along.

    `to` is a hub id (`me/model`), or a path (`./here`, `/there`) that the files are copied to.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in _NEEDED):
        raise ModelError(
            "no model and no adapter here",
            where=folder,
            fix="pass the folder that `headwise apply` or `headwise export` wrote",
        )
    if run is not None:
        patch = Path(run) / PATCH
        if patch.exists():
            require_same_origin(
                Origin(str(run), patch=Patch.load(patch).fingerprint()),
                Origin(str(folder), patch=_patch_in(folder, Patch.load(patch))),
                fix="push the folder that was made with this run's patch, or name its own --run",
            )
        write_text(folder / "README.md", model_card(run))
        if patch.exists():
            shutil.copyfile(patch, folder / PATCH)
    if to.startswith((".", "/")):
        shutil.copytree(folder, to, dirs_exist_ok=True)
        return to
    return _uploaded(folder, to, private)


def _patch_in(folder: Path, patch: Patch) -> str:
    """The hash of `patch` if the folder holds it, else of what it holds, as far as it says."""
    if (folder / WEIGHTS).exists():
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            return str((file.metadata() or {}).get(ADAPTED_PATCH, "unknown"))
    if carries(folder, patch):
        return patch.fingerprint()
    other = folder / PATCH  # of an earlier push
    return Patch.load(other).fingerprint() if other.exists() else "another, or none"


def _uploaded(folder: Path, repository: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        found = hub.upload_folder(repo_id=repository, folder_path=str(folder))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"the hub did not take it ({str(error).splitlines()[0]})",
            where=repository,
            fix="check the id, the network and `hf auth login`",
        ) from None
    return str(found)
