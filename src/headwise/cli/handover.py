"""Verbs that hand a repair over: export, push."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import Doc

from headwise.cli.options import load
from headwise.cli.verbs import verb
from headwise.handover.settings import ExportSettings
from headwise.models.settings import LoadSettings


@verb(
    "export",
    "A patch for other tools: PEFT adapter, GGUF file.",
    example="export out/run/patch.safetensors --peft adapter/",
    without=("bos", "stream"),
)
def export_verb(
    patch: Annotated[Path, typer.Argument(help="patch.safetensors")],
    loading: LoadSettings,
    settings: ExportSettings,
    model: Annotated[str | None, Doc("The base; default: the one the patch names.")] = None,
) -> None:
    """Write a patch as other tools read it: for PEFT exactly, for llama.cpp inside its file."""
    from headwise.cli.show import console
    from headwise.models.patch import Patch

    targets = (settings.peft, settings.gguf, settings.lora_gguf)
    if sum(target is not None for target in targets) != 1:
        raise typer.BadParameter("name one of --peft DIR, --gguf FILE and --lora-gguf FILE")
    read = Patch.load(patch)
    base = model or read.info.base_model
    loaded = load(base, replace(loading, dtype=loading.dtype or read.dtype))
    if settings.peft is not None:
        from headwise.handover.adapter import export_peft

        made = export_peft(
            loaded, read, settings.peft, full_rank=settings.full_rank, force=settings.force
        )
        console().print(str(made))
        console().print(f"wrote a PEFT adapter of {base} in {made.path}", style="dim")
        return
    from headwise.handover.gguf_file import export_gguf, export_lora_gguf

    if settings.gguf is not None:
        written = export_gguf(loaded, read, settings.gguf, force=settings.force)
    elif settings.lora_gguf is not None:
        written = export_lora_gguf(loaded, read, settings.lora_gguf, force=settings.force)
    console().print(str(written))
    console().print(f"wrote {written.path}", style="dim")


@verb("push", "Model card and upload.", example="push repaired/ me/repaired --run out/run")
def push_verb(
    folder: Annotated[Path, typer.Argument(help="A merged model or a PEFT adapter.")],
    to: Annotated[str, typer.Argument(metavar="REPO", help="A hub id, or a local folder.")],
    run: Annotated[Path | None, Doc("The run whose artefacts the model card tells.")] = None,
    private: Annotated[bool, Doc("A private repository.")] = False,
) -> None:
    """Write a model card from the artefacts and upload the folder."""
    from headwise.cli.show import console
    from headwise.handover.push import push

    place = push(folder, to, run=run, private=private)
    console().print(f"pushed {folder} with its model card to {place}")
