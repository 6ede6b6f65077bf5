"""The verb triage: why a sick head is sick, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Model, Out, Yes, announce, load_reader, minding, wrote
from headwise.cli.verbs import verb
from headwise.models.settings import ReaderSettings
from headwise.texts.settings import TextSettings
from headwise.triaging.settings import TriageSettings

if TYPE_CHECKING:
    from rich.text import Text

    from headwise.triaging.values import Triage


@verb(
    "Why a head is sick: asleep, parked, working or empty.",
    example="triage MODEL --diagnosis out/d --out out/triage",
)
def triage(
    model: Model,
    diagnosis: Annotated[Path, Doc("diagnosis.json, or its folder.")],
    texts: TextSettings,
    settings: TriageSettings,
    reading: ReaderSettings,
    heads: Annotated[str, Doc("Which heads to judge: a selection.")] = "sick",
    force: Annotated[bool, Doc("Accept another's diagnosis.")] = False,
    out: Out = Path("out/triage"),
    yes: Yes = False,
) -> None:
    """Judge sick heads: asleep, parked, working, empty, constant, or undecided."""
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console, print_tables
    from headwise.proof.compare import read_snapshot
    from headwise.triaging.triage import triage as run
    from headwise.triaging.view import triage_table

    given, read = texts.read(), read_snapshot(diagnosis).diagnosis
    loaded = load_reader(model, reading, settings.max_length)
    with resumable("nothing was written"), progress_bars() as progress:
        found = run(
            loaded,
            read,
            given,
            heads=heads,
            settings=settings,
            force=force,
            budget=minding(yes),
            progress=progress,
        )
    console().print(triage_grid(found))
    print_tables([triage_table(found)])
    wrote([found.save(out / "triage.json")])


def triage_grid(found: Triage) -> Text:
    """Layer 0 at the bottom: the letter of the class, a dot where nothing was asked."""
    from headwise.cli.show import grid_of
    from headwise.triaging.view import TRIAGE_LETTERS

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
