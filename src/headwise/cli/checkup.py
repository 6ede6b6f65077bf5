"""The verb checkup: the first command for any model."""

from __future__ import annotations

from pathlib import Path

from headwise.checkups.settings import CheckupSettings
from headwise.cli.app import resumable
from headwise.cli.options import Out, Reading
from headwise.cli.verbs import verb


@verb(
    "checkup",
    "The first command: what heads do, and what to do.",
    example="checkup MODEL --texts my_texts/ --out out/checkup",
    without=("stream",),
)
def checkup_verb(
    reading: Reading,
    settings: CheckupSettings,
    out: Out = Path("out/checkup"),
) -> None:
    """Look at a model for as long as --budget says: its heads, why they are ill, what helps.

    The same command in the same folder goes on where it ended; a longer --budget looks deeper.
    """
    loaded, texts = reading.open(settings.max_length)
    from headwise.checkups.checkup import PAGE, checkup
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console, head_grid, role_map
    from headwise.diagnosis.values import Diagnosis

    screen = console()
    screen.print(f"this takes at most about {settings.budget} (--budget)", style="dim")
    with resumable(f"the same command goes on in {out}"), progress_bars() as progress:
        answer = checkup(loaded, texts, out=out, settings=settings, progress=progress)
    diagnosis = Diagnosis.load(out / "diagnosis.json")
    screen.print(head_grid(diagnosis))
    screen.print(role_map(diagnosis))
    for line in answer.lines(str(out / PAGE)):
        screen.print(line, soft_wrap=True)
