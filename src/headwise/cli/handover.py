"""Verbs that hand a repair over: export, push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.app import app
from headwise.cli.options import AllowPickle, Dtype, Quiet, RemoteCode, load


@app.command(
    short_help="A patch of low rank as an exact PEFT adapter.",
    epilog="Example: headwise export out/run/patch.safetensors --peft adapter/",
)
def export(
    patch: Annotated[Path, typer.Argument(help="patch.safetensors")],
    peft: Annotated[Path, typer.Option("--peft", help="Folder for the PEFT adapter.")],
    model: Annotated[
        str | None, typer.Option(help="The base; default: the one the patch names.")
    ] = None,
    full_rank: Annotated[
        bool, typer.Option("--full-rank", help="Also if the change is not of low rank.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept another base.")] = False,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Write a patch of low rank as an exact PEFT adapter, and prove it."""
    from headwise.cli.show import console
    from headwise.handover.adapter import export_peft
    from headwise.models.patch import Patch

    read = Patch.load(patch)
    base = model or read.info.base_model
    loaded = load(base, dtype or read.dtype, None, allow_pickle, trust_remote_code)
    made = export_peft(loaded, read, peft, full_rank=full_rank, force=force)
    console(quiet).print(
        f"rank {made.rank} in {len(made.modules)} projections, {made.num_weights:,} weights; "
        f"logits of base + adapter and of the patched model differ by {made.largest_difference:.1e}"
    )
    console(quiet).print(f"wrote a PEFT adapter of {base} in {made.folder}", style="dim")


@app.command(
    short_help="Model card and upload.",
    epilog="Example: headwise push repaired/ me/repaired --run out/run",
)
def push(
    folder: Annotated[Path, typer.Argument(help="A merged model or a PEFT adapter.")],
    to: Annotated[str, typer.Argument(metavar="REPO", help="A hub id, or a local folder.")],
    run: Annotated[
        Path | None, typer.Option(help="The run whose artefacts the model card tells.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A private repository.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a model card from the artefacts and upload the folder."""
    from headwise.cli.show import console
    from headwise.handover.push import push as upload

    place = upload(folder, to, run=run, private=private)
    console(quiet).print(f"pushed {folder} with its model card to {place}")
