"""Checkpoints of a run: what is trained, the optimizer's moments and the run's state.

They are written atomically, so a killed run that resumes ends with the same bits as one that was
never stopped. `best.safetensors` holds the best validated values alone. Every file carries a
checksum and the identity of its run; a damaged newest checkpoint gives way to the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headwise.artefacts import own_folder, sweep
from headwise.errors import ArtefactError
from headwise.integrity.checksums import RUN_KEY, require_run
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.progress import Progress, silent, stage
from headwise.ranks import is_first, wait
from headwise.surgery.job import Job
from headwise.surgery.run_state import BEFORE, RunState

CHECKPOINTS, BEST = "checkpoints", "best.safetensors"


def kept_checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(own_folder(out / CHECKPOINTS).glob(f"step-{'[0-9]' * 7}.safetensors"))


def save_checkpoint(job: Job, state: RunState, optimizer: torch.optim.Optimizer) -> None:
    """Write trace, maps and the newest checkpoint; drop old checkpoints only after that."""
    state.write_rows(job.out, job.run.identity)
    tensors = {}
    for i, parameter in enumerate(job.trained):
        tensors[f"master.{i}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{i}"] = value.detach().cpu().contiguous()
    metadata = {
        RUN_KEY: job.run.identity,
        "progress": json.dumps(state.to_json()),
        "rng": bytes(torch.get_rng_state()).hex(),
    }
    path = own_folder(job.out / CHECKPOINTS) / f"step-{state.step:07d}.safetensors"
    write_safetensors(path, tensors, metadata)
    if is_first():
        every = job.run.recipe.checkpoint_every
        for old in kept_checkpoints(job.out)[: -job.run.recipe.keep]:
            if not isinstance(every, int) or _step_of(old) % every:
                old.unlink()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def require_none(out: Path) -> None:
    """Refuse the checkpoints of another run, which this one would delete or go on from."""
    for path in kept_checkpoints(out):
        raise ArtefactError(
            "checkpoints without their run lie here",
            where=path,
            fix="move them away, or choose another --out",
        )


def fresh_state(job: Job) -> RunState:
    """The state of a run that has done nothing yet."""
    return RunState(maps={} if job.before is None else {BEFORE: job.before})


def restore_checkpoint(
    job: Job, optimizer: torch.optim.Optimizer, progress: Progress = silent
) -> RunState:
    """The newest whole checkpoint, or a fresh start if the run was killed before its first one."""
    sweep(job.out)
    found = kept_checkpoints(job.out)
    if not found:
        return fresh_state(job)
    tensors, metadata = _newest_whole(found, progress)
    require_run(metadata.get(RUN_KEY), job.run.identity, found[-1].parent)
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
        if f"step.{i}" in tensors:
            optimizer.state[parameter] = {
                key: tensors[f"{key}.{i}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(metadata["rng"]), dtype=torch.uint8))
    state = RunState.from_json(json.loads(metadata["progress"]), job.out)
    if state.maps and job.before is not None and BEFORE not in state.maps:
        state.maps = fresh_state(job).maps  # maps of an older headwise
    return state


def _newest_whole(
    found: list[Path], progress: Progress
) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """The newest checkpoint that is not damaged; each damaged one is told, and kept."""
    for path in reversed(found):
        try:
            return read_safetensors(path)
        except ArtefactError as error:
            what = str(error).splitlines()[0]
            stage(f"{path.name} cannot be used ({what}); going back to the one before", progress)
    raise ArtefactError(
        "every checkpoint of this run is damaged",
        where=found[-1].parent,
        fix="put an undamaged copy back, or delete the run's folder and start anew",
    )


def _best_path(job: Job) -> Path:
    return own_folder(job.out / CHECKPOINTS) / BEST


def save_best(job: Job, step: int = 0) -> None:
    """Keep the values at hand as the best ones."""
    tensors = {f"master.{i}": p.detach().cpu() for i, p in enumerate(job.trained)}
    write_safetensors(_best_path(job), tensors, {RUN_KEY: job.run.identity, "step": str(step)})


def load_best(job: Job, step: int | None = None) -> bool:
    """Put the best validated values back; False if nothing was validated.

    With a `step`, a file of another step is refused: it is not the best of this run.
    """
    wait()  # until it is written
    path = _best_path(job)
    if not path.exists():
        return False
    tensors, metadata = read_safetensors(path)
    require_run(metadata.get(RUN_KEY), job.run.identity, path)
    if step is not None and metadata.get("step") != str(step):
        raise ArtefactError(
            f"the best values are of step {metadata.get('step')}, the run's best step is {step}",
            where=path,
            fix="put the run's own file back, or delete the run's folder and start anew",
        )
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
    job.write()
    return True
