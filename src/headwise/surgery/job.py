"""A training job: what is trained, on what, and how; fixed for the whole run.

The frozen layers below the operation run without gradients, or are read from a cache on disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import ArtefactError
from headwise.forward.checkpointing import checkpointed
from headwise.forward.gelu import fused_gelu
from headwise.forward.partial_run import layer_input, run_from
from headwise.forward.tap import tapped
from headwise.models.architectures import backbone_of, device_of
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.ranks import each_writes
from headwise.surgery.recipe import Recipe
from headwise.surgery.run_state import MassMap
from headwise.surgery.slice_training import Master, training_slices, write_masters
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus

PREFIX = "prefix"  # the cache's folder in a run
_HIDDEN = "hidden"


Tracker = Callable[[Mapping[str, int | float], int], None]


@dataclass(frozen=True)
class Held:
    """Blocks of text to keep, and what the stock model's output head saw on them.

    The output head is never trained, so the stock model's predictions need nothing else.
    """

    blocks: tuple[Batch, ...] = field(repr=False)
    hidden: tuple[Tensor, ...] = field(repr=False)


def hold(model: PreTrainedModel, blocks: Sequence[Batch]) -> Held:
    """What the model says on some blocks, before anything is done to it."""
    seen = []
    with torch.no_grad(), tapped(model):
        for block in blocks:
            ids = block.ids.to(device_of(model))
            seen.append(backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
    return Held(tuple(blocks), tuple(seen))


@dataclass(frozen=True)
class Job:
    """What a run trains, on what, and how."""

    model: PreTrainedModel = field(repr=False)
    masters: tuple[Master, ...] = field(repr=False)
    trained: tuple[torch.nn.Parameter, ...] = field(repr=False)  # the masters' values, or LoRA's
    corpus: Corpus
    recipe: Recipe
    seed: int
    lowest: int  # the lowest layer with a trained weight
    out: Path
    track: Tracker | None = None
    before: MassMap | None = None  # first-token mass on the probe before the operation
    title: str = "training"  # what progress calls it
    held: Held | None = None  # other text, on which the model shall say what stock says
    identity: str = ""  # of the run: its files carry it

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The frozen model with slice gradients, fused attention and, if asked, checkpointing."""
        with contextlib.ExitStack() as stack:
            if self.masters:
                stack.enter_context(training_slices(self.model, list(self.masters)))
            if self.recipe.checkpoint_layers:
                stack.enter_context(checkpointed(self.model, self.lowest))
            stack.enter_context(fused_gelu(self.model))
            stack.enter_context(tapped(self.model))
            yield

    def write(self) -> None:
        """Put the masters into the model."""
        write_masters(self.model, list(self.masters))

    def tell(self, values: Mapping[str, int | float], step: int) -> None:
        """To the tracker, if there is one."""
        if self.track is not None:
            self.track(values, step)


def last_hidden(job: Job, batch: Batch, part: list[tuple[int, Batch]]) -> Tensor:
    """Last hidden states of the numbered blocks in `part`, which are joined in `batch`."""
    ids = batch.ids.to(device_of(job.model))
    if not (job.recipe.cache_prefix and job.lowest > 0):
        last: Tensor = backbone_of(job.model)(input_ids=ids, use_cache=False).last_hidden_state
        return last
    folder = job.out / PREFIX
    stored = [
        _prefix(job.model, job.lowest, folder / f"{n}.safetensors", block) for n, block in part
    ]
    padded = [F.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1])) for hidden in stored]
    start = torch.cat(padded).to(ids.device, job.model.dtype)
    return run_from(job.model, ids, job.lowest, start)


def _prefix(model: PreTrainedModel, lowest: int, path: Path, block: Batch) -> Tensor:
    """What enters the lowest operated layer for one block.

    From disk after the first time: no layer below changes. A damaged file is made again.
    """
    if path.exists():
        with contextlib.suppress(ArtefactError):
            return read_safetensors(path)[0][_HIDDEN]
    with torch.no_grad():
        hidden = layer_input(model, block.ids.to(device_of(model)), lowest)
    found = hidden.float().cpu().contiguous()
    with each_writes():
        write_safetensors(path, {_HIDDEN: found})
    return found
