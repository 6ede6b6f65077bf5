"""Verbs that look at heads and operate on them: diagnose, survey, check, plan, repair, apply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import app, resumable
from headwise.cli.options import (
    AllowPickle,
    BatchSize,
    Bos,
    DeviceMap,
    Dtype,
    Lines,
    MaxLength,
    Model,
    Out,
    Quiet,
    RemoteCode,
    Seed,
    SkipQueries,
    Texts,
    choice,
    chosen_texts,
    load,
    wrote,
)

if TYPE_CHECKING:
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.repair import RepairRun


@app.command()
def diagnose(
    model: Model,
    out: Out = Path("out/diagnosis"),
    texts: Texts = None,
    lines: Lines = False,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    skip_queries: SkipQueries = 0,
    bos: Bos = False,
    dead: Annotated[float, typer.Option(help="Dead above this first-token mass.")] = 0.95,
    sink: Annotated[float, typer.Option(help="A sink above this first-token mass.")] = 0.50,
    low_entropy: Annotated[float, typer.Option(help="Low entropy below this, nats.")] = 0.50,
    figures: Annotated[bool, typer.Option(help="Draw the figures too.")] = True,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Measure every head: where its attention goes, what it gives, whether it collapsed."""
    from headwise.cli.show import console, diagnosis_table, head_grid
    from headwise.diagnosis.diagnose import diagnose as run
    from headwise.diagnosis.values import Thresholds

    chosen = chosen_texts(texts, lines, model, most=120)  # enough for a map, in seconds
    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    diagnosis = run(
        loaded.model,
        loaded.tokenizer,
        chosen,
        name=loaded.id,
        max_length=max_length,
        batch_size=batch_size,
        skip_queries=skip_queries,
        bos=bos,
        thresholds=Thresholds(dead, sink, low_entropy),
        quiet=quiet,
    )
    written = [diagnosis.save(out / "diagnosis.json")]
    if figures:
        from headwise.diagnosis.figures import diagnosis_figures

        written += diagnosis_figures(diagnosis, out)
    screen = console(quiet)
    screen.print(head_grid(diagnosis))
    screen.print(diagnosis_table(diagnosis))
    wrote(written, quiet)


