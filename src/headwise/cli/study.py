"""Verbs for whole experiments: study, demo, report."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Doc

from headwise.cli.app import resumable
from headwise.cli.options import Out, wrote
from headwise.cli.verbs import verb
from headwise.keywords import keywords_of
from headwise.studies.settings import Workers

if TYPE_CHECKING:
    from headwise.studies.study import Study


@verb(
    "study",
    "Arms x seeds with paired statistics, resumable.",
    example="study controls --out out/controls",
)
def study_verb(
    workers: Workers,
    file: Annotated[
        str | None, typer.Argument(metavar="STUDY.yaml", help="A study file or its name.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Write a study.yaml for a model instead.")
    ] = None,
    out: Annotated[Path | None, Doc("Folder of the study.")] = None,
    dry_run: Annotated[bool, Doc("Only say what would run.")] = False,
    report: Annotated[bool, Doc("Write the report too.")] = True,
    resume: Annotated[bool, Doc("The default: finished work is kept.")] = False,
) -> None:
    """Run arms x seeds on one model, then compare them with statistics; resumable."""
    from headwise.cli.show import console, cost_tables
    from headwise.studies.study import load_study, new_study

    screen = console()
    if init is not None:
        path = new_study(init, Path(file or "study.yaml"))
        screen.print(f"wrote {path}; fill in its corpus, then: headwise study {path}")
        return
    if file is None:
        raise typer.BadParameter("name a study file, or a model with --init")
    asked = load_study(file)
    from headwise.studies.estimate import estimate_study  # late: what is above needs no torch

    folder = out or Path("out") / asked.name
    for item in cost_tables(estimate_study(asked, folder)):
        screen.print(item)
    if dry_run:
        return
    from headwise.cli.progress_bar import progress_bars
    from headwise.studies.run import run_study

    going_on = resumable("the same command goes on where it stopped")
    with going_on, progress_bars() as progress:
        run_study(asked, out=folder, **keywords_of(workers), progress=progress)
    wrote([folder / "study.json", folder / "summary.json"])
    if report:
        _write_report(folder, folder / "report")


@verb("demo", "The whole story on the bundled patient, offline.", example="demo --out out/demo")
def demo_verb(out: Out = Path("out/demo")) -> None:
    """Diagnose the bundled patient, repair it with its controls, compare, and write the report."""
    from headwise.cli.progress_bar import progress_bars
    from headwise.studies.run import run_study
    from headwise.studies.study import load_study

    going_on = resumable("the same command goes on where it stopped")
    with going_on, progress_bars() as progress:
        folder = run_study(without_missing_extras(load_study("demo")), out=out, progress=progress)
    _write_report(folder, folder)


def without_missing_extras(study: Study) -> Study:
    """The study without its lora arms where peft, an optional extra, is not installed."""
    if find_spec("peft"):
        return study
    from headwise.cli.show import console

    reason = "no lora arm: peft is not installed (pip install 'headwise[lora]')"
    console().print(reason, markup=False)
    return study.model_copy(update={"arms": [arm for arm in study.arms if arm.mode != "lora"]})


@verb(
    "report",
    "One page with verdict, heads, figures and tables.",
    example="report out/run --before out/before --after out/after",
)
def report_verb(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_STUDY", help="A run, a study, or a diagnosis.")
    ],
    before: Annotated[Path | None, Doc("A run's evaluation of stock; default: out/before.")] = None,
    after: Annotated[Path | None, Doc("Its evaluation with the patch; default: out/after.")] = None,
    triage: Annotated[Path | None, Doc("A triage of stock; default: out/triage.")] = None,
    paper: Annotated[bool | None, Doc("The published BLOOM numbers too.")] = None,
    out: Annotated[Path | None, Doc("Folder of the report.")] = None,
) -> None:
    """Write report.html, figures and tables from artefacts alone; no model is loaded."""
    folder = source.parent if source.is_file() else source
    _write_report(source, out or folder / "report", before, after, triage, paper)


def _write_report(
    source: Path,
    out: Path,
    before: Path | None = None,
    after: Path | None = None,
    triage: Path | None = None,
    paper: bool | None = None,
) -> None:
    from headwise.cli.show import console, print_tables

    console().print(f"reading {source}, drawing figures", style="dim")
    from headwise.report.source import read_source
    from headwise.report.tables import arms_summary
    from headwise.report.verdict import judge
    from headwise.report.write import write_report

    path = write_report(source, out, before=before, after=after, triage=triage, paper=paper)
    read = read_source(source, before, after, triage)
    if len(read.arms()) > 1:
        print_tables([arms_summary(read)])
    patch, then = source / "patch.safetensors", ["checkup", "MODEL"]
    verdict = judge(read)
    if patch.exists() and read.model is not None and verdict.tone != "bad":
        then = ["apply", read.model.id, str(patch), "--out", "repaired/"]
    wrote([], f"{verdict.headline}\nlook at {path}", then)
