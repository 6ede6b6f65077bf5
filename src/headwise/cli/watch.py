"""The verb that films a training run from its checkpoints: watch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Output, alarm, wrote
from headwise.cli.verbs import verb
from headwise.diagnosis.settings import DiagnoseSettings
from headwise.models.settings import LoadSettings
from headwise.texts.settings import TextSettings

if TYPE_CHECKING:
    from headwise.watch.film import Film


@verb(
    "watch",
    "The heads of a training run, checkpoint by checkpoint.",
    example="watch out/training --out out/watch",
    without=("skip_queries", "device_map", "stream", "yes"),
)
def watch_verb(
    checkpoints: Annotated[Path, typer.Argument(help="A folder of checkpoint-100, -200, ...")],
    texts: TextSettings,
    loading: LoadSettings,
    settings: DiagnoseSettings = DiagnoseSettings(max_length=128),
    tokenizer: Annotated[
        str | None, Doc("Where the tokenizer is, if not in the checkpoints.")
    ] = None,
    to: Output = Output(Path("out/watch")),
) -> None:
    """Film the heads of a training run from its checkpoints, one at a time."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.watch.checkpoints import watch_checkpoints
    from headwise.watch.film import FILM, WATCH

    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        film = watch_checkpoints(
            checkpoints,
            texts.read(),
            out=to.out,
            max_length=settings.max_length,
            batch_size=settings.batch_size,
            thresholds=settings.thresholds,
            bos=loading.bos,
            dtype=loading.dtype,
            tokenizer=tokenizer,
            resume=to.resume,
            allow_pickle=loading.allow_pickle,
            trust_remote_code=loading.trust_remote_code,
            progress=progress,
        )
    written = [to.out / WATCH, to.out / FILM]
    if to.figures:
        from headwise.watch.figures import film_figures

        written += film_figures(film, to.out)
    _show(film)
    sick = [len(reading.sick) for reading in (film.readings[0], film.readings[-1])]
    found = f"sick heads: {sick[0]} at the first checkpoint, {sick[1]} at the last"
    wrote(written, found, ["report", to.out])
    alarm([head.alarm for head in film.alarms])


def _show(film: Film) -> None:
    """A table of the readings and the last head grid."""
    from headwise.cli.show import console, head_grid, rich_table
    from headwise.tables import table

    names = ("sick_heads", "sink_rate", "median_entropy", "max_logit")
    rows = [(r.step, *(round(r.scalars[name], 3) for name in names)) for r in film.readings]
    screen = console()
    screen.print(
        rich_table(table("the film", ("step", *(n.replace("_", " ") for n in names)), rows))
    )
    screen.print(head_grid(film.diagnosis()))
