"""Verbs that look at heads and operate on them: diagnose, survey, check, plan, repair, apply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from headwise.cli.options import (
    Figures,
    Model,
    Out,
    Reading,
    alarm,
    announce,
    in_one_go,
    load,
    require_files,
    trained_on,
    wrote,
)
from headwise.cli.verbs import verb
from headwise.diagnosis.settings import DiagnoseSettings
from headwise.keywords import Seed, keywords_of
from headwise.models.settings import LoadSettings
from headwise.progress import stage
from headwise.surgery.plan_settings import PlanSettings
from headwise.texts.settings import TextSettings

if TYPE_CHECKING:
    from headwise.models.loaded_model import LoadedModel


@verb(
    "diagnose",
    "Every head: where it looks, what it gives, its class.",
    example="diagnose MODEL --out out/d",
)
def diagnose_verb(
    reading: Reading,
    settings: DiagnoseSettings,
    figures: Figures = True,
    out: Out = Path("out/diagnosis"),
) -> None:
    """Measure every head: where its attention goes, what it gives, whether it collapsed."""
    with in_one_go(out) as progress:
        loaded, texts = reading.open(settings.max_length)
        from headwise.diagnosis.diagnose import diagnose

        diagnosis = diagnose(loaded, texts, **keywords_of(settings), progress=progress)
        written = [diagnosis.save(out / "diagnosis.json")]
        if figures:
            stage("drawing figures", progress)
            from headwise.diagnosis.figures import diagnosis_figures

            written += diagnosis_figures(diagnosis, out)
    from headwise.cli.show import console, head_grid, rich_table, role_map
    from headwise.diagnosis.view import diagnosis_table

    screen = console()
    screen.print(head_grid(diagnosis))
    screen.print(role_map(diagnosis))
    screen.print(rich_table(diagnosis_table(diagnosis)))
    counts, then = diagnosis.counts, ["checkup", *reading.again]
    if counts["sick"]:
        then = ["triage", *reading.again, "--diagnosis", str(out)]
    found = f"{counts['sick']} of {counts['total']} heads give most attention to the first token"
    wrote(written, found, then)
    alarm(diagnosis.alarms)


@verb(
    "survey",
    "Several models or diagnoses in one table and figure.",
    example="survey out/a/diagnosis.json out/b/diagnosis.json",
)
def survey_verb(
    sources: Annotated[
        list[str], typer.Argument(metavar="MODEL|DIAGNOSIS.json...", help="Models or diagnoses.")
    ],
    texts: TextSettings,
    settings: DiagnoseSettings,
    loading: LoadSettings,
    out: Out = Path("out/survey"),
) -> None:
    """Compare several models, or saved diagnoses, in one table and one figure."""
    from headwise.cli.show import print_tables
    from headwise.diagnosis.figures import survey_panels
    from headwise.diagnosis.survey import survey
    from headwise.diagnosis.view import survey_table
    from headwise.drawing import save_figure

    with in_one_go(out) as progress:
        result = survey(
            _surveyed(sources, loading),
            texts=texts.read(),
            **keywords_of(settings),
            progress=progress,
        )
        written = [
            result.save(out / "survey.json"),
            *save_figure(survey_panels(result), out / "survey"),
        ]
    print_tables([survey_table(result)])
    most = max(range(len(result.rows)), key=lambda i: result.rows[i].sick_share)
    row = result.rows[most]
    found = f"{row.model} has the largest share of sick heads: {row.sick} of {row.total_heads}"
    wrote(written, found, ["checkup", result.diagnoses[most].model.id])


def _surveyed(sources: Sequence[str], loading: LoadSettings) -> Iterator[str | LoadedModel]:
    """Diagnoses and models one after the other: a model is gone before the next one is loaded."""
    for name in sources:
        if name.endswith(".json"):
            yield name
        else:
            from headwise.models.loading import load_model  # late: files need no torch

            yield load_model(name, **keywords_of(loading))


@verb(
    "check",
    "Is the family known, and are its heads separable?",
    example="check MODEL",
    without=("bos", "stream"),
)
def check_verb(
    model: Model,
    loading: LoadSettings,
    write_row: Annotated[bool, Doc("Print the model's row, to contribute it.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Try every head of every layer, and every logit.")
    ] = False,
    out: Out = Path("out/check"),
    seed: Seed = 0,
) -> None:
    """Is the architecture known, and are its heads separable?"""
    announce(model)
    from headwise.artefacts import save_artefact
    from headwise.cli.show import check_summary
    from headwise.errors import UnknownArchitectureError

    with in_one_go(out) as progress:
        from headwise.cost import estimate_cost
        from headwise.forward.separability import check, check_work

        loaded = load(model, loading)
        work = check_work(loaded.model, everything=everything)
        stage(str(estimate_cost(loaded.model, work)), progress)
        result = check(loaded.model, seed=seed, everything=everything, progress=progress)
        path = save_artefact(out / "check.json", "check", {**result.to_json(), "model": loaded.id})
    if not result.passed:
        raise UnknownArchitectureError(
            f"the heads of {model} are not separable as the table says: {result.reason()}",
            fix="correct its row in models/families/known_families.py, or leave it alone",
        )
    if write_row:
        from headwise.models.architectures import architecture_of
        from headwise.models.families.proposal import row_text

        typer.echo(row_text(loaded.model.config.model_type, architecture_of(loaded.model)))
    wrote([path], check_summary(loaded, result), ["checkup", model])


@verb(
    "plan",
    "Which heads are operated on, and how.",
    example="plan out/d --heads 'sick & layer >= 4' --out plan.yaml",
)
def plan_verb(
    diagnosis: Annotated[
        Path, typer.Argument(help="diagnosis.json, triage.json, evaluation.json or a folder.")
    ],
    settings: PlanSettings,
    out: Annotated[Path, Doc("The plan file.")] = Path("plan.yaml"),
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

    read = read_snapshot(diagnosis)
    costs = {} if read.evaluation is None else {"ablation_cost": read.evaluation.cost_map()}
    plan = make_plan(read.triage or read.diagnosis, measures=costs, **keywords_of(settings))
    path = out if out.suffix in (".yaml", ".yml") else out / "plan.yaml"
    plan.save(path)
    print_tables([plan.table()])
    found = f"{len(plan.target_heads)} heads of {plan.model.id} are to be treated"
    wrote([path], found, ["repair", *trained_on(plan.model.id), "--plan", path])


@verb(
    "apply",
    "An ordinary model directory with the patch; --undo.",
    example="apply MODEL out/run/patch.safetensors --out repaired/",
    without=("bos", "stream"),
)
def apply_verb(
    model: Model,
    patches: Annotated[list[Path], typer.Argument(metavar="PATCH...", help="patch.safetensors")],
    loading: LoadSettings,
    out: Out = Path("out/model"),
    undo: Annotated[bool, Doc("Take the patches out again.")] = False,
    shrink: Annotated[bool, Doc("Cut out the heads that the patch retired.")] = False,
    force: Annotated[bool, Doc("Accept another base.")] = False,
) -> None:
    """Write an ordinary model directory with patches merged in, or taken out again."""
    require_files(patches)
    announce(model)
    from headwise.cli.show import console
    from headwise.handover.merging import apply_patches
    from headwise.models.patch import Patch

    read = [Patch.load(path) for path in patches]
    loaded = load(model, replace(loading, dtype=loading.dtype or read[0].dtype))
    apply_patches(loaded, read, out, undo=undo, shrink=shrink, force=force)
    if shrink:
        from headwise.handover.shrinking import Shrunken

        console().print(str(Shrunken.load(out)))
    done = f"{len(read)} patch{'es' * (len(read) > 1)} {'undone' if undo else 'merged'}"
    wrote([], f"wrote a model with {done} in {out}", ["diagnose", out])
