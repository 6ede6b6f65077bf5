"""The verb triage: why a sick head is sick, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import app, resumable
from headwise.cli.options import (
    AllowPickle,
    Bos,
    DeviceMap,
    Dtype,
    Lines,
    MaxLength,
    Model,
    Out,
    Quiet,
    RemoteCode,
    Seed,
    Stream,
    Texts,
    Yes,
    announce,
    given_texts,
    load_reader,
    minding,
    wrote,
)

if TYPE_CHECKING:
    from rich.text import Text

    from headwise.diagnosis.triage_values import Triage


@app.command(
    short_help="Why a head is sick: asleep, parked, working or empty.",
    epilog="Example: headwise triage MODEL --diagnosis out/d --out out/triage",
)
def triage(
    model: Model,
    diagnosis: Annotated[Path, typer.Option(help="diagnosis.json, or its folder.")],
    heads: Annotated[str, typer.Option(help="Which heads to judge: a selection.")] = "sick",
    out: Out = Path("out/triage"),
    texts: Texts = None,
    lines: Lines = False,
    max_length: MaxLength = 256,
    max_texts: Annotated[int, typer.Option(help="Documents to use at most.", min=2)] = 64,
    dose: Annotated[float, typer.Option(help="How much of a release is tried.")] = 1.0,
    negligible: Annotated[
        float, typer.Option(help="A change of loss below this counts as none (nats per token).")
    ] = 0.005,
    bos: Bos = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    stream: Stream = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Accept another's diagnosis.")] = False,
    seed: Seed = 0,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Judge sick heads: asleep, parked, working, empty, constant, or undecided."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console, print_tables
    from headwise.diagnosis.triage_values import TriageThresholds
    from headwise.diagnosis.view import triage_table
    from headwise.proof.compare import read_snapshot
    from headwise.therapy.triage import TriageSettings, triage as run

    chosen, read = given_texts(texts, lines), read_snapshot(diagnosis).diagnosis
    how = (dtype, device_map, allow_pickle, trust_remote_code)
    earlier = read.provenance.settings
    before = [] if earlier is None else [(earlier.bos, f"the diagnosis {diagnosis}")]
    loaded = load_reader(
        model, how, bos, quiet, inherited=before, max_length=max_length, stream=stream
    )
    thresholds = TriageThresholds(negligible=negligible)
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        found = run(
            loaded,
            read,
            chosen,
            heads=heads,
            settings=TriageSettings(max_texts, max_length, dose, seed, thresholds),
            force=force,
            budget=minding(quiet, yes),
            progress=progress,
        )
    console(quiet).print(triage_grid(found))
    print_tables([triage_table(found)], quiet)
    wrote([found.save(out / "triage.json")], quiet)


def triage_grid(found: Triage) -> Text:
    """Layer 0 at the bottom: the letter of the class, a dot where nothing was asked."""
    from headwise.cli.show import grid_of
    from headwise.diagnosis.view import TRIAGE_LETTERS

    labels = {name: judged.class_ for name, judged in found.heads.items()}
    cells = [
        [
            TRIAGE_LETTERS.get(labels.get(f"L{layer}H{index}", ""), ("·", ""))
            for index in range(found.model.num_heads)
        ]
        for layer in found.model.layer_numbers
    ]
    text = grid_of(found.model.layer_numbers, cells)
    for name, (letter, colour) in TRIAGE_LETTERS.items():
        text.append(f"{letter} {name} {found.counts[name]}", style=f"black on {colour}")
        text.append(" ")
    return text
