"""Options and small steps that several verbs share. No torch at import: `--help` must be quick."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from headwise.artefacts import is_there
from headwise.cli.app import quiet, resumable
from headwise.errors import ArtefactError
from headwise.keywords import keywords_of
from headwise.models.patient import PATIENTS
from headwise.models.settings import LoadSettings, model_path
from headwise.texts.settings import TextSettings

if TYPE_CHECKING:
    from headwise.alarms import Alarm
    from headwise.models.loaded_model import LoadedModel
    from headwise.progress import Budget, Progress, Work
    from headwise.texts.text_sets import TextSet


MODEL_HELP = "A hub id, a model directory, a .gguf file, or the word `patient`."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Out = Annotated[Path, Doc("Folder for what is written.")]
Figures = Annotated[bool, Doc("Draw the figures too.")]
Yes = Annotated[bool, Doc("Start even if it takes over 24 h or all memory.")]


@dataclass(frozen=True)
class Reading:
    """Which model reads which texts."""

    model: Model
    texts: TextSettings
    loading: LoadSettings

    def open(self, max_length: int) -> tuple[LoadedModel, TextSet | None]:
        """Load the model and the texts that are named, texts first: they are refused sooner."""
        announce(self.model)
        texts = self.texts.read()
        return load_reader(self.model, self.loading, max_length), texts

    @property
    def again(self) -> list[str]:
        """Model and texts for the next command."""
        named = [word for text in self.texts.texts for word in ("--texts", text)]
        return [self.model, *named, *["--lines"] * self.texts.lines]


@dataclass(frozen=True)
class Output:
    """Where a verb writes, whether it goes on with what is there, and how much it may take."""

    out: Out
    resume: Annotated[bool, Doc("Go on with what is in --out.")] = False
    figures: Figures = True
    yes: Yes = False


def budget(yes: bool) -> Budget:
    """Print the estimated cost of the work; raise if it is over the limits and `yes` is false."""
    from headwise.cli.show import console

    def check(model: Any, work: Work) -> None:
        from headwise.cost import estimate_cost, require_affordable

        cost = estimate_cost(model, work)
        console().print(str(cost), style="dim")
        require_affordable(cost, work, yes)

    return check


def load(name: str, loading: LoadSettings) -> LoadedModel:
    """Load a model; one that is read by a row that only its shape suggests is proved first."""
    from headwise.models.architectures import is_proposed
    from headwise.models.loading import load_model

    loaded = load_model(name, **keywords_of(loading))
    if is_proposed(loaded.model):
        from headwise.forward.separability import prove_row

        prove_row(loaded.model)
        typer.echo(
            f"headwise: {loaded.model.config.model_type!r} has no row; its heads were found by "
            "shape and proved on the model itself (the row: headwise check MODEL --write-row)",
            err=True,
        )
    return loaded


def announce(name: str) -> None:
    """Refuse a path to nothing, and say what is loaded, before torch is, which takes seconds."""
    from headwise.cli.show import console

    model_path(name)
    console().print(f"loading {name}", style="dim")


def load_reader(name: str, loading: LoadSettings, max_length: int | None = None) -> LoadedModel:
    """Load a model that is to read text, and say how its texts will start and where they end."""
    from headwise.cli.show import console
    from headwise.models.stored_weights import stored_weights

    screen = console()
    loaded = load(name, loading)
    stored = stored_weights(loaded.model)
    if stored is not None:
        size = f"{stored.num_bytes / 1e9:.1f} GB of weights stay on disk"
        screen.print(f"streaming: {size}; all texts go through one layer before the next is read")
    screen.print(str(loaded.first_token))
    if max_length is not None and loaded.length(max_length) < max_length:
        cut = loaded.length(max_length)
        screen.print(f"texts are cut at {cut} tokens, not {max_length}: the model has no more")
    return loaded


def alarm(alarms: Sequence[Alarm]) -> None:
    """Say what makes the numbers not worth believing, last and in red."""
    from headwise.cli.show import Screen
    from headwise.ranks import is_first

    silent, log = quiet.get() or not is_first(), not sys.stderr.isatty()
    screen = Screen(stderr=True, quiet=silent, highlight=False, soft_wrap=log)
    for one in alarms:
        screen.print(str(one), style="bold red", markup=False)


def require_files(paths: Sequence[Path]) -> None:
    """Refuse a file that is not there before torch is loaded, which takes seconds."""
    for path in paths:
        if not is_there(path):
            raise ArtefactError("no such file", where=path, fix="check the path")


def trained_on(model: str) -> list[str]:
    """The corpus option for the next command: the patient has one of its own."""
    return [model, *([] if model in PATIENTS else ["--corpus", "my_texts/"])]


@contextmanager
def in_one_go(out: Path) -> Iterator[Progress]:
    """Work that is written when it is done: no other process may write there meanwhile."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.integrity.locks import one_writer

    try:
        with resumable("nothing was written"), one_writer(out), progress_bars() as progress:
            yield progress
    finally:
        with suppress(OSError):  # of a command that failed no empty folder stays
            out.rmdir()


def wrote(paths: Sequence[Path], found: str = "", then: Sequence[object] = ()) -> None:
    """How a verb ends: the files, what was found, and the command that one would type next."""
    from headwise.cli.show import console

    folders = sorted({path.parent for path in paths})
    drawings = [path for path in paths if path.suffix in (".png", ".svg")]
    names = sorted(path.name for path in paths if path not in drawings)
    if drawings:
        figures = len({path.stem for path in drawings})
        names.append(f"{figures} figure{'s' * (figures > 1)} (PNG, SVG)")
    screen = console()
    if names:
        line = f"wrote {', '.join(names)} in {', '.join(map(str, folders))}"
        screen.print(line, style="dim")
    if found:
        screen.print(found)
    if then:
        screen.print(f"next: headwise {shlex.join(map(str, then))}", soft_wrap=True)
