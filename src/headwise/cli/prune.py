"""The verbs prune and stream: what a model can do without, proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Output, Reading, budget, wrote
from headwise.cli.verbs import verb
from headwise.pruning.settings import PruneSettings, StreamSettings

Also = Annotated[Sequence[str], Doc("Another kind of text to check on; default: a bundled set.")]


@verb(
    "prune",
    "Which heads can go, proven; a patch without them.",
    example="prune MODEL --texts my_texts/ --out out/prune",
)
def prune_verb(
    reading: Reading,
    settings: PruneSettings,
    also: Also = (),
    to: Output = Output(Path("out/prune")),
) -> None:
    """Find the largest set of heads that can go for less than --max-loss, and write its patch."""
    _search(reading, settings, also, to)


@verb(
    "stream",
    "Which groups need only first and recent tokens.",
    example="stream MODEL --texts my_texts/ --out out/stream",
    without=("stream",),
)
def stream_verb(
    reading: Reading,
    settings: StreamSettings,
    also: Also = (),
    to: Output = Output(Path("out/stream")),
) -> None:
    """Find the most key/value groups that can do with the first and the recent tokens."""
    _search(reading, settings, also, to)


def _search(
    reading: Reading,
    settings: PruneSettings | StreamSettings,
    also: Sequence[str],
    to: Output,
) -> None:
    """Search, and show the answer, the other orders and the files."""
    from headwise.texts.text_sets import read_texts

    other = read_texts(list(also)) if also else None
    loaded, texts = reading.open(settings.max_length)
    from headwise import prune, stream
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console, print_tables

    find: Any = prune if isinstance(settings, PruneSettings) else stream
    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        found = find(
            loaded,
            texts,
            out=to.out,
            also=other,
            settings=settings,
            resume=to.resume,
            budget=budget(to.yes),
            progress=progress,
        )
    for line in found.sentences:
        console().print(line, markup=False)
    print_tables(found.tables()[:1])
    paths, then = [to.out / name for name in found.files], []
    if found.heads and isinstance(settings, PruneSettings):
        then = ["apply", reading.model, paths[1], "--out", "pruned"]
    if to.figures and found.order:
        from headwise.pruning.figures import curve_figures

        paths += curve_figures(found, to.out)
    wrote(paths, then=then)
