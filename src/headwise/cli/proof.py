"""Verbs that prove and measure: evaluate, complete, compare, capture, plasticity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import (
    Figures,
    Model,
    Out,
    Yes,
    alarm,
    announce,
    load_reader,
    minding,
    wrote,
)
from headwise.cli.verbs import verb
from headwise.keywords import BatchSize, Bos, ChangesOf, Patches, Seed, keywords_of
from headwise.models.settings import LoadSettings, ReaderSettings
from headwise.plasticity.settings import CaptureSettings, PlasticitySettings
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
    reading: ReaderSettings,
    out: Out = Path("out/evaluation"),
    yes: Yes = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.evaluate import evaluate as run
    from headwise.proof.view import evaluation_tables

    given = texts.read()
    loaded = load_reader(model, reading, settings.max_length)
    with resumable("nothing was written"), progress_bars() as progress:
        found = run(
            loaded,
            None if given is None else [given],
            **keywords_of(settings),
            budget=minding(yes),
            progress=progress,
        )
    print_tables(evaluation_tables(found))
    wrote([found.save(out / "evaluation.json")])
    alarm(found.alarms)


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
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.proof.completed_texts import read_prompts
    from headwise.proof.completions import complete as run
    from headwise.proof.view import completions_table

    chosen = None if prompts is None else read_prompts(prompts)
    loaded = load_reader(model, ReaderSettings(loading, bos))
    with resumable("nothing was written"), progress_bars() as progress:
        found = run(
            loaded, chosen, sampling, patches=patches, batch_size=batch_size, progress=progress
        )
    print_tables([completions_table(found)])
    _show_some(found)
    wrote([found.save(out / "completions.json")])
    alarm(found.alarms)


def _show_some(found: Completions) -> None:
    """The first two prompts through every condition, a line each."""
    from headwise.cli.show import console

    screen = console()
    for number in range(min(2, len(found.conditions["stock"]))):
        screen.print(f"> {found.conditions['stock'][number].prompt[:76]}", markup=False)
        for name, rows in found.conditions.items():
            text = " ".join(rows[number].completion.split())
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
    print_tables(comparison_tables(found))
    written = [found.save(out / "comparison.json")]
    if csv:
        written.append(write_text(out / "comparison.csv", found.to_csv()))
    wrote(written)
    alarm(found.alarms)


@verb(
    "Query and key vectors as Parquet.",
    example="capture MODEL --texts my_texts/ --out out/qk",
)
def capture(
    model: Model,
    texts: TextSettings,
    settings: CaptureSettings,
    reading: ReaderSettings,
    layers: Annotated[str | None, Doc("e.g. 0-5,29")] = None,
    heads: Annotated[str | None, Doc("Query heads: a selection or indices.")] = None,
    patches: Patches = (),
    batch_size: BatchSize = 4,
    resume: Annotated[bool, Doc("Go on with a capture.")] = False,
    out: Out = Path("out/qk"),
    yes: Yes = False,
) -> None:
    """Record query and key vectors as Parquet, in the sniffed-qk layout."""
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console
    from headwise.plasticity.capture import capture as run

    given = texts.read()
    loaded = load_reader(model, reading, settings.max_length)
    with resumable(f"add --resume to go on in {out}"), progress_bars() as progress:
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
            budget=minding(yes),
            progress=progress,
        )
    count, files = sum(captured.rows.values()), len(captured.rows)
    told = f"{count:,} query and key vectors, {files} files, in {captured.folder}"
    console().print(told + (f"\nnote: {captured.note}" if captured.note else ""))


@verb("How easily a head changes its preference of keys.", example="plasticity out/qk")
def plasticity(
    changes: Annotated[dict[str, Any], ChangesOf(PlasticitySettings)],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Captured vectors; all is discovered.")
    ] = None,
    config: Annotated[
        Path | None, Doc("Settings: a YAML file or a bundled name such as smollm2-135m.")
    ] = None,
    resume: Annotated[bool, Doc("Keep finished heads.")] = False,
    figures: Figures = True,
    out: Out = Path("out/plasticity"),
) -> None:
    """Measure how easily each head's preference between two keys changes as queries move on."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console

    if (folder is None) == (config is None):
        raise typer.BadParameter("pass either a folder of captured vectors or --config")
    console().print(f"reading {folder or config}", style="dim")
    from headwise.plasticity.figures import plasticity_figures
    from headwise.plasticity.run import measure_plasticity
    from headwise.plasticity.settings import load_settings

    going_on = resumable(f"add --resume to keep the finished heads in {out}")
    with going_on, progress_bars() as progress:
        found = measure_plasticity(
            load_settings(config) if config else folder,  # type: ignore[arg-type]
            out=out,
            resume=resume,
            progress=progress,
            **changes,
        )
    drawn = " and figures" if figures and found.heads else ""
    if drawn:
        plasticity_figures(found, out)
    _tell_plasticity(found, f"tables, plasticity.json{drawn} in {out}")


def _tell_plasticity(found: Plasticity, written: str) -> None:
    from headwise.cli.show import console, plasticity_table

    console().print(plasticity_table(found))
    console().print(f"{found.caps}\nwrote {written}", style="dim")
    _end_on_failures(found.failures)


def _end_on_failures(failures: Sequence[HeadFailure]) -> None:
    for failure in failures:
        typer.echo(
            f"headwise: L{failure.layer}H{failure.q_head} failed: {failure.reason}", err=True
        )
    if failures:
        raise typer.Exit(1)
