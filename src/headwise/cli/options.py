"""Options and small steps that several verbs share. No torch at import: `--help` must be quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from headwise.cli.app import quiet
from headwise.keywords import keywords_of
from headwise.models.settings import LoadSettings, ReaderSettings

if TYPE_CHECKING:
    from headwise.alarms import Alarm
    from headwise.models.loaded_model import LoadedModel
    from headwise.progress import Budget, Work


MODEL_HELP = "A hub id, a model directory, a .gguf file, or the word `patient`."


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


Out = Annotated[Path, Doc("Folder for what is written.")]


Figures = Annotated[bool, Doc("Draw the figures too.")]


Yes = Annotated[bool, Doc("Start even if it takes over 24 h or all memory.")]


def minding(yes: bool) -> Budget:
    """What a verb gives to its library function: say what the work will cost, refuse the absurd."""
    from headwise.cli.show import console

    def mind(model: Any, work: Work) -> None:
        from headwise.cost import estimate_cost, require_affordable

        cost = estimate_cost(model, work)
        console().print(str(cost), style="dim")
        require_affordable(cost, work, yes)

    return mind


def load(
    name: str, loading: LoadSettings, *, bos: bool | None = None, stream: bool | None = None
) -> LoadedModel:
    """Load a model; one that is read by a row that only its shape suggests is proved first."""
    from headwise.models.architectures import is_proposed
    from headwise.models.loading import load_model

    loaded = load_model(name, **keywords_of(loading), bos=bos, stream=stream)
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
    """Say that a model is being loaded before torch is, which alone takes seconds."""
    from headwise.cli.show import console

    console().print(f"loading {name}", style="dim")


def load_reader(name: str, reading: ReaderSettings, max_length: int | None = None) -> LoadedModel:
    """Load a model that is to read text, and say how its texts will start and where they end."""
    from headwise.cli.show import console
    from headwise.models.stored_weights import stored_weights

    screen = console()
    loaded = load(name, reading.loading, bos=reading.bos, stream=reading.stream)
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


def wrote(paths: list[Path]) -> None:
    """Say which files were written."""
    from headwise.cli.show import console

    folders = sorted({path.parent for path in paths})
    drawings = [path for path in paths if path.suffix in (".png", ".svg")]
    names = sorted(path.name for path in paths if path not in drawings)
    if drawings:
        figures = len({path.stem for path in drawings})
        names.append(f"{figures} figure{'s' * (figures > 1)} (PNG, SVG)")
    line = f"wrote {', '.join(names)} in {', '.join(map(str, folders))}"
    console().print(line, style="dim")
