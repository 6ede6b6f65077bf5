"""Options and small steps that several verbs share. No torch at import: `--help` must be quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headwise.alarms import Alarm
    from headwise.models.loaded_model import LoadedModel
    from headwise.progress import Budget, Work
    from headwise.texts.text_sets import TextSet


MODEL_HELP = "A hub id, a model directory, a .gguf file, or the word `patient`."


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


Out = Annotated[Path, typer.Option(help="Folder for what is written.")]


Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**32 - 1)]


Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


Texts = Annotated[
    list[str] | None,
    typer.Option(
        help="Text files, folders or a hub dataset; default: a bundled set.", show_default=False
    ),
]


Lines = Annotated[bool, typer.Option("--lines", help="In .txt files every line is a text.")]


MaxLength = Annotated[int, typer.Option(help="Cut each text at this many tokens.", min=2)]


BatchSize = Annotated[int, typer.Option(help="Texts a forward pass.", min=1)]


Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="A BOS before each text; default: as the model needs it.",
        show_default=False,
    ),
]


SkipQueries = Annotated[int, typer.Option(help="Leave out the first N queries.", min=0)]


DeviceMap = Annotated[
    str | None, typer.Option(help="`auto`, or a .json of module: device (cpu, disk, 0).")
]


Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]


Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Read weights from disk layer by layer; default: if they exceed memory.",
        show_default=False,
    ),
]


AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Also load pickled weights.")]


RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]


Patches = Annotated[
    list[Path] | None, typer.Option("--patch", help="patch.safetensors; several are stacked.")
]


Figures = Annotated[bool, typer.Option(help="Draw the figures too.")]


Dead = Annotated[float, typer.Option(help="Dead above this first-token mass.")]


Sink = Annotated[float, typer.Option(help="A sink above this first-token mass.")]


LowEntropy = Annotated[float, typer.Option(help="Low entropy below this, nats.")]


Corpus = Annotated[list[str] | None, typer.Option(help="Text to train on.", show_default=False)]


RepairMode = Annotated[
    str, typer.Option(help="surgery, sham, gradient-only, ablate, random-heads or lora")
]


TreatmentName = Annotated[
    str | None,
    typer.Option("--treatment", help="release, centre, ... for all heads; auto: as each needs."),
]


DoseAmount = Annotated[float | None, typer.Option("--dose", help="How much of the treatment.")]


Keep = Annotated[
    list[str] | None,
    typer.Option(help="Texts on which the model is held to what it said.", show_default=False),
]


RecipeName = Annotated[str | None, typer.Option(help="A bundled recipe or a .yaml file.")]


Steps = Annotated[int | None, typer.Option(help="Optimizer steps.", min=0)]


Block = Annotated[int | None, typer.Option(help="Tokens a training block.", min=8)]


BlocksAPass = Annotated[
    int | None, typer.Option("--batch-size", help="Blocks a forward pass.", min=1)
]


LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate.")]


Tracker = Annotated[str | None, typer.Option(help="tensorboard, trackio, wandb ...")]


Adaptive = Annotated[
    bool,
    typer.Option("--adaptive/--fixed", help="Judge heads on as many texts as decide, or on all."),
]


Yes = Annotated[bool, typer.Option("--yes", help="Start even if it takes over 24 h or all memory.")]


def minding(quiet: bool, yes: bool) -> Budget:
    """What a verb gives to its library function: say what the work will cost, refuse the absurd."""
    from headwise.cli.show import console

    def mind(model: Any, work: Work) -> None:
        from headwise.cli.cost import estimate_cost, require_affordable

        cost = estimate_cost(model, work)
        console(quiet).print(str(cost), style="dim")
        require_affordable(cost, work, yes)

    return mind


def given_texts(sources: list[str] | None, lines: bool) -> TextSet | None:
    """The texts that were named, if any."""
    from headwise.texts.text_sets import read_texts

    return read_texts(sources, lines=lines) if sources else None


def chosen_texts(
    sources: list[str] | None, lines: bool, model: str, most: int | None = None
) -> TextSet:
    """The texts a verb works on: given ones, or the default of the model."""
    from headwise.texts.text_sets import TextSet, default_texts

    given = given_texts(sources, lines)
    if given is not None:
        return given
    found = default_texts(model)
    return found if most is None else TextSet(found.name, found.texts[:most])


def load(
    name: str,
    dtype: str | None,
    device_map: str | None,
    pickle: bool,
    remote: bool,
    *,
    bos: bool | None = None,
    stream: bool | None = None,
) -> LoadedModel:
    """Load a model with the usual options."""
    from headwise.models.architectures import is_proposed
    from headwise.models.loading import load_model

    loaded = load_model(
        name,
        dtype=dtype,
        device_map=device_map,
        allow_pickle=pickle,
        trust_remote_code=remote,
        bos=bos,
        stream=stream,
    )
    if is_proposed(loaded.model):
        _prove(loaded)
    return loaded


def _prove(loaded: LoadedModel) -> None:
    """Say that a model is read by a row that only its own shape suggested."""
    from headwise.forward.guard import prove_row

    prove_row(loaded.model)
    typer.echo(
        f"headwise: {loaded.model.config.model_type!r} has no row; its heads were found by shape "
        "and proved on the model itself (the row: headwise check MODEL --write-row)",
        err=True,
    )


def announce(name: str, quiet: bool) -> None:
    """Say that a model is being loaded before torch is, which alone takes seconds."""
    from headwise.cli.show import console

    console(quiet).print(f"loading {name}", style="dim")


def load_reader(
    name: str,
    how: tuple[str | None, str | None, bool, bool],
    bos: bool | None,
    quiet: bool,
    *,
    inherited: Sequence[tuple[bool | None, str]] = (),
    max_length: int | None = None,
    stream: bool | None = None,
) -> LoadedModel:
    """Load a model that is to read text, and say how its texts will start and where they end.

    `how` is dtype, device map, and whether pickles and remote code are allowed. `inherited` are the
    first tokens of artefacts that the work goes on from, with their names.
    """
    from headwise.cli.show import console
    from headwise.models.stored_weights import stored_weights

    screen = console(quiet)
    loaded = load(name, *how, bos=bos, stream=stream)
    stored = stored_weights(loaded.model)
    if stored is not None:
        size = f"{stored.num_bytes / 1e9:.1f} GB of weights stay on disk"
        screen.print(f"streaming: {size}; all texts go through one layer before the next is read")
    for value, source in inherited:
        loaded = loaded.inheriting(value, source)
    screen.print(str(loaded.first_token))
    if max_length is not None and loaded.length(max_length) < max_length:
        cut = loaded.length(max_length)
        screen.print(f"texts are cut at {cut} tokens, not {max_length}: the model has no more")
    return loaded


def patch_first_tokens(paths: Sequence[Path] | None) -> list[tuple[bool | None, str]]:
    """The first token that each patch was trained with."""
    from headwise.models.patch import Patch

    return [(Patch.load(path).info.bos, f"the patch {path}") for path in paths or ()]


def alarm(alarms: Sequence[Alarm], quiet: bool) -> None:
    """Say what makes the numbers not worth believing, last and in red."""
    from rich.console import Console

    from headwise.ranks import is_first

    silent, log = quiet or not is_first(), not sys.stderr.isatty()
    screen = Console(stderr=True, quiet=silent, highlight=False, soft_wrap=log)
    for found in alarms:
        screen.print(str(found), style="bold red", markup=False)


def wrote(paths: list[Path], quiet: bool) -> None:
    """Say which files were written."""
    from headwise.cli.show import console

    folders = sorted({path.parent for path in paths})
    drawings = [path for path in paths if path.suffix in (".png", ".svg")]
    names = sorted(path.name for path in paths if path not in drawings)
    if drawings:
        figures = len({path.stem for path in drawings})
        names.append(f"{figures} figure{'s' * (figures > 1)} (PNG, SVG)")
    told = f"wrote {', '.join(names)} in {', '.join(map(str, folders))}"
    console(quiet).print(told, style="dim")


def choice(value: Any, *known: str) -> Any:
    """A value of a fixed set; anything else is wrong usage (exit code 2)."""
    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
    return value
