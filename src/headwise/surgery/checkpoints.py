"""Checkpoints of a run: what is trained, the optimizer's moments and the run's state.

They are written atomically, so a killed run that resumes ends with the same bits as one that was
never stopped. `best.safetensors` holds the best validated values alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headwise.artefacts import sweep
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.ranks import is_first, wait
from headwise.surgery.job import Job
from headwise.surgery.run_state import BEFORE, RunState, StepMap

CHECKPOINTS = "checkpoints"


def kept_checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((out / CHECKPOINTS).glob("step-*.safetensors"))


def save_checkpoint(job: Job, state: RunState, optimizer: torch.optim.Optimizer) -> None:
    """Write trace, maps and the newest checkpoint; drop old checkpoints only after that."""
    state.write_rows(job.out)
    tensors = {}
    for i, parameter in enumerate(job.trained):
        tensors[f"master.{i}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{i}"] = value.detach().cpu().contiguous()
    metadata = {"progress": json.dumps(state.to_json()), "rng": bytes(torch.get_rng_state()).hex()}
    path = job.out / CHECKPOINTS / f"step-{state.step:07d}.safetensors"
    write_safetensors(path, tensors, metadata)
    if is_first():
        for old in kept_checkpoints(job.out)[: -job.recipe.keep]:
            old.unlink()


def fresh_state(job: Job) -> RunState:
    """The state of a run that has done nothing yet."""
    return RunState(maps=[] if job.before is None else [StepMap(BEFORE, job.before)])


def restore_checkpoint(job: Job, optimizer: torch.optim.Optimizer) -> RunState:
    """The newest checkpoint, or a fresh start if the run was killed before its first one."""
    sweep(job.out)
    found = kept_checkpoints(job.out)
    if not found:
        return fresh_state(job)
    tensors, metadata = read_safetensors(found[-1])
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
        if f"step.{i}" in tensors:
            optimizer.state[parameter] = {
                key: tensors[f"{key}.{i}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(metadata["rng"]), dtype=torch.uint8))
    state = RunState.from_json(json.loads(metadata["progress"]), job.out)
    if state.maps and job.before is not None and state.maps[0].step != BEFORE:
        state.maps = fresh_state(job).maps  # maps of an older headwise
    return state


def save_best(job: Job) -> None:
    """Keep the values at hand as the best ones."""
    tensors = {f"master.{i}": p.detach().cpu() for i, p in enumerate(job.trained)}
    write_safetensors(job.out / CHECKPOINTS / "best.safetensors", tensors)


def load_best(job: Job) -> bool:
    """Put the best validated values back; False if nothing was validated."""
    wait()  # until it is written
    path = job.out / CHECKPOINTS / "best.safetensors"
    if not path.exists():
        return False
    tensors, _ = read_safetensors(path)
    for i, parameter in enumerate(job.trained):
        parameter.data.copy_(tensors[f"master.{i}"])
    job.write()
    return True
