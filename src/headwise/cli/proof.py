"""Verbs that prove and measure: evaluate, complete, compare, capture, plasticity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import app, resumable
from headwise.cli.options import (
    Adaptive,
    AllowPickle,
    BatchSize,
    Bos,
    DeviceMap,
    Dtype,
    Figures,
    Lines,
    MaxLength,
    Model,
    Out,
    Patches,
    Quiet,
    RemoteCode,
    Seed,
    Stream,
    Texts,
    Yes,
    alarm,
    announce,
    choice,
    chosen_texts,
    load_reader,
    minding,
    patch_first_tokens,
    wrote,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headwise.plasticity.run import Plasticity
    from headwise.plasticity.values import HeadFailure
    from headwise.proof.completed_texts import Completions

AblatedHeads = Annotated[
    str | None, typer.Option(help="Heads to ablate one by one: a selection, `all` or `none`.")
]


MaxPairs = Annotated[
    int | None, typer.Option(help="Sample a key bucket with more pairs; 200,000.", min=1)
]


MaxRows = Annotated[
    int | None, typer.Option(help="Sample a head with more vectors; 50,000.", min=2)
]


Tasks = Annotated[list[str] | None, typer.Option(help="lm-evaluation-harness tasks as well.")]


@app.command(
    short_help="Perplexity, and what each head is worth.",
    epilog="Example: headwise evaluate MODEL --patch out/run/patch.safetensors --out out/after",
)
def evaluate(
    model: Model,
    patch: Patches = None,
    texts: Texts = None,
    lines: Lines = False,
    heads: AblatedHeads = None,
    max_length: MaxLength = 512,
    max_texts: Annotated[int, typer.Option(help="Texts used to judge heads.", min=2)] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(help="Read no more tokens of each text set.", min=2)
    ] = None,
    adaptive: Adaptive = True,
    batch_size: BatchSize = 4,
    bos: Bos = None,
    tasks: Tasks = None,
    out: Out = Path("out/evaluation"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    stream: Stream = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Apply patches to another base.")] = False,
    seed: Seed = 0,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.evaluate import evaluate as run, paper_prompts
    from headwise.proof.view import evaluation_tables

    sets = [chosen_texts(texts, lines, model), paper_prompts()]
    how, before = (dtype, device_map, allow_pickle, trust_remote_code), patch_first_tokens(patch)
    loaded = load_reader(
        model, how, bos, quiet, inherited=before, max_length=max_length, stream=stream
    )
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        found = run(
            loaded,
            sets,
            patches=patch or [],
            heads=heads,
            max_length=max_length,
            max_texts=max_texts,
            max_tokens=max_tokens,
            batch_size=batch_size,
            tasks=tasks or [],
            adaptive=adaptive,
            force=force,
            seed=seed,
            budget=minding(quiet, yes),
            progress=progress,
        )
    print_tables(evaluation_tables(found), quiet)
    wrote([found.save(out / "evaluation.json")], quiet)
    alarm(found.alarms, quiet)


@app.command(
    short_help="Prompts with and without each patch, side by side.",
    epilog="Example: headwise complete MODEL --patch out/run/patch.safetensors",
)
def complete(
    model: Model,
    patch: Patches = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line or .jsonl.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to add.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", min=0.01, max=1)] = 0.92,
    batch_size: BatchSize = 10,
    bos: Bos = None,
    out: Out = Path("out/completions"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    seed: Seed = 42,
    quiet: Quiet = False,
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.completed_texts import Sampling, read_prompts
    from headwise.proof.completions import complete as run
    from headwise.proof.view import completions_table

    named = _named_patches(patch or [])
    chosen = None if prompts is None else read_prompts(prompts)
    how, before = (dtype, device_map, False, False), patch_first_tokens(patch)
    loaded = load_reader(model, how, bos, quiet, inherited=before)
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        found = run(
            loaded,
            chosen,
            Sampling(new_tokens, temperature, top_p, seed),
            patches=named,
            batch_size=batch_size,
            progress=progress,
        )
    print_tables([completions_table(found)], quiet)
    _show_some(found, quiet)
    wrote([found.save(out / "completions.json")], quiet)
    alarm(found.alarms, quiet)


def _show_some(found: Completions, quiet: bool) -> None:
    """The first two prompts through every condition, a line each."""
    from headwise.cli.show import console

    screen = console(quiet)
    for number in range(min(2, len(found.conditions["stock"]))):
        screen.print(f"> {found.conditions['stock'][number].prompt.text[:76]}", markup=False)
        for name, rows in found.conditions.items():
            text = " ".join(rows[number].text.split())
            screen.print(f"  {name}: {text}"[:80], style="dim", markup=False)


def _named_patches(paths: list[Path]) -> dict[str, list[Path]]:
    """A condition for each patch, called by its run directory."""
    names = [path.parent.name or path.stem for path in paths]
    if len({"stock", *names}) < len(names) + 1:
        raise typer.BadParameter(f"conditions need different names, these are {', '.join(names)}")
    return {name: [path] for name, path in zip(names, paths, strict=True)}


@app.command(
    short_help="What changed between two conditions, and how surely.",
    epilog="Example: headwise compare out/before out/after --run out/run",
)
def compare(
    before: Annotated[Path, typer.Argument(help="diagnosis.json, evaluation.json or a folder")],
    after: Annotated[Path, typer.Argument(help="The same after the operation.")],
    plan: Annotated[Path | None, typer.Option(help="plan.yaml: gives the zones.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory: gives checkpoints.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Also comparison.csv, a row a head.")] = False,
    out: Out = Path("out/comparison"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """What changed between two conditions: classes, drift by zone, columns, paired losses."""
    from headwise.artefacts import write_text
    from headwise.cli.show import print_tables
    from headwise.proof.compare import compare as run_comparison, read_snapshot
    from headwise.proof.trajectories import run_maps
    from headwise.proof.view import comparison_tables
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.run_settings import RunSettings

    found = run_comparison(
        read_snapshot(before),
        read_snapshot(after),
        plan=None if plan is None else SurgeryPlan.load(plan),
        checkpoints=[] if run is None else run_maps(run),
        whole_layers=run is not None and RunSettings.load(run).mode == "lora",
        seed=seed,
    )
    print_tables(comparison_tables(found), quiet)
    written = [found.save(out / "comparison.json")]
    if csv:
        written.append(write_text(out / "comparison.csv", found.to_csv()))
    wrote(written, quiet)
    alarm(found.alarms, quiet)


@app.command(
    short_help="Query and key vectors as Parquet.",
    epilog="Example: headwise capture MODEL --texts my_texts/ --out out/qk",
)
def capture(
    model: Model,
    texts: Texts = None,
    lines: Lines = False,
    layers: Annotated[str | None, typer.Option(help="e.g. 0-5,29")] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads: a selection or indices.")] = None,
    buckets: Annotated[str, typer.Option(help="uniform:SIZE or log2:FLOOR")] = "uniform:64",
    base_rate: Annotated[
        float | None, typer.Option(help="Rows kept a text and bucket; default: all.", min=1e-9)
    ] = None,
    pre_rope: Annotated[bool, typer.Option("--pre-rope", help="Before RoPE is applied.")] = False,
    layout: Annotated[str, typer.Option(help="new, or old (with a model folder)")] = "new",
    patch: Patches = None,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    bos: Bos = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a capture.")] = False,
    out: Out = Path("out/qk"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    stream: Stream = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Record query and key vectors as Parquet, in the sniffed-qk layout."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console
    from headwise.heads import select_in_layers
    from headwise.models.architectures import geometry_of
    from headwise.plasticity.capture import capture as run
    from headwise.plasticity.capture_info import CaptureSettings

    how, before = (dtype, device_map, allow_pickle, trust_remote_code), patch_first_tokens(patch)
    loaded = load_reader(
        model, how, bos, quiet, inherited=before, max_length=max_length, stream=stream
    )
    settings = CaptureSettings(
        buckets, base_rate, max_length, pre_rope, choice(layout, "new", "old"), seed
    )
    geometry = geometry_of(loaded.model)
    with resumable(f"add --resume to go on in {out}"), progress_bars(quiet) as progress:
        captured = run(
            loaded,
            chosen_texts(texts, lines, model),
            out=out,
            patches=patch or [],
            heads=select_in_layers(layers, heads, geometry.layers, geometry.num_heads),
            settings=settings,
            batch_size=batch_size,
            resume=resume,
            budget=minding(quiet, yes),
            progress=progress,
        )
    count, files = sum(captured.rows.values()), len(captured.rows)
    told = f"{count:,} query and key vectors, {files} files, in {captured.folder}"
    console(quiet).print(told + (f"\nnote: {captured.note}" if captured.note else ""))


def _pairs(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not (text.isdecimal() and text.isascii() and 0 < len(text) < 16 and int(text) > 0):
        raise typer.BadParameter(f"--pairs {text[:40]!r} is neither `all` nor a number above 0")
    return int(text)


@app.command(
    short_help="How easily a head changes its preference of keys.",
    epilog="Example: headwise plasticity out/qk",
)
def plasticity(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Captured vectors; all is discovered.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with the settings.")] = None,
    definition: Annotated[
        str | None, typer.Option(help="seed, full, empirical or linear-diagonal")
    ] = None,
    pairs: Annotated[str | None, typer.Option(help="Key pairs a cell: all, or a number.")] = None,
    max_pairs: MaxPairs = None,
    max_rows: MaxRows = None,
    heads: Annotated[str | None, typer.Option(help="A selection such as L0-3H2.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; all cores.", min=1)] = None,
    backend: Annotated[str | None, typer.Option(help="joblib or dask")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    legacy_columns: Annotated[
        bool, typer.Option("--legacy-columns", help="The public code's column names.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished heads.")] = False,
    figures: Figures = True,
    out: Out = Path("out/plasticity"),
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure how easily each head's preference between two keys changes as queries move on."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console

    if (folder is None) == (config is None):
        raise typer.BadParameter("pass either a folder of captured vectors or --config")
    console(quiet).print(f"reading {folder or config}", style="dim")
    from headwise.plasticity.figures import plasticity_figures
    from headwise.plasticity.run import measure_plasticity

    given = {
        "definition": choice(definition, "seed", "full", "empirical", "linear-diagonal"),
        "pairs": _pairs(pairs),
        "max_pairs": max_pairs,
        "max_tokens_per_head": max_rows,
        "heads": heads,
        "max_workers": workers,
        "backend": choice(backend, "joblib", "dask"),
        "scheduler": scheduler,
        "legacy_columns": legacy_columns or None,
        "seed": seed,
    }
    going_on = resumable(f"add --resume to keep the finished heads in {out}")
    with going_on, progress_bars(quiet) as progress:
        found = measure_plasticity(
            folder or config,  # type: ignore[arg-type]
            out=out,
            resume=resume,
            progress=progress,
            **{key: value for key, value in given.items() if value is not None},
        )
    drawn = " and figures" if figures and found.heads else ""
    if drawn:
        plasticity_figures(found, out)
    _tell_plasticity(found, f"tables, plasticity.json{drawn} in {out}", quiet)


def _tell_plasticity(found: Plasticity, written: str, quiet: bool) -> None:
    from headwise.cli.show import console, plasticity_table

    console(quiet).print(plasticity_table(found))
    console(quiet).print(f"{found.caps}\nwrote {written}", style="dim")
    _end_on_failures(found.failures)


def _end_on_failures(failures: Sequence[HeadFailure]) -> None:
    for failure in failures:
        typer.echo(
            f"headwise: L{failure.layer}H{failure.q_head} failed: {failure.reason}", err=True
        )
    if failures:
        raise typer.Exit(1)
