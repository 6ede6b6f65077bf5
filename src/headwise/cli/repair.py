"""The verb that operates and trains: repair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Model, Output, alarm, announce, budget, load_reader, wrote
from headwise.cli.verbs import verb
from headwise.keywords import ChangesOf, keywords_of
from headwise.models.settings import LoadSettings
from headwise.surgery.plan_settings import RepairSettings
from headwise.surgery.recipe import Recipe, recipe_and_changes

if TYPE_CHECKING:
    from headwise.surgery.plan import SurgeryPlan
    from headwise.therapy.repair import RepairRun


@dataclass(frozen=True)
class RepairFiles:
    """What a repair reads: values of the library, files of the command line."""

    plan: Annotated[Path | None, Doc("plan.yaml; auto finds sick heads.")] = None
    corpus: Annotated[Sequence[str], Doc("Text to train on.")] = ()
    keep: Annotated[Sequence[str], Doc("Texts on which the model is held to what it said.")] = ()
    also: Annotated[Sequence[str], Doc("Other text that auto is judged on too.")] = ()
    recipe: Annotated[str | None, Doc("A bundled recipe or a .yaml file.")] = None
    lines: Annotated[bool, Doc("In .txt files every line is a text.")] = False
    limit: Annotated[int | None, Doc("Train on the first so many texts."), Ge(1)] = None


@verb(
    "repair",
    "Treat heads and train their slices only; controls too.",
    example="repair MODEL --plan plan.yaml --corpus my_texts/ --out out/run",
    without=("stream", "figures"),
)
def repair_verb(
    model: Model,
    loading: LoadSettings,
    files: RepairFiles,
    settings: RepairSettings,
    changes: Annotated[dict[str, Any], ChangesOf(Recipe)],
    to: Output = Output(Path("out/run")),
) -> None:
    """Operate on the plan's heads and train only their slices, or run a control."""
    from headwise.surgery.plan import SurgeryPlan
    from headwise.surgery.settings import RepairRequest
    from headwise.texts.text_sets import default_corpus, read_texts

    plan = SurgeryPlan.load(files.plan) if files.plan else None
    RepairRequest(plan=plan, **keywords_of(settings)).require_plan()
    announce(model)
    from headwise.cli.progress_bar import progress_bars
    from headwise.cli.show import console

    lines = files.lines
    corpus = read_texts(files.corpus, lines=lines) if files.corpus else default_corpus(model)
    corpus = corpus.first(files.limit)
    keep = read_texts(files.keep, lines=lines) if files.keep else None
    also = read_texts(files.also, lines=lines) if files.also else None
    recipe, own = recipe_and_changes(files.recipe)
    from headwise.therapy.repair import repair

    loaded = load_reader(model, loading)
    with resumable(f"add --resume to go on in {to.out}"), progress_bars() as progress:
        run = repair(
            loaded,
            plan,
            corpus,
            recipe,
            out=to.out,
            **keywords_of(settings),
            keep=keep,
            also=also,
            changes={**own, **changes},
            bos=loading.bos,
            resume=to.resume,
            budget=budget(to.yes),
            progress=progress,
        )
    for line in run_lines(run, plan):
        console().print(line)
    names = ("patch.safetensors", "trace.jsonl", "maps.jsonl", "run.json", "therapy.json")
    patch = run.out / "patch.safetensors"
    then: list[object] = ["evaluate", model, "--patch", patch, "--out", "out/after"]
    if run.outcome == "empty":
        then = ["prune", model]
    wrote([path for name in names if (path := run.out / name).exists()], then=then)
    alarm(run.alarms)


def run_lines(run: RepairRun, plan: SurgeryPlan | None) -> Iterator[str]:
    """What a run says of itself when it ends."""
    from headwise.therapy.values import Therapy

    state, name = run.state, run.settings.name
    if run.settings.request.auto:
        therapy = Therapy.load(run.out)
        yield f"auto: {therapy.sentence}"
        if therapy.better and therapy.judged is not None:
            yield f"auto: {therapy.other}"
            yield f"auto: along the context: {therapy.judged.positions}"
    if state.validations:
        step, first = next(iter(state.validations.items()))
        yield (
            f"{name}: validation loss {_number(run.stock_loss)} in stock, "
            f"{first:.4f} at step {step}, "
            f"best {state.best_loss:.4f} at step {state.best_step} {state.stopped}".rstrip()
        )
        yield from _worse(run)
    elif not state.rows and state.step == 0 and run.outcome != "empty":
        yield f"{name}: nothing was trained now (a control without training, or finished)"
    yield f"{run.patch.num_weights:,} weights in the patch" + _OUTCOMES[run.outcome]
    if run.mode == "lora":
        yield (
            "(whole projections after merging; trained were low-rank factors of about as many "
            "weights as the planned slices have"
            + (f", {plan.summary.trainable_weights:,})" if plan and plan.summary else ")")
        )


def _worse(run: RepairRun) -> Iterator[str]:
    """Said plainly, for two numbers in a line are easily misread as a success."""
    stock, best = run.stock_loss, run.state.best_loss
    if run.outcome in ("trained", "sham") and stock is not None and best > stock:
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
