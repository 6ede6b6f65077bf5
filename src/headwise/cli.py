"""The command line: one thin function a verb, each calling one library function.

Nothing here imports torch before a verb runs, so that `headwise VERB --help` answers at once.
Exit codes: 0 done, 1 a known failure (one message, no traceback), 2 wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.models import LoadedModel
    from headwise.texts import TextSet

app = typer.Typer(
    name="headwise",
    help="Diagnose, repair, prove and measure the attention heads of a causal language model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "A hub id, a model directory, a .gguf file, or the word `patient`."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Out = Annotated[Path, typer.Option(help="Folder for what is written.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
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
Bos = Annotated[bool, typer.Option("--bos", help="Force a BOS token in front of each text.")]
SkipQueries = Annotated[int, typer.Option(help="Leave out the first N queries.", min=0)]
DeviceMap = Annotated[str | None, typer.Option(help="Passed to transformers, e.g. `auto`.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Also load pickled weights.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]


def main() -> None:
    """Run the command line; known failures become one message and exit code 1."""
    try:
        app()
    except HeadwiseError as error:
        sys.stderr.write(f"headwise: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("headwise: stopped; a run that had started can go on with --resume\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


def _texts(sources: list[str] | None, lines: bool, model: str) -> TextSet:
    from headwise.texts import default_texts, read_texts

    return read_texts(sources, lines=lines) if sources else default_texts(model)


def _load(
    name: str, dtype: str | None, device_map: str | None, pickle: bool, remote: bool
) -> LoadedModel:
    from headwise.models import load_model

    return load_model(
        name, dtype=dtype, device_map=device_map, allow_pickle=pickle, trust_remote_code=remote
    )


def _wrote(paths: list[Path], quiet: bool) -> None:
    from headwise.terminal import console

    folders = sorted({path.parent for path in paths})
    names = ", ".join(sorted(path.name for path in paths))
    console(quiet).print(f"wrote {names} in {', '.join(map(str, folders))}", style="dim")


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
    from headwise.diagnosis import Thresholds, diagnose as run
    from headwise.terminal import console, diagnosis_table, head_grid

    chosen = _texts(texts, lines, model)
    loaded = _load(model, dtype, device_map, allow_pickle, trust_remote_code)
    diagnosis = run(
        loaded.model, loaded.tokenizer, chosen, name=loaded.id, max_length=max_length,
        batch_size=batch_size, skip_queries=skip_queries, bos=bos,
        thresholds=Thresholds(dead, sink, low_entropy), quiet=quiet,
    )  # fmt: skip
    written = [diagnosis.save(out / "diagnosis.json")]
    if figures:
        from headwise.figures import diagnosis_figures

        written += diagnosis_figures(diagnosis, out)
    screen = console(quiet)
    screen.print(head_grid(diagnosis))
    screen.print(diagnosis_table(diagnosis))
    _wrote(written, quiet)


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
    from headwise.diagnosis import Diagnosis, diagnose as run
    from headwise.figures import save_figure, survey_panels
    from headwise.survey import read_diagnoses, survey_models, survey_table
    from headwise.terminal import console, table

    diagnoses: list[Diagnosis] = []
    for source in sources:
        if source.endswith(".json"):
            diagnoses += read_diagnoses(Path(source))
            continue
        loaded = _load(source, dtype, device_map, False, False)
        diagnoses.append(
            run(
                loaded.model, loaded.tokenizer, _texts(texts, lines, source), name=source,
                max_length=max_length, batch_size=batch_size, quiet=quiet,
            )
        )  # fmt: skip
    result = survey_models(diagnoses)
    written = [
        result.save(out / "survey.json"),
        *save_figure(survey_panels(result), out / "survey"),
    ]
    console(quiet).print(table("survey", *survey_table(result)))
    _wrote(written, quiet)


@app.command()
def check(
    model: Model,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Is the architecture known, and are its heads separable?"""
    from headwise.architectures import geometry_of, positions_of
    from headwise.check import check_heads
    from headwise.errors import UnknownArchitectureError
    from headwise.terminal import console

    loaded = _load(model, dtype, device_map, allow_pickle, trust_remote_code)
    result = check_heads(loaded.model, seed=seed)
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
    from headwise.diagnosis import Diagnosis
    from headwise.plans import make_plan
    from headwise.terminal import console, table

    made = make_plan(
        Diagnosis.load(diagnosis), heads=heads, preset=_choice(preset, "pass1", "pass2", "column"),
        column=column, init=_choice(init, "xavier_normal", "xavier_uniform", "match-healthy"),
        compensate=_choice(compensate, "none", "mean"),
        kv_policy=_choice(kv_policy, "whole-group", "queries-only"), seed=seed,
    )  # fmt: skip
    path = out if out.suffix in (".yaml", ".yml") else out / "plan.yaml"
    made.save(path)
    rows = [("targets", made.targets), ("watched", made.watched), *made.summary.items()]
    console(quiet).print(table(f"plan for {made.model.id}", ("", ""), rows))
    _wrote([path], quiet)


