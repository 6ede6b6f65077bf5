"""The runs of a study side by side: each worker loads the model and takes one arm and seed.

A run saves itself as it goes, so a lost worker costs the steps since its last checkpoint: another
one goes on from there. The folder is held by the process that started the study.
"""

from __future__ import annotations

import glob
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from headwise.artefacts import own_folder, remove_files, sweep, write_text
from headwise.errors import HeadwiseError
from headwise.progress import Progress, stage
from headwise.proof.values import Evaluation
from headwise.studies.arms import (
    StudySetting,
    arm_plans,
    open_setting,
    run_arm,
    run_folder,
    stock_diagnosis,
    stock_evaluation,
)
from headwise.studies.settings import Workers
from headwise.studies.study import Study, StudyArm
from headwise.surgery.plan import SurgeryPlan
from headwise.workers import apart, spread

_MARKS = ".workers"  # one file for each run that is under way on a cluster
_ONE_RUN = threading.Lock()  # of a process: patches change the model that its threads share


@dataclass(frozen=True)
class OneRun:
    """What a worker is given, and gives back with its stages and its known failure, if any."""

    out: Path
    arm: str
    seed: int
    threads: int  # sums over several threads have other bits: as many as the asking process has
    study: str = field(repr=False)  # as JSON
    mark: str = ""  # of this start of the study, where lost workers are only seen by their traces
    stages: tuple[str, ...] = ()  # that it would have reported
    failure: HeadwiseError | None = None

    def __str__(self) -> str:
        return f"{self.arm} s{self.seed}"


def run_arms(
    setting: StudySetting, plans: dict[str, SurgeryPlan], before: Evaluation, workers: Workers
) -> None:
    """Run every arm with every seed, here or in workers; what is finished is only checked."""
    left = []
    for arm, seed in setting.study.runs():
        last = run_folder(setting.out, arm.name, seed, arm.passes)
        if workers.here_alone or (last / "comparison.json").exists():
            run_arm(setting, arm, seed, plans[arm.name], before)
        else:
            left.append((arm, seed))
    if left:
        _run_apart(setting, left, workers)


def _run_apart(
    setting: StudySetting, runs: Sequence[tuple[StudyArm, int]], workers: Workers
) -> None:
    """The others go on when one fails; its error, the first one, comes at the end."""
    _tell_crowd(workers, len(runs), setting.progress)
    threads, study = torch.get_num_threads(), setting.study.model_dump_json()
    mark = uuid.uuid4().hex if workers.backend == "dask" else ""
    out = setting.out.resolve()
    items = [OneRun(out, arm.name, seed, threads, study, mark) for arm, seed in runs]
    failures = []
    try:
        ends = _ends(items, workers, setting.progress)
        for end in _counted(ends, len(items), setting.progress):
            for line in end.stages:
                stage(line, setting.progress)
            if end.failure is not None:
                stage(f"{end} failed; the other runs go on", setting.progress)
                failures.append(end.failure)
    finally:
        remove_files(out / _MARKS, *(glob.escape(str(item)) for item in items))
    if failures:
        raise failures[0]


def _counted(ends: Iterator[OneRun], total: int, progress: Progress) -> Iterator[OneRun]:
    progress("runs", 0, total, "")
    for done, end in enumerate(ends, 1):
        yield end
        progress("runs", done, total, str(end))


def _ends(items: Sequence[OneRun], workers: Workers, progress: Progress) -> Iterator[OneRun]:
    if workers.backend == "joblib":

        def lost(run: OneRun) -> None:
            stage(_lost(run), progress)

        yield from apart(run_here, items, workers=workers.workers, lost=lost)
        return
    try:
        yield from spread(
            run_here, items, workers=workers.workers, backend="dask", scheduler=workers.scheduler
        )
    except Exception as error:
        if type(error).__name__ != "KilledWorker":  # distributed's, and that is an extra
            raise
        raise HeadwiseError(
            "the cluster lost every worker that took one run", where=str(error)[:200], fix=_AGAIN
        ) from None


_AGAIN = "look at the workers' memory and start again: what was saved is kept"


def _lost(run: OneRun) -> str:
    return f"{run}: its worker was lost; another one goes on from its last checkpoint"


def _tell_crowd(workers: Workers, runs: int, progress: Progress) -> None:
    """Threads decide bits, so they are the user's choice; too many of them are slow."""
    threads, cores = torch.get_num_threads(), _cores()
    busy = min(workers.workers, runs)
    if workers.backend == "joblib" and busy * threads > max(cores, threads):
        stage(
            f"{busy} workers of {threads} threads on {cores} cores; with OMP_NUM_THREADS="
            f"{max(1, cores // busy)} they would not wait for each other",
            progress,
        )


def _cores() -> int:
    """Those that this process may use; macOS does not say."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def run_here(run: OneRun) -> OneRun:
    """In a worker: one arm with one seed, from its checkpoints if there are any."""
    stages: list[str] = []

    def listen(title: str, done: int, total: int, note: str) -> None:
        if total == 0:
            stages.append(f"{run}: {title}" if not title.startswith(str(run)) else title)

    with _ONE_RUN:
        if run.mark and _was_begun(run):
            stages.append(_lost(run))
        torch.set_num_threads(run.threads)
        sweep(run_folder(run.out, run.arm, run.seed))
        try:
            _run(run, listen)
        except HeadwiseError as failure:
            return replace(run, stages=tuple(stages), failure=failure)
    return replace(run, stages=tuple(stages))


def _run(run: OneRun, progress: Progress) -> None:
    setting = replace(_opened(run.study, run.out), progress=progress)
    plans = arm_plans(setting.study, stock_diagnosis(setting))
    before = stock_evaluation(setting, plans)
    (arm,) = [arm for arm in setting.study.arms if arm.name == run.arm]
    run_arm(setting, arm, run.seed, plans[arm.name], before)


@lru_cache(maxsize=1)  # a worker's next run is most likely of the same study
def _opened(study: str, out: Path) -> StudySetting:
    return open_setting(Study.model_validate_json(study), out)


def _was_begun(run: OneRun) -> bool:
    """Whether another worker had this run since the study was started: then it was lost."""
    path = own_folder(run.out / _MARKS) / str(run)
    begun = path.exists() and path.read_text() == run.mark
    write_text(path, run.mark)
    return begun
