"""Verbs that prove and measure: evaluate, complete, compare, capture, plasticity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import (
    Figures,
    Model,
    Out,
    Output,
    Reading,
    Yes,
    alarm,
    announce,
    budget,
    in_one_go,
    load_reader,
    require_files,
    wrote,
)
from headwise.cli.verbs import verb
from headwise.keywords import BatchSize, ChangesOf, Patches, Seed, keywords_of
from headwise.models.settings import LoadSettings
from headwise.plasticity.settings import CaptureSettings, PlasticitySettings
from headwise.proof.settings import EvaluateSettings, Sampling

if TYPE_CHECKING:
    from headwise.proof.completed_texts import Completions


@verb(
    "evaluate",
    "Perplexity, and what each head is worth.",
    example="evaluate MODEL --patch out/run/patch.safetensors --out out/after",
)
def evaluate_verb(
    reading: Reading,
    settings: EvaluateSettings,
    out: Out = Path("out/evaluation"),
    yes: Yes = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    require_files(settings.patches)
    with in_one_go(out) as progress:
        loaded, texts = reading.open(settings.max_length)
        from headwise.proof.evaluate import evaluate

        evaluation = evaluate(
            loaded,
            None if texts is None else [texts],
            **keywords_of(settings),
            budget=budget(yes),
            progress=progress,
        )
        path = evaluation.save(out / "evaluation.json")
    from headwise.cli.show import print_tables
    from headwise.proof.view import evaluation_line, evaluation_tables

    print_tables(evaluation_tables(evaluation))
    then: list[object] = ["diagnose", *reading.again]
    if settings.patches:
        then = ["report", settings.patches[-1].parent, "--after", out]
    elif evaluation.heads.ablation_zero:
        then = ["plan", out, "--heads", "ablation_cost < 0.001"]
    wrote([path], evaluation_line(evaluation), then)
    alarm(evaluation.alarms)


@verb(
    "complete",
    "Prompts with and without each patch, side by side.",
    example="complete MODEL --patch out/run/patch.safetensors",
    without=("stream",),
)
def complete_verb(
    model: Model,
    sampling: Sampling,
    loading: LoadSettings,
    patches: Patches = (),
    prompts: Annotated[Path | None, Doc("Prompts, one a line or .jsonl.")] = None,
    batch_size: BatchSize = 10,
    out: Out = Path("out/completions"),
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    require_files(patches)
    from headwise.proof.completed_texts import read_prompts

    chosen = None if prompts is None else read_prompts(prompts)
    announce(model)
    with in_one_go(out) as progress:
        from headwise.proof.completions import complete

        loaded = load_reader(model, loading)
        completions = complete(
            loaded, chosen, sampling, patches=patches, batch_size=batch_size, progress=progress
        )
        path = completions.save(out / "completions.json")
    from headwise.cli.show import print_tables
    from headwise.proof.view import completions_table

    print_tables([completions_table(completions)])
    _show_some(completions)
    told = [word for patch in patches for word in ("--patch", patch)]
    found = "two of the prompts are shown; a completion proves nothing: measure the loss"
    wrote([path], found, ["evaluate", model, *told])
    alarm(completions.alarms)


def _show_some(completions: Completions) -> None:
    """The first two prompts through every condition, a line each."""
    from headwise.cli.show import console

    screen = console()
    for number in range(min(2, len(completions.conditions["stock"]))):
        screen.print(f"> {completions.conditions['stock'][number].prompt[:76]}", markup=False)
        for name, rows in completions.conditions.items():
            text = " ".join(rows[number].completion.split())
            screen.print(f"  {name}: {text}"[:80], style="dim", markup=False)


@verb(
    "compare",
    "What changed between two conditions, and how surely.",
    example="compare out/before out/after --run out/run",
)
def compare_verb(
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
    from headwise.proof.compare import compare
    from headwise.proof.view import comparison_tables
    from headwise.surgery.plan import SurgeryPlan

    planned = None if plan is None else SurgeryPlan.load(plan)
    comparison = compare(before, after, plan=planned, run=run, seed=seed)
    print_tables(comparison_tables(comparison))
    written = [comparison.save(out / "comparison.json")]
    if csv:
        written.append(write_text(out / "comparison.csv", comparison.to_csv()))
    moves = comparison.transitions
    found = f"sick heads: {moves.counts_before['sick']} before, {moves.counts_after['sick']} after"
    for name, loss in comparison.losses.items():
        found += f"; loss on {name}: {loss.verdict}"
    wrote(written, found, ["report", run] if run else [])
    alarm(comparison.alarms)


@verb(
    "capture",
    "Query and key vectors as Parquet.",
    example="capture MODEL --texts my_texts/ --out out/qk",
    without=("figures",),
)
def capture_verb(
    reading: Reading,
    settings: CaptureSettings,
    layers: Annotated[str | None, Doc("e.g. 0-5,29")] = None,
    heads: Annotated[str | None, Doc("Query heads: a selection or indices.")] = None,
    patches: Patches = (),
    batch_size: BatchSize = 4,
    to: Output = Output(Path("out/qk")),
) -> None:
    """Record query and key vectors as Parquet, in the sniffed-qk layout."""
    require_files(patches)
    loaded, texts = reading.open(settings.max_length)
    from headwise.cli.progress_bar import progress_bars
    from headwise.plasticity.capture import capture

    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        captured = capture(
            loaded,
            texts,
            out=to.out,
            patches=patches,
            layers=layers,
            heads=heads,
            settings=settings,
            batch_size=batch_size,
            resume=to.resume,
            budget=budget(to.yes),
            progress=progress,
        )
    count, files = sum(captured.rows.values()), len(captured.rows)
    note = f"\nnote: {captured.note}" if captured.note else ""
    found = f"{count:,} query and key vectors, {files} files, in {captured.folder}{note}"
    wrote([], found, ["plasticity", captured.folder])


@verb(
    "plasticity",
    "How easily a head changes its preference of keys.",
    example="plasticity out/qk",
)
def plasticity_verb(
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
    from headwise.cli.show import console, plasticity_table

    if (folder is None) == (config is None):
        raise typer.BadParameter("pass either a folder of captured vectors or --config")
    console().print(f"reading {folder or config}", style="dim")
    from headwise.plasticity.figures import plasticity_figures
    from headwise.plasticity.run import measure_plasticity
    from headwise.plasticity.settings import load_settings

    going_on = resumable(f"add --resume to keep the finished heads in {out}")
    with going_on, progress_bars() as progress:
        plasticity = measure_plasticity(
            load_settings(config) if config else folder,  # type: ignore[arg-type]
            out=out,
            resume=resume,
            progress=progress,
            **changes,
        )
    drawn = " and figures" if figures and plasticity.heads else ""
    if drawn:
        plasticity_figures(plasticity, out)
    screen = console()
    screen.print(plasticity_table(plasticity))
    screen.print(f"{plasticity.caps}\nwrote tables, plasticity.json{drawn} in {out}", style="dim")
    values = {f"L{h.layer}H{h.q_head}": h.ap_overall for h in plasticity.heads}
    known = {name: value for name, value in values.items() if value is not None}
    if known:
        firmest, mean = min(known, key=known.__getitem__), sum(known.values()) / len(known)
        wrote([], f"mean plasticity {mean:.2f}; the firmest head: {firmest}, {known[firmest]:.2f}")
    for failure in plasticity.failures:
        typer.echo(
            f"headwise: L{failure.layer}H{failure.q_head} failed: {failure.reason}", err=True
        )
    if plasticity.failures:
        raise typer.Exit(1)
