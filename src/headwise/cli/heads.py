"""Verbs that look at heads and operate on them: diagnose, survey, check, plan, repair, apply."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.app import app, resumable
from headwise.cli.options import (
    AllowPickle,
    BatchSize,
    Bos,
    Dead,
    DeviceMap,
    Dtype,
    Figures,
    Lines,
    LowEntropy,
    MaxLength,
    Model,
    Out,
    Quiet,
    RemoteCode,
    Seed,
    Sink,
    SkipQueries,
    Stream,
    Texts,
    alarm,
    announce,
    choice,
    chosen_texts,
    given_texts,
    load,
    load_reader,
    wrote,
)


@app.command(
    short_help="Every head: where it looks, what it gives, its class.",
    epilog="Example: headwise diagnose MODEL --out out/d",
)
def diagnose(
    model: Model,
    out: Out = Path("out/diagnosis"),
    texts: Texts = None,
    lines: Lines = False,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    skip_queries: SkipQueries = 0,
    bos: Bos = None,
    dead: Dead = 0.95,
    sink: Sink = 0.50,
    low_entropy: LowEntropy = 0.50,
    figures: Figures = True,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    stream: Stream = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Measure every head: where its attention goes, what it gives, whether it collapsed."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console, head_grid, rich_table
    from headwise.diagnosis.diagnose import diagnose as run
    from headwise.diagnosis.values import Thresholds
    from headwise.diagnosis.view import diagnosis_table

    chosen = chosen_texts(texts, lines, model, most=120)  # enough for a map, in seconds
    how = (dtype, device_map, allow_pickle, trust_remote_code)
    loaded = load_reader(model, how, bos, quiet, max_length=max_length, stream=stream)
    with resumable("nothing was written"), progress_bars(quiet) as progress:
        diagnosis = run(
            loaded,
            chosen,
            max_length=max_length,
            batch_size=batch_size,
            skip_queries=skip_queries,
            thresholds=Thresholds(dead, sink, low_entropy),
            progress=progress,
        )
    written, screen = [diagnosis.save(out / "diagnosis.json")], console(quiet)
    if figures:
        screen.print("drawing figures", style="dim")
        from headwise.diagnosis.figures import diagnosis_figures

        written += diagnosis_figures(diagnosis, out)
    screen.print(head_grid(diagnosis))
    screen.print(rich_table(diagnosis_table(diagnosis)))
    wrote(written, quiet)
    alarm(diagnosis.alarms, quiet)


@app.command(
    short_help="Several models or diagnoses in one table and figure.",
    epilog="Example: headwise survey out/a/diagnosis.json out/b/diagnosis.json",
)
def survey(
    sources: Annotated[
        list[str], typer.Argument(metavar="MODEL|DIAGNOSIS.json...", help="Models or diagnoses.")
    ],
    out: Out = Path("out/survey"),
    texts: Texts = None,
    lines: Lines = False,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    bos: Bos = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Compare several models, or saved diagnoses, in one table and one figure."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import print_tables
    from headwise.diagnosis.figures import survey_panels
    from headwise.diagnosis.survey import survey as run
    from headwise.diagnosis.view import survey_table
    from headwise.drawing import save_figure

    with resumable("nothing was written"), progress_bars(quiet) as progress:
        result = run(
            sources,
            texts=given_texts(texts, lines),
            max_length=max_length,
            batch_size=batch_size,
            dtype=dtype,
            device_map=device_map,
            bos=bos,
            progress=progress,
        )
    written = [
        result.save(out / "survey.json"),
        *save_figure(survey_panels(result), out / "survey"),
    ]
    print_tables([survey_table(result)], quiet)
    wrote(written, quiet)


@app.command(
    short_help="Is the family known, and are its heads separable?",
    epilog="Example: headwise check MODEL",
)
def check(
    model: Model,
    out: Out = Path("out/check"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    write_row: Annotated[
        bool, typer.Option("--write-row", help="Print the model's row, to contribute it.")
    ] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Is the architecture known, and are its heads separable?"""
    announce(model, quiet)
    from headwise.artefacts import save_artefact
    from headwise.cli.show import check_text, console
    from headwise.errors import UnknownArchitectureError
    from headwise.forward.separability import check as run

    screen = console(quiet)
    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    screen.print("moving every kind of slice, one at a time", style="dim")
    result = run(loaded.model, seed=seed)
    path = save_artefact(out / "check.json", "check", {**result.to_json(), "model": loaded.id})
    if not result.passed:
        raise UnknownArchitectureError(
            f"the heads of {model} are not separable as the table says: {result.reason()}",
            fix="correct its row in src/headwise/models/families/rows.py, or leave it alone",
        )
    screen.print(check_text(loaded, result))
    if write_row:
        from headwise.models.architectures import architecture_of
        from headwise.models.families.proposal import row_text

        typer.echo(row_text(loaded.model.config.model_type, architecture_of(loaded.model)))
    wrote([path], quiet)


