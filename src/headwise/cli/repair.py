"""The verb that operates and trains: repair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import app, resumable
from headwise.cli.options import (
    AllowPickle,
    Block,
    BlocksAPass,
    Bos,
    Corpus,
    DeviceMap,
    DoseAmount,
    Dtype,
    Keep,
    LearningRate,
    Lines,
    Model,
    Quiet,
    RecipeName,
    RemoteCode,
    RepairMode,
    Seed,
    Steps,
    Tracker,
    TreatmentName,
    Yes,
    alarm,
    announce,
    choice,
    load_reader,
    minding,
    wrote,
)

if TYPE_CHECKING:
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.repair import RepairRun


@app.command(
    short_help="Treat heads and train their slices only; controls too.",
    epilog="Example: headwise repair MODEL --plan plan.yaml --corpus my_texts/ --out out/run",
)
def repair(
    model: Model,
    plan: Annotated[Path | None, typer.Option(help="plan.yaml; auto finds sick heads.")] = None,
    corpus: Corpus = None,
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("out/run"),
    mode: RepairMode = "surgery",
    treatment: TreatmentName = None,
    dose: DoseAmount = None,
    keep: Keep = None,
    recipe: RecipeName = None,
    steps: Steps = None,
    lr: LearningRate = None,
    block: Block = None,
    batch_size: BlocksAPass = None,
    lines: Lines = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept other weights.")] = False,
    tracker: Tracker = None,
    bos: Bos = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Operate on the plan's heads and train only their slices, or run a control."""
    announce(model, quiet)
    from headwise.cli.progress_bar import progress_bars
    from headwise.surgery.modes import MODES
    from headwise.surgery.recipe import recipe_named
    from headwise.texts.text_sets import default_corpus, default_texts, read_texts
    from headwise.therapy.repair import repair as run

    chosen = _plan(plan, treatment, dose)
    texts = read_texts(corpus, lines=lines) if corpus else default_corpus(model)
    how = (dtype, device_map, allow_pickle, trust_remote_code)
    loaded = load_reader(model, how, bos, quiet, inherited=_bos_of(plan, chosen))
    with resumable(f"add --resume to go on in {out}"), progress_bars(quiet) as progress:
        done = run(
            loaded,
            chosen,
            texts,
            recipe_named(recipe) if recipe else None,
            changes=_given(steps=steps, lr=lr, block=block, batch_size=batch_size),
            out=out,
            mode=choice(mode, *MODES),
            treatment=treatment,
            dose=dose,
            seed=seed,
            resume=resume,
            force=force,
            excluded=default_texts(model).texts,
            tracker=tracker,
            keep=read_texts(keep, lines=lines) if keep else None,
            budget=minding(quiet, yes),
            progress=progress,
        )
    _tell(done, chosen, quiet)


def _given(**options: float | None) -> dict[str, float]:
    """The options that were named."""
    return {key: value for key, value in options.items() if value is not None}


def _tell(done: RepairRun, plan: SurgeryPlan | None, quiet: bool) -> None:
    from headwise.cli.show import console

    for line in repaired(done, plan):
        console(quiet).print(line)
    names = ("patch.safetensors", "trace.jsonl", "maps.jsonl", "run.json", "therapy.json")
    wrote([done.out / name for name in names if (done.out / name).exists()], quiet)
    alarm(done.alarms, quiet)


def _plan(path: Path | None, treatment: str | None, dose: float | None) -> SurgeryPlan | None:
    """The plan that is named; only `auto` can find the sick heads itself."""
    from headwise.errors import SelectionError
    from headwise.surgery.plan import SurgeryPlan

    if dose is not None and (treatment is None or not math.isfinite(dose)):
        raise typer.BadParameter(f"--dose {dose} needs --treatment and a finite number")
    if path is not None:
        return SurgeryPlan.load(path)
    if treatment != "auto":
        raise SelectionError("no plan", fix="pass --plan plan.yaml, or --treatment auto")
    return None


def _bos_of(path: Path | None, plan: SurgeryPlan | None) -> list[tuple[bool | None, str]]:
    return [] if plan is None else [(plan.bos, f"the plan {path}")]


def repaired(done: RepairRun, plan: SurgeryPlan | None) -> Iterator[str]:
    """What a run says of itself when it ends."""
    from headwise.therapy.record import THERAPY, Therapy

    state, name = done.state, str(done.mode)
    if (done.out / THERAPY).exists():
        name = "auto"
        yield f"auto: {Therapy.load(done.out).sentence}"
    if state.validations:
        first = state.validations[0]
        yield (
            f"{name}: validation loss {_number(done.stock_loss)} in stock, "
            f"{first.loss:.4f} at step {first.step}, "
            f"best {state.best_loss:.4f} at step {state.best_step} {state.stopped}".rstrip()
        )
        yield from _worse(done)
    elif not state.rows and state.step == 0 and done.outcome != "empty":
        yield f"{name}: nothing was trained now (a control without training, or finished)"
    yield f"{done.patch.num_weights:,} weights in the patch" + _OUTCOMES[done.outcome]
    if done.mode == "lora":
        yield (
            "(whole projections after merging; trained were low-rank factors of about as many "
            "weights as the planned slices have"
            + (f", {plan.summary.trainable_weights:,})" if plan and plan.summary else ")")
        )


def _worse(done: RepairRun) -> Iterator[str]:
    """Said plainly, for two numbers in a line are easily misread as a success."""
    stock, best = done.stock_loss, done.state.best_loss
    if done.outcome in ("trained", "sham") and stock is not None and best > stock:
        yield f"that is {best - stock:.4f} worse than stock: this patch harms the model so far"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


_OUTCOMES = {
    "": "",
    "trained": "",
    "sham": ": the sham, the operation without training (no step was better, or none asked for)",
    "unchanged": ": no trained state was better than the model as it was",
    "empty": ": leaving the model alone is best",
}