@app.command()
def survey(
    sources: Annotated[
        list[str], typer.Argument(metavar="MODEL|DIAGNOSIS.json...", help="Models or diagnoses.")
    ],
    out: Out = Path("out/survey"),
    texts: Texts = None,
    lines: Lines = False,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Compare several models, or saved diagnoses, in one table and one figure."""
    from headwise.cli.show import console, table
    from headwise.diagnosis.figures import survey_panels
    from headwise.diagnosis.survey import read_diagnoses, survey_models, survey_table
    from headwise.diagnosis.values import Diagnosis
    from headwise.drawing import save_figure

    diagnoses: list[Diagnosis] = []
    for source in sources:
        if source.endswith(".json"):
            diagnoses += read_diagnoses(Path(source))
            continue
        from headwise.diagnosis.diagnose import diagnose as run  # torch, for models alone

        loaded = load(source, dtype, device_map, False, False)
        diagnoses.append(
            run(
                loaded.model,
                loaded.tokenizer,
                chosen_texts(texts, lines, source),
                name=source,
                max_length=max_length,
                batch_size=batch_size,
                quiet=quiet,
            )
        )
    result = survey_models(diagnoses)
    written = [
        result.save(out / "survey.json"),
        *save_figure(survey_panels(result), out / "survey"),
    ]
    console(quiet).print(table("survey", *survey_table(result)))
    wrote(written, quiet)


@app.command()
def check(
    model: Model,
    out: Out = Path("out/check"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Is the architecture known, and are its heads separable?"""
    from headwise.artefacts import save_artefact
    from headwise.cli.show import console
    from headwise.errors import UnknownArchitectureError
    from headwise.forward.separability import check_heads
    from headwise.models.architectures import geometry_of, positions_of

    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    result = check_heads(loaded.model, seed=seed)
    path = save_artefact(out / "check.json", "check", {**result.to_json(), "model": loaded.id})
    geometry = geometry_of(loaded.model)
    if not result.passed:
        raise UnknownArchitectureError(
            f"the heads of {model} are not separable as the table says: {result.reason()}",
            fix="correct the row in headwise/architectures.py, or do not operate on this model",
        )
    console(quiet).print(
        f"{model}: {loaded.model.config.model_type}, {geometry.num_layers} layers x "
        f"{geometry.num_heads} heads ({geometry.num_kv_heads} key/value heads of "
        f"{geometry.head_dim}), {positions_of(loaded.model)} positions.\n"
        f"Heads are separable: {len(result.probes)} blocks moved exactly their own heads; "
        f"silencing equals ablation within {result.silencing_error:.0e}, the tap changes logits by "
        f"{result.logit_change:.0e} of their size."
    )
    wrote([path], quiet)


@app.command()
def plan(
    diagnosis: Annotated[Path, typer.Argument(help="diagnosis.json")],
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
    """Turn a diagnosis into a plan: which heads to operate on, and how."""
    from headwise.cli.show import console, table
    from headwise.diagnosis.values import Diagnosis
    from headwise.surgery.plan import make_plan
    from headwise.values import to_plain

    made = make_plan(
        Diagnosis.load(diagnosis),
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
    rows = [("targets", made.targets), ("watched", made.watched), *to_plain(made.summary).items()]
    console(quiet).print(table(f"plan for {made.model.id}", ("", ""), rows))
    wrote([path], quiet)


@app.command()
def repair(
    model: Model,
    plan: Annotated[Path, typer.Option(help="plan.yaml")],
    corpus: Annotated[
        list[str] | None, typer.Option(help="Text to train on.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("out/run"),
    mode: Annotated[
        str, typer.Option(help="surgery, sham, gradient-only, ablate, random-heads or lora")
    ] = "surgery",
    recipe: Annotated[str | None, typer.Option(help="A bundled recipe or a .yaml file.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", min=0)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    lines: Lines = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Accept a plan for other weights.")
    ] = False,
    tracker: Annotated[str | None, typer.Option(help="tensorboard, trackio, wandb ...")] = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Operate on the plan's heads and train only their slices, or run a control."""
    from headwise.cli.show import console
    from headwise.surgery.modes import MODES
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.recipe import default_recipe, recipe_named
    from headwise.surgery.repair import repair as run
    from headwise.texts.text_sets import default_corpus, default_texts, read_texts

    settings = recipe_named(recipe) if recipe else default_recipe(model)
    changes = {k: v for k, v in (("steps", steps), ("lr", lr)) if v is not None}
    texts = read_texts(corpus, lines=lines) if corpus else default_corpus(model)
    chosen = SurgeryPlan.load(plan)
    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    with resumable(f"add --resume to go on in {out}"):
        done = run(
            loaded.model,
            loaded.tokenizer,
            chosen,
            texts,
            settings.model_copy(update=changes),
            out=out,
            mode=choice(mode, *MODES),
            seed=seed,
            resume=resume,
            force=force,
            excluded=default_texts(model).texts,
            tracker=tracker,
            quiet=quiet,
        )
    for line in _repaired(done, chosen):
        console(quiet).print(line)
    wrote(
        [out / name for name in ("patch.safetensors", "trace.jsonl", "maps.jsonl", "run.json")],
        quiet,
    )


def _repaired(done: RepairRun, plan: SurgeryPlan) -> Iterator[str]:
    """What a run says of itself when it ends."""
    losses = [row for row in done.progress.rows if "validation_loss" in row]
    if losses:
        yield (
            f"{done.mode}: validation loss {losses[0]['validation_loss']:.4f} at step "
            f"{losses[0]['validated_at']}, best {done.progress.best_loss:.4f} at step "
            f"{done.progress.best_step} {done.progress.stopped}"
        )
    elif not done.progress.rows and done.progress.step == 0:
        yield f"{done.mode}: nothing was trained now (a control without training, or finished)"
    yield f"{done.patch.num_weights:,} weights in the patch"
    if done.mode == "lora":
        yield (
            "(whole projections after merging; trained were low-rank factors of about as many "
            "weights as the planned slices have"
            + (f", {plan.summary.trainable_weights:,})" if plan.summary else ")")
        )


@app.command()
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
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write an ordinary model directory with patches merged in, or taken out again."""
    from headwise.cli.show import console
    from headwise.models.merging import apply_patches
    from headwise.models.patch import Patch

    read = [Patch.load(path) for path in patches]
    loaded = load(model, dtype or read[0].dtype, device_map, allow_pickle, trust_remote_code)
    apply_patches(loaded, read, out, undo=undo, force=force)
    console(quiet).print(
        f"wrote a model with {len(read)} patch(es) {'undone' if undo else 'merged'} in {out}"
    )
