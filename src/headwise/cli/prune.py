"""The verbs prune and stream: what a model can do without, proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Output, Reading, budget, wrote
from headwise.cli.verbs import verb
from headwise.pruning.settings import PruneSettings, StreamSettings

if TYPE_CHECKING:
    from headwise.pruning.values import NestedSets
    from headwise.tables import Table
    from headwise.texts.text_sets import TextSet

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
    other = _read(also)
    loaded, texts = reading.open(settings.max_length)
    from headwise.cli.progress_bar import progress_bars
    from headwise.pruning.prune import GAIN, PATCH, PRUNE, prune

    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        pruned = prune(
            loaded,
            texts,
            out=to.out,
            also=other,
            settings=settings,
            resume=to.resume,
            budget=budget(to.yes),
            progress=progress,
        )
    limit = settings.search.max_loss
    written = [PRUNE, PATCH, *([GAIN] if pruned.gain_heads else [])]
    _show(pruned.sentences, pruned.tables()[:1], pruned.nested, limit, to, written)


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
    other = _read(also)
    loaded, texts = reading.open(settings.max_length)
    from headwise.cli.progress_bar import progress_bars
    from headwise.pruning.stream import PATTERN, PATTERN_CONFIG, STREAM, stream

    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        streamed = stream(
            loaded,
            texts,
            out=to.out,
            also=other,
            settings=settings,
            resume=to.resume,
            budget=budget(to.yes),
            progress=progress,
        )
    limit = settings.search.max_loss
    written = [STREAM, PATTERN, PATTERN_CONFIG]
    _show(streamed.sentences, streamed.tables()[:1], streamed.nested, limit, to, written)


def _read(also: Sequence[str]) -> TextSet | None:
    from headwise.texts.text_sets import read_texts

    return read_texts(list(also)) if also else None


def _show(
    sentences: Sequence[str],
    tables: Sequence[Table],
    nested: NestedSets,
    limit: float,
    to: Output,
    written: Sequence[str],
) -> None:
    """The answer, the other orders, and the files."""
    from headwise.cli.show import console, print_tables

    for line in sentences:
        console().print(line, markup=False)
    print_tables(tables)
    paths = [to.out / name for name in written]
    if to.figures and nested.order:
        from headwise.pruning.figures import curve_figures

        paths += curve_figures(nested, limit, to.out)
    wrote(paths)
