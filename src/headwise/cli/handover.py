"""Verbs that hand a repair over: export, push."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import Doc

from headwise.cli.options import load
from headwise.cli.verbs import verb
from headwise.models.settings import LoadSettings


@verb(
    "export",
    "A patch of low rank as an exact PEFT adapter.",
    example="export out/run/patch.safetensors --peft adapter/",
    without=("bos", "stream"),
)
def export_verb(
    patch: Annotated[Path, typer.Argument(help="patch.safetensors")],
    peft: Annotated[Path, Doc("Folder for the PEFT adapter.")],
    loading: LoadSettings,
    model: Annotated[str | None, Doc("The base; default: the one the patch names.")] = None,
    full_rank: Annotated[bool, Doc("Also if the change is not of low rank.")] = False,
    force: Annotated[bool, Doc("Accept another base.")] = False,
) -> None:
    """Write a patch of low rank as an exact PEFT adapter, and prove it."""
    from headwise.cli.show import console
    from headwise.handover.adapter import export_peft
    from headwise.models.patch import Patch

    read = Patch.load(patch)
    base = model or read.info.base_model
    loaded = load(base, replace(loading, dtype=loading.dtype or read.dtype))
    made = export_peft(loaded, read, peft, full_rank=full_rank, force=force)
    console().print(
        f"rank {made.rank} in {len(made.modules)} projections, {made.num_weights:,} weights; "
        f"logits of base + adapter and of the patched model differ by {made.largest_difference:.1e}"
    )
    console().print(f"wrote a PEFT adapter of {base} in {made.folder}", style="dim")


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
