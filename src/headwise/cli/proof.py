"""Verbs that prove and measure: evaluate, complete, compare, capture, plasticity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_types import Ge
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import (
    Figures,
    Model,
    Out,
    Quiet,
    Yes,
    alarm,
    announce,
    load_reader,
    minding,
    wrote,
)
from headwise.cli.verbs import verb
from headwise.keywords import Backend, BatchSize, Bos, Patches, Seed, Stream, keywords_of
from headwise.models.settings import LoadSettings
from headwise.plasticity.settings import CaptureSettings, Definition
from headwise.proof.settings import EvaluateSettings, Sampling
from headwise.texts.settings import TextSettings

if TYPE_CHECKING:
    from headwise.plasticity.run import Plasticity
    from headwise.plasticity.values import HeadFailure
    from headwise.proof.completed_texts import Completions


@verb(
    "Perplexity, and what each head is worth.",
    example="evaluate MODEL --patch out/run/patch.safetensors --out out/after",
)
def evaluate(
    model: Model,
    texts: TextSettings,
    settings: EvaluateSettings,
    loading: LoadSettings,
    bos: Bos = None,
    stream: Stream = None,
    out: Out = Path("out/evaluation"),
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.evaluate import evaluate as run
    from headwise.proof.view import evaluation_tables

    given = texts.read()
    cut = settings.max_length
    loaded = load_reader(model, loading, bos=bos, stream=stream, max_length=cut, quiet=quiet)
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        found = run(
            loaded,
            None if given is None else [given],
            **keywords_of(settings),
            budget=minding(quiet, yes),
            progress=progress,
        )
    print_tables(evaluation_tables(found), quiet)
    wrote([found.save(out / "evaluation.json")], quiet)
    alarm(found.alarms, quiet)


@verb(
    "Prompts with and without each patch, side by side.",
    example="complete MODEL --patch out/run/patch.safetensors",
)
def complete(
    model: Model,
    sampling: Sampling,
    loading: LoadSettings,
    patches: Patches = (),
    prompts: Annotated[Path | None, Doc("Prompts, one a line or .jsonl.")] = None,
    batch_size: BatchSize = 10,
    bos: Bos = None,
    out: Out = Path("out/completions"),
    quiet: Quiet = False,
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.completed_texts import read_prompts
    from headwise.proof.completions import complete as run
    from headwise.proof.view import completions_table

    chosen = None if prompts is None else read_prompts(prompts)
    loaded = load_reader(model, loading, quiet=quiet, bos=bos)
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        found = run(
            loaded, chosen, sampling, patches=patches, batch_size=batch_size, progress=progress
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


@verb(
    "What changed between two conditions, and how surely.",
    example="compare out/before out/after --run out/run",
)
def compare(
    before: Annotated[Path, typer.Argument(help="diagnosis.json, evaluation.json or a folder")],
    after: Annotated[Path, typer.Argument(help="The same after the operation.")],
    plan: Annotated[Path | None, Doc("plan.yaml: gives the zones.")] = None,
    run: Annotated[Path | None, Doc("Run directory: gives checkpoints.")] = None,
    csv: Annotated[bool, Doc("Also comparison.csv, a row a head.")] = False,
    out: Out = Path("out/comparison"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """What changed between two conditions: classes, drift by zone, columns, paired losses."""
    from headwise.artefacts import write_text
    from headwise.cli.show import print_tables
    from headwise.proof.compare import compare as run_comparison
    from headwise.proof.view import comparison_tables
    from headwise.surgery.plan import SurgeryPlan

    found = run_comparison(
        before,
        after,
        plan=None if plan is None else SurgeryPlan.load(plan),
        run=run,
        seed=seed,
    )
    print_tables(comparison_tables(found), quiet)
    written = [found.save(out / "comparison.json")]
    if csv:
        written.append(write_text(out / "comparison.csv", found.to_csv()))
    wrote(written, quiet)
    alarm(found.alarms, quiet)


@verb(
    "Query and key vectors as Parquet.",
    example="capture MODEL --texts my_texts/ --out out/qk",
)
def capture(
    model: Model,
    texts: TextSettings,
    settings: CaptureSettings,
    loading: LoadSettings,
    layers: Annotated[str | None, Doc("e.g. 0-5,29")] = None,
    heads: Annotated[str | None, Doc("Query heads: a selection or indices.")] = None,
    patches: Patches = (),
    batch_size: BatchSize = 4,
    resume: Annotated[bool, Doc("Go on with a capture.")] = False,
    bos: Bos = None,
    stream: Stream = None,
    out: Out = Path("out/qk"),
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Record query and key vectors as Parquet, in the sniffed-qk layout."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console
    from headwise.plasticity.capture import capture as run

    given = texts.read()
    cut = settings.max_length
    loaded = load_reader(model, loading, bos=bos, stream=stream, max_length=cut, quiet=quiet)
    with resumable(f"add --resume to go on in {out}"), progress_bars(quiet) as progress:
        captured = run(
            loaded,
            given,
            out=out,
            patches=patches,
            layers=layers,
            heads=heads,
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


@verb("How easily a head changes its preference of keys.", example="plasticity out/qk")
def plasticity(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Captured vectors; all is discovered.")
    ] = None,
    config: Annotated[Path | None, Doc("A YAML file with the settings.")] = None,
    definition: Annotated[Definition | None, Doc("How plasticity is defined.")] = None,
    pairs: Annotated[str | None, Doc("Key pairs a cell: all, or a number.")] = None,
    max_pairs: Annotated[
        int | None, Doc("Sample a key bucket with more pairs; 200,000."), Ge(1)
    ] = None,
    max_rows: Annotated[int | None, Doc("Sample a head with more vectors; 50,000."), Ge(2)] = None,
    heads: Annotated[str | None, Doc("A selection such as L0-3H2.")] = None,
    workers: Annotated[int | None, Doc("Processes; all cores."), Ge(1)] = None,
    backend: Annotated[Backend | None, Doc("joblib or dask")] = None,
    scheduler: Annotated[str | None, Doc("Address of a Dask scheduler.")] = None,
    legacy_columns: Annotated[bool, Doc("The public code's column names.")] = False,
    resume: Annotated[bool, Doc("Keep finished heads.")] = False,
    figures: Figures = True,
    out: Out = Path("out/plasticity"),
    seed: Annotated[int | None, Doc("Seed of everything random.")] = None,
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
        "definition": definition,
        "pairs": _pairs(pairs),
        "max_pairs": max_pairs,
        "max_tokens_per_head": max_rows,
        "heads": heads,
        "max_workers": workers,
        "backend": backend,
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