def _choice(value: Any, *known: str) -> Any:
    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
    return value


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
    from headwise.plans import SurgeryPlan
    from headwise.recipes import default_recipe, recipe_named
    from headwise.repair import MODES, repair as run
    from headwise.terminal import console
    from headwise.texts import default_corpus, default_texts, read_texts

    settings = recipe_named(recipe) if recipe else default_recipe(model)
    changes = {k: v for k, v in (("steps", steps), ("lr", lr)) if v is not None}
    texts = read_texts(corpus, lines=lines) if corpus else default_corpus(model)
    chosen = SurgeryPlan.load(plan)
    loaded = _load(model, dtype, device_map, allow_pickle, trust_remote_code)
    done = run(
        loaded.model, loaded.tokenizer, chosen, texts, settings.model_copy(update=changes),
        out=out, mode=_choice(mode, *MODES), seed=seed, resume=resume, force=force,
        excluded=default_texts(model).texts, tracker=tracker, quiet=quiet,
    )  # fmt: skip
    screen = console(quiet)
    if done.progress.rows:
        losses = [r for r in done.progress.rows if "validation_loss" in r]
        if losses:
            screen.print(
                f"{mode}: validation loss {losses[0]['validation_loss']:.4f} at step "
                f"{losses[0]['validated_at']}, best {done.progress.best_loss:.4f} at step "
                f"{done.progress.best_step} {done.progress.stopped}"
            )
    screen.print(f"{done.patch.num_weights:,} weights in the patch")
    _wrote(
        [out / name for name in ("patch.safetensors", "trace.jsonl", "maps.jsonl", "run.json")],
        quiet,
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
    from headwise.models import apply_patches
    from headwise.terminal import console
    from headwise.weights import Patch

    read = [Patch.load(path) for path in patches]
    loaded = _load(model, dtype or read[0].dtype, device_map, allow_pickle, trust_remote_code)
    apply_patches(loaded, read, out, undo=undo, force=force)
    console(quiet).print(
        f"wrote a model with {len(read)} patch(es) {'undone' if undo else 'merged'} in {out}"
    )


Patches = Annotated[
    list[Path] | None, typer.Option("--patch", help="patch.safetensors; several are stacked.")
]


def _patched(
    loaded: LoadedModel, paths: list[Path] | None, force: bool = False
) -> list[dict[str, Any]]:
    """Apply patches to a loaded model; returns what is recorded of them."""
    from headwise.weights import Patch

    applied = []
    for path in paths or []:
        patch = Patch.load(path)
        patch.apply(loaded.model, force=force)
        applied.append({**patch.info, "path": str(path), "num_weights": patch.num_weights})
    return applied


@app.command()
def evaluate(
    model: Model,
    patch: Patches = None,
    texts: Texts = None,
    lines: Lines = False,
    heads: Annotated[
        str | None,
        typer.Option(help="Heads to ablate one by one: a selection, `all` or `none`."),
    ] = None,
    max_length: MaxLength = 512,
    max_texts: Annotated[int, typer.Option(help="Texts used to judge heads.", min=2)] = 64,
    batch_size: BatchSize = 4,
    tasks: Annotated[
        list[str] | None, typer.Option(help="lm-evaluation-harness tasks to run as well.")
    ] = None,
    out: Out = Path("out/evaluation"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Apply patches to another base.")] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    from headwise.evaluation import Evaluation, chosen_heads, evaluate as run, paper_prompts
    from headwise.terminal import console, evaluation_tables

    sets = [_texts(texts, lines, model), paper_prompts()]
    loaded = _load(model, dtype, device_map, allow_pickle, trust_remote_code)
    base = loaded.describe()
    applied = _patched(loaded, patch, force)
    singles, joint = chosen_heads(loaded.model, heads, applied)
    found = run(
        loaded.model, loaded.tokenizer, sets, name=loaded.id, patches=applied, base=base,
        ablated=singles, joint=joint, window=max_length, max_texts=max_texts,
        batch_size=batch_size, quiet=quiet,
    )  # fmt: skip
    if tasks:
        from headwise.harness import run_tasks

        scores = run_tasks(loaded.model, loaded.tokenizer, tasks, batch_size=batch_size)
        found = Evaluation({**found.body, "tasks": scores})
    for item in evaluation_tables(found.body):
        console(quiet).print(item)
    _wrote([found.save(out / "evaluation.json")], quiet)


@app.command()
def complete(
    model: Model,
    patch: Patches = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line or .jsonl.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 0.92,
    batch_size: BatchSize = 10,
    out: Out = Path("out/completions"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    seed: Seed = 42,
    quiet: Quiet = False,
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    from headwise.artefacts import save_artefact, versions
    from headwise.completions import (
        Sampling,
        bundled_prompts,
        complete as run,
        completions_body,
        prompts_hash,
        read_prompts,
    )
    from headwise.terminal import console, table
    from headwise.weights import Patch

    chosen = bundled_prompts() if prompts is None else read_prompts(prompts)
    sampling = Sampling(new_tokens, temperature, top_p, seed)
    loaded = _load(model, dtype, device_map, False, False)
    base = loaded.describe()
    conditions = {"stock": run(loaded.model, loaded.tokenizer, chosen, sampling,
                               batch_size=batch_size, quiet=quiet)}  # fmt: skip
    for path in patch or []:
        one = Patch.load(path)
        one.apply(loaded.model)
        conditions[path.parent.name or path.stem] = run(
            loaded.model, loaded.tokenizer, chosen, sampling, batch_size=batch_size, quiet=quiet
        )
        one.undo(loaded.model)
    body = completions_body(
        conditions, sampling,
        {"model": base, "prompts_sha256": prompts_hash(chosen), "versions": versions()},
    )  # fmt: skip
    rows = [[n, *(s["all"][k] for k in ("words", "distinct_2", "repetition", "markup_share"))]
            for n, s in body["summary"].items()]  # fmt: skip
    columns = ("condition", "words", "distinct-2", "repetition", "markup")
    console(quiet).print(table("completions", columns, rows))
    _wrote([save_artefact(out / "completions.json", "completions", body)], quiet)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="diagnosis.json, evaluation.json or a folder")],
    after: Annotated[Path, typer.Argument(help="The same after the operation.")],
    plan: Annotated[Path | None, typer.Option(help="plan.yaml: gives the zones.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory: gives checkpoints.")] = None,
    out: Out = Path("out/comparison"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """What changed between two conditions: classes, drift by zone, columns, paired losses."""
    from headwise.comparison import compare as run_comparison, read_snapshot, run_maps
    from headwise.plans import SurgeryPlan
    from headwise.terminal import comparison_tables, console

    found = run_comparison(
        read_snapshot(before), read_snapshot(after),
        plan=None if plan is None else SurgeryPlan.load(plan),
        checkpoints=[] if run is None else run_maps(run),
    )  # fmt: skip
    for item in comparison_tables(found.body):
        console(quiet).print(item)
    _wrote([found.save(out / "comparison.json")], quiet)


if __name__ == "__main__":
    main()
