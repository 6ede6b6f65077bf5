"""A training job: what is trained, on what, and how; fixed for the whole run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headwise.forward.checkpointing import checkpointed
from headwise.forward.gelu import fused_gelu
from headwise.forward.tap import tapped
from headwise.surgery.recipe import Recipe
from headwise.surgery.run_state import MassMap
from headwise.surgery.slice_training import Master, training_slices, write_masters
from headwise.texts.corpus import Corpus

Tracker = Callable[[Mapping[str, float], int], None]


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

    def tell(self, values: Mapping[str, float], step: int) -> None:
        """To the tracker, if there is one."""
        if self.track is not None:
            self.track(values, step)