@app.command(
    short_help="Which heads are operated on, and how.",
    epilog="Example: headwise plan out/d --heads 'sick & layer >= 4' --out plan.yaml",
)
def plan(
    diagnosis: Annotated[
        Path, typer.Argument(help="diagnosis.json, triage.json, evaluation.json or a folder.")
    ],
    heads: Annotated[str | None, typer.Option(help="e.g. 'L5-22H9-15 & sick'")] = None,
    preset: Annotated[str | None, typer.Option(help="pass1, pass2 or column")] = None,
    column: Annotated[int | None, typer.Option(help="Head index for the preset column.")] = None,
    init: Annotated[str, typer.Option(help="xavier_normal, xavier_uniform, match-healthy")] = (
        "xavier_normal"
    ),
    compensate: Annotated[str, typer.Option(help="none or mean")] = "none",
    kv_policy: Annotated[str, typer.Option(help="whole-group or queries-only")] = "whole-group",
    out: Annotated[Path, typer.Option(help="The plan file.")] = Path("plan.yaml"),
    seed: Seed = 42,
    quiet: Quiet = False,
) -> None:
    """Turn a diagnosis into a plan: which heads to operate on, and how.

    \b
    A selection joins parts with & (and), - (without), comma (or) and parentheses:
      L5-22H9-15          layers 5 to 22, heads 9 to 15, both from 0
      sick dead sink low_entropy healthy all band       (band: ALiBi models only)
      asleep parked working empty constant undecided    with a triage.json
      first_token_mass > 0.9 & entropy < 1              any measure of the diagnosis
      ablation_cost < 0.001                             with an evaluation.json
      layer >= 4, head < 2

    \b
    Example: headwise plan out/d --heads 'sick & first_token_mass > 0.9' --out plan.yaml
    """
    from headwise.cli.show import print_tables
    from headwise.proof.compare import read_snapshot
    from headwise.surgery.plan import make_plan

    found = read_snapshot(diagnosis)
    costs = {} if found.evaluation is None else {"ablation_cost": found.evaluation.cost_map()}
    made = make_plan(
        found.triage or found.diagnosis,
        measures=costs,
        heads=heads,
        preset=choice(preset, "pass1", "pass2", "column"),
        column=column,
        init=choice(init, "xavier_normal", "xavier_uniform", "match-healthy"),
        compensate=choice(compensate, "none", "mean"),
        kv_policy=choice(kv_policy, "whole-group", "queries-only"),
        seed=seed,
    )
    path = out if out.suffix in (".yaml", ".yml") else out / "plan.yaml"
    made.save(path)
    print_tables([made.table()], quiet)
    wrote([path], quiet)


@app.command(
    short_help="An ordinary model directory with the patch; --undo.",
    epilog="Example: headwise apply MODEL out/run/patch.safetensors --out repaired/",
)
def apply(
    model: Model,
    patches: Annotated[list[Path], typer.Argument(metavar="PATCH...", help="patch.safetensors")],
    out: Out = Path("out/model"),
    undo: Annotated[bool, typer.Option("--undo", help="Take the patches out again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept another base.")] = False,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Write an ordinary model directory with patches merged in, or taken out again."""
    announce(model, quiet)
    from headwise.cli.show import console
    from headwise.handover.merging import apply_patches
    from headwise.models.patch import Patch

    read = [Patch.load(path) for path in patches]
    loaded = load(model, dtype or read[0].dtype, device_map, allow_pickle, trust_remote_code)
    apply_patches(loaded, read, out, undo=undo, force=force)
    console(quiet).print(
        f"wrote a model with {len(read)} patch(es) {'undone' if undo else 'merged'} in {out}"
    )
