"""Run a study: shared work once, each arm once, every artefact written when it is complete.

    OUT/study.json            the study, as it was asked for
    OUT/stock/                diagnosis.json, evaluation.json
    OUT/runs/ARM-sSEED/       plan.yaml, run.json, trace.jsonl, maps.jsonl, patch.safetensors,
                              evaluation.json, comparison.json  (a second pass lies in pass2/)
    OUT/completions.json      stock and each arm of the first seed, side by side
    OUT/summary.json          paired statistics over arms and seeds

A finished artefact is read, not made again, so a killed study goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path

from headwise.artefacts import save_artefact, sweep, versions
from headwise.errors import ArtefactError
from headwise.integrity.locks import one_writer
from headwise.keywords import Backend
from headwise.models.patch import Patch
from headwise.progress import Progress, silent, stage
from headwise.proof.completed_texts import Completions, bundled_prompts
from headwise.proof.completions import complete
from headwise.proof.origins import origin_of
from headwise.provenance import require_same_origin
from headwise.studies.arms import (
    StudySetting,
    arm_patches,
    arm_plans,
    open_setting,
    stock_diagnosis,
    stock_evaluation,
)
from headwise.studies.settings import Workers
from headwise.studies.spread_runs import run_arms
from headwise.studies.study import Study, load_study, started_study
from headwise.studies.summary import summarise_study
from headwise.workers import require_scheduler


def run_study(
    study: Study | str,
    *,
    out: Path | str,
    workers: int = 1,
    backend: Backend = "joblib",
    scheduler: str | None = None,
    progress: Progress = silent,
) -> Path:
    """Run, or go on with, a study (or the one of a file or a bundled name); returns its folder.

    With several `workers`, or on a Dask cluster, arms and seeds run side by side, to the same bytes
    as one after the other. This process alone holds the folder.
    """
    require_scheduler(backend, scheduler)
    if isinstance(study, str):
        study = load_study(study)
    with one_writer(Path(out)):
        return _run_study(study, Path(out), Workers(workers, backend, scheduler), progress)


def _run_study(study: Study, out: Path, workers: Workers, progress: Progress) -> Path:
    _require_same(study, out)
    sweep(out)
    setting = open_setting(study, out, progress)
    stage(str(setting.loaded.first_token), progress)
    stock = stock_diagnosis(setting)
    plans = arm_plans(study, stock)
    run_arms(setting, plans, stock_evaluation(setting, plans), workers)
    _complete(setting)
    summarise_study(out, study).save(out / "summary.json")
    return out


def _require_same(study: Study, out: Path) -> None:
    """Notice a changed study: what is on disk must be what was asked for."""
    body = {"study": study.model_dump(mode="json"), "provenance": {"versions": versions()}}
    path = out / "study.json"
    if path.exists():
        before = started_study(path).model_dump(mode="json")
        changed = [key for key in body["study"] if before.get(key) != body["study"][key]]
        if changed:
            raise ArtefactError(
                f"the study in this folder was started with other settings: {', '.join(changed)}",
                where=out,
                fix="use the same study file, or choose another --out",
            )
        return
    save_artefact(path, "study", body)


def _complete(setting: StudySetting) -> None:
    """The same prompts through stock and every arm of the first seed."""
    path = setting.out / "completions.json"
    if setting.study.completions == 0:
        return
    if path.exists():
        require_same_origin(setting.origin(), origin_of(Completions.load(path), path))
        return
    stage("completing prompts", setting.progress)
    step = max(1, 50 // setting.study.completions)
    prompts = bundled_prompts()[::step][: setting.study.completions]
    patches: dict[str, list[Patch | Path]] = {
        arm.name: [*arm_patches(setting.out, arm, (arm.seeds or setting.study.seeds)[0])]
        for arm in setting.study.arms
    }
    complete(setting.loaded, prompts, patches=patches, progress=setting.progress).save(path)
