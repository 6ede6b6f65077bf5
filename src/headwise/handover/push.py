"""A model directory or an adapter, with its card, to the hub or to a folder that stands for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from headwise.artefacts import write_text
from headwise.errors import ModelError
from headwise.handover.card import model_card
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
        write_text(folder / "README.md", model_card(run))
        if (Path(run) / PATCH).exists():
            shutil.copyfile(Path(run) / PATCH, folder / PATCH)
    if to.startswith((".", "/")):
        shutil.copytree(folder, to, dirs_exist_ok=True)
        return to
    return _uploaded(folder, to, private)


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
