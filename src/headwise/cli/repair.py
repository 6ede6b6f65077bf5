"""The verb that operates and trains: repair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Model, Yes, alarm, announce, load_reader, minding, wrote
from headwise.cli.verbs import verb
from headwise.keywords import Bos, ChangesOf, Seed
from headwise.models.settings import LoadSettings, ReaderSettings
from headwise.surgery.plan_settings import Mode
from headwise.surgery.recipe import Recipe, recipe_named

if TYPE_CHECKING:
    from headwise.surgery.plan import SurgeryPlan
    from headwise.therapy.repair import RepairRun


@verb(
    "Treat heads and train their slices only; controls too.",
    example="repair MODEL --plan plan.yaml --corpus my_texts/ --out out/run",
)
def repair(
    model: Model,
    loading: LoadSettings,
    changes: Annotated[dict[str, Any], ChangesOf(Recipe)],
    plan: Annotated[Path | None, Doc("plan.yaml; auto finds sick heads.")] = None,
    corpus: Annotated[Sequence[str], Doc("Text to train on.")] = (),
    out: Annotated[Path, Doc("The run directory.")] = Path("out/run"),
    mode: Annotated[Mode, Doc("The operation, or a control.")] = "surgery",
    treatment: Annotated[
        str | None, Doc("release, centre, ... for all heads; auto: as each needs.")
    ] = None,
    dose: Annotated[float | None, Doc("How much of the treatment.")] = None,
    keep: Annotated[Sequence[str], Doc("Texts on which the model is held to what it said.")] = (),
    recipe: Annotated[str | None, Doc("A bundled recipe or a .yaml file.")] = None,
    lines: Annotated[bool, Doc("In .txt files every line is a text.")] = False,
    resume: Annotated[bool, Doc("Go on with the run in --out.")] = False,
    force: Annotated[bool, Doc("Accept other weights.")] = False,
    tracker: Annotated[str | None, Doc("tensorboard, trackio, wandb ...")] = None,
    bos: Bos = None,
    seed: Seed = 0,
    yes: Yes = False,
) -> None:
    """Operate on the plan's heads and train only their slices, or run a control."""
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.settings import RepairRequest
    from headwise.texts.text_sets import default_corpus, default_texts, read_texts

    if dose is not None and (treatment is None or not math.isfinite(dose)):
        raise typer.BadParameter(f"--dose {dose} needs --treatment and a finite number")
    chosen = SurgeryPlan.load(plan) if plan else None
    texts = read_texts(corpus, lines=lines) if corpus else default_corpus(model)
    kept = read_texts(keep, lines=lines) if keep else None
    excluded = default_texts(model)
    request = RepairRequest(  # refused, if it is contradictory, before the model is loaded
        plan=chosen,
        mode=mode,
        treatment=treatment,
        dose=dose,
        recipe=recipe_named(recipe) if recipe else None,
        changes=changes,
        seed=seed,
        keep=None if kept is None else kept.describe(),
        excluded=excluded.describe(),
        bos=bos,
        force=force,
        tracker=tracker,
    )
    request.require_plan()
    from headwise.therapy.repair import fulfil

    loaded = load_reader(model, ReaderSettings(loading, bos))
    with resumable(f"add --resume to go on in {out}"), progress_bars() as progress:
        done = fulfil(
            loaded,
            request,
            texts,
            out,
            keep=kept,
            excluded=excluded.texts,
            resume=resume,
            budget=minding(yes),
            progress=progress,
        )
    _tell(done, chosen)


def _tell(done: RepairRun, plan: SurgeryPlan | None) -> None:
    from headwise.cli.show import console

    for line in repaired(done, plan):
        console().print(line)
    names = ("patch.safetensors", "trace.jsonl", "maps.jsonl", "run.json", "therapy.json")
    wrote([done.out / name for name in names if (done.out / name).exists()])
    alarm(done.alarms)


def repaired(done: RepairRun, plan: SurgeryPlan | None) -> Iterator[str]:
    """What a run says of itself when it ends."""
    from headwise.therapy.values import Therapy

    state, name = done.state, done.settings.name
    if done.settings.request.auto:
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
