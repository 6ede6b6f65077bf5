"""The verb that films a training run from its checkpoints: watch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Figures, Out, alarm, wrote
from headwise.cli.verbs import verb
from headwise.keywords import AllowPickle, Dtype, RemoteCode, keywords_of
from headwise.texts.settings import TextSettings
from headwise.watch.settings import ProbeSettings

if TYPE_CHECKING:
    from headwise.watch.film import Film


@verb(
    "The heads of a training run, checkpoint by checkpoint.",
    example="watch out/training --out out/watch",
)
def watch(
    checkpoints: Annotated[Path, typer.Argument(help="A folder of checkpoint-100, -200, ...")],
    texts: TextSettings,
    settings: ProbeSettings,
    tokenizer: Annotated[
        str | None, Doc("Where the tokenizer is, if not in the checkpoints.")
    ] = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    resume: Annotated[bool, Doc("Read what is new only.")] = False,
    figures: Figures = True,
    out: Out = Path("out/watch"),
) -> None:
    """Film the heads of a training run from its checkpoints, one at a time."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.watch.checkpoints import watch_checkpoints
    from headwise.watch.film import FILM, WATCH

    with resumable(f"add --resume to go on in {out}"), progress_bars() as progress:
        film = watch_checkpoints(
            checkpoints,
            texts.read(),
            out=out,
            **keywords_of(settings),
            dtype=dtype,
            tokenizer=tokenizer,
            resume=resume,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    written = [out / WATCH, out / FILM]
    if figures:
        from headwise.watch.figures import film_figures

        written += film_figures(film, out)
    _show(film)
    wrote(written)
    alarm([found.alarm for found in film.alarms])


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
