"""The verb triage: why a sick head is sick, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import Doc

from headwise.cli.options import Out, Reading, Yes, budget, in_one_go, trained_on, wrote
from headwise.cli.verbs import verb
from headwise.triaging.settings import TriageSettings

if TYPE_CHECKING:
    from rich.text import Text

    from headwise.triaging.values import Triage


@verb(
    "triage",
    "Why a head is sick: asleep, parked, working or empty.",
    example="triage MODEL --diagnosis out/d --out out/triage",
)
def triage_verb(
    reading: Reading,
    diagnosis: Annotated[Path, Doc("diagnosis.json, or its folder.")],
    settings: TriageSettings,
    heads: Annotated[str, Doc("Which heads to judge: a selection.")] = "sick",
    force: Annotated[bool, Doc("Accept another's diagnosis.")] = False,
    out: Out = Path("out/triage"),
    yes: Yes = False,
) -> None:
    """Judge sick heads: asleep, parked, working, empty, constant, or undecided."""
    from headwise.proof.compare import read_snapshot

    source = read_snapshot(diagnosis).diagnosis  # first: it is refused sooner than a model loads
    with in_one_go(out) as progress:
        loaded, texts = reading.open(settings.max_length)
        from headwise.triaging.triage import triage

        triaged = triage(
            loaded,
            source,
            texts,
            heads=heads,
            settings=settings,
            force=force,
            budget=budget(yes),
            progress=progress,
        )
        path = triaged.save(out / "triage.json")
    from headwise.cli.show import console, print_tables
    from headwise.therapy.auto import SPARED
    from headwise.triaging.view import triage_table

    console().print(triage_grid(triaged))
    print_tables([triage_table(triaged)])
    counts = {name: count for name, count in triaged.counts.items() if count}
    found = f"{len(triaged.heads)} heads judged: " + ", ".join(
        f"{count} {name}" for name, count in counts.items()
    )
    then = ["prune", *reading.again]
    if counts.keys() - SPARED:
        then = ["repair", *trained_on(reading.model), "--treatment", "auto"]
    wrote([path], found, then)


def triage_grid(triage: Triage) -> Text:
    """Layer 0 at the bottom: the letter of the class, a dot where nothing was asked."""
    from headwise.cli.show import grid_of
    from headwise.triaging.view import TRIAGE_LETTERS

    labels = {name: judged.class_ for name, judged in triage.heads.items()}
    cells = [
        [
            TRIAGE_LETTERS.get(labels.get(f"L{layer}H{index}", ""), ("·", ""))
            for index in range(triage.model.num_heads)
        ]
        for layer in triage.model.layer_numbers
    ]
    text = grid_of(triage.model.layer_numbers, cells)
    for name, (letter, colour) in TRIAGE_LETTERS.items():
        text.append(f"{letter} {name} {triage.counts[name]}", style=f"black on {colour}")
        text.append(" ")
    return text
