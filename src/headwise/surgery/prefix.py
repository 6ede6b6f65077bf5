"""The frozen layers below the operation: run without gradients, or read from a cache on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.partial_run import layer_input, run_from
from headwise.models.architectures import device_of
from headwise.models.tensor_files import write_array
from headwise.surgery.job import Job
from headwise.texts.batches import Batch

PREFIX = "prefix"  # the cache's folder in a run


def last_hidden(job: Job, batch: Batch, part: list[tuple[int, Batch]]) -> Tensor:
    """Last hidden states of the numbered blocks in `part`, which are joined in `batch`."""
    ids = batch.ids.to(device_of(job.model))
    if not (job.recipe.cache_prefix and job.lowest > 0):
        last: Tensor = job.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return last
    folder = job.out / PREFIX
    stored = [_prefix(job.model, job.lowest, folder / f"{n}.npy", block) for n, block in part]
    padded = [F.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1])) for hidden in stored]
    start = torch.cat(padded).to(ids.device, job.model.dtype)
    return run_from(job.model, ids, job.lowest, start)


def _prefix(model: PreTrainedModel, lowest: int, path: Path, block: Batch) -> Tensor:
    """What enters the lowest operated layer for one block.

    From disk after the first time: no layer below changes.
    """
    if not path.exists():
        with torch.no_grad():
            hidden = layer_input(model, block.ids.to(device_of(model)), lowest)
        write_array(path, hidden.float().cpu().numpy())
    return torch.from_numpy(np.array(np.load(path, mmap_mode="r")))
