"""A training job: what is trained, on what, and how; fixed for the whole run.

The frozen layers below the operation run without gradients, or are read from a cache on disk. Where
activations would take too much memory some layers are run twice. Both are chosen at the start from
what is there, unless the recipe says; the patch has the same bits either way.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import own_folder
from headwise.errors import ArtefactError
from headwise.forward.partial_run import layer_input, run_from
from headwise.forward.replaced_forward import checkpointed, frozen, fused_gelu
from headwise.forward.tap import tapped
from headwise.integrity.checksums import RUN_KEY, require_run
from headwise.models.architectures import backbone_of, device_of, layers_of
from headwise.models.loading import free_memory
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.ranks import each_writes
from headwise.surgery.recipe import Recipe, Saving
from headwise.surgery.run_state import MassMap
from headwise.surgery.slice_training import Master, training_slices, write_masters
from headwise.surgery.values import RunSettings
from headwise.texts.batches import Batch
from headwise.texts.corpus import Corpus

PREFIX = ".headwise-prefix"  # the cache's folder in a run
_HIDDEN = "hidden"


Tracker = Callable[[Mapping[str, int | float], int], None]


def last_hiddens(model: PreTrainedModel, blocks: Sequence[Batch]) -> tuple[Tensor, ...]:
    """What the model's output head sees on each of some blocks.

    The output head is never trained, so the stock model's predictions need nothing else.
    """
    seen = []
    with torch.no_grad(), tapped(model):
        for block in blocks:
            ids = block.ids.to(device_of(model))
            seen.append(backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
    return tuple(seen)


@dataclass(frozen=True)
class Job:
    """A run under way: what is trained, on which model and corpus, and where it is saved."""

    model: PreTrainedModel = field(repr=False)
    run: RunSettings
    corpus: Corpus
    out: Path
    masters: tuple[Master, ...] = field(default=(), repr=False)
    trained: tuple[torch.nn.Parameter, ...] = field(default=(), repr=False)  # or LoRA's factors
    track: Tracker | None = None
    before: MassMap | None = None  # first-token mass on the probe before the operation
    kept: Corpus | None = None  # other text, on which the model shall say what stock says
    stock_hidden: tuple[Tensor, ...] = field(default=(), repr=False)  # stock's on the kept blocks

    @property
    def saves(self) -> Saving:
        """What is done to save memory and time; before it is chosen, `auto` in a recipe is no."""
        above = len(layers_of(self.model)) - self.run.lowest
        return self.run.saving or saving_of(self.run.recipe, Saving(), above)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The frozen model with slice gradients, fused attention and, if asked, checkpointing."""
        with contextlib.ExitStack() as stack:
            if self.masters:
                stack.enter_context(training_slices(self.model, list(self.masters)))
            lowest = self.run.lowest
            stop = lowest + self.saves.recomputed
            stack.enter_context(checkpointed(self.model, lowest, stop))
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


_PROBE = 32  # tokens of the pass on which activations are counted
_SMALL = 256 * 2**20  # bytes of activations that are never too many, if they fit at all
_OF_WEIGHTS = 1 / 3  # activations up to this share of the weights are in proportion
_OF_FREE = 1 / 2  # of the free memory, or of the free disk


def saving_of(recipe: Recipe, chosen: Saving, above: int) -> Saving:
    """What the recipe says, and what was `chosen` where it says `auto`; `above` layers train."""
    asked, cached = recipe.checkpoint_layers, recipe.cache_prefix
    recomputed = chosen.recomputed if asked == "auto" else above if asked else 0
    return Saving(recomputed, chosen.cached if cached == "auto" else cached)


def choose_saving(
    model: PreTrainedModel, recipe: Recipe, corpus: Corpus, lowest: int, out: Path
) -> tuple[Saving, str]:
    """How a run saves, by free memory and disk and how often a block is seen; and why."""
    above = len(layers_of(model)) - lowest
    recomputed, memory = _recomputed(model, recipe, corpus, lowest)
    cached, disk = _cached(model, recipe, corpus, lowest, out)
    saving = saving_of(recipe, Saving(recomputed, cached), above)
    if recipe.checkpoint_layers != "auto":
        memory = "as the recipe says"
    if recipe.cache_prefix != "auto":
        disk = "as the recipe says"
    return (
        saving,
        f"saving: {saving.recomputed} of {above} trained layers are run twice ({memory}); the "
        f"{lowest} below are {'kept on disk' if saving.cached else 'run each time'} ({disk})",
    )


def _recomputed(
    model: PreTrainedModel, recipe: Recipe, corpus: Corpus, lowest: int
) -> tuple[int, str]:
    """So many layers that the others' activations, and these ones' inputs, have room."""
    above = len(layers_of(model)) - lowest
    if any(parameter.is_meta for parameter in model.parameters()):
        return above, "a backward pass would keep every offloaded weight"
    tokens = recipe.batch_size * recipe.block
    layer, entering = (tokens * size for size in _bytes_a_token(model, corpus, lowest))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    room = min(max(_SMALL, _OF_WEIGHTS * weights), _OF_FREE * _free_memory(model))
    fits = [n for n in range(above) if (above - n) * layer + n * entering <= room]
    told = f"{above * layer / 1e6:,.0f} MB of activations a pass, room for {room / 1e6:,.0f}"
    return (fits[0] if fits else above), told


def _bytes_a_token(model: PreTrainedModel, corpus: Corpus, lowest: int) -> tuple[float, float]:
    """What one trained layer keeps for its backward pass, and what enters it; from a short pass."""
    ids = corpus.train[0].ids[:1, :_PROBE].to(device_of(model))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with frozen(model), fused_gelu(model), tapped(model):
        with torch.no_grad():
            start = layer_input(model, ids, lowest)
        counted = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.enable_grad(), counted:
            last = run_from(model, ids, lowest, start.requires_grad_())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = sum(size for place, size in kept.items() if place not in own)
    entering = start.numel() * start.element_size() / ids.numel()
    del last  # until here it kept what was counted, so no place was used twice
    # The slices' own gradients need what enters their projections: about two widths more.
    return total / ids.numel() / (len(layers_of(model)) - lowest) + 2 * entering, entering


def _free_memory(model: PreTrainedModel) -> int:
    device = device_of(model)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def _cached(
    model: PreTrainedModel, recipe: Recipe, corpus: Corpus, lowest: int, out: Path
) -> tuple[bool, str]:
    if lowest == 0:
        return False, "there are none"
    if recipe.batch_size > 1:  # matrix products of another height may round otherwise
        return False, "several blocks share a pass, and bits shall not depend on it"
    if device_of(model).type != "cpu":
        return False, "reading is not known to be faster than this device"
    visits = recipe.steps * recipe.accumulation
    blocks = min(visits, len(corpus.train))
    seen = f"each of {blocks:,} blocks is seen {visits / max(1, blocks):.1f} times"
    size = blocks * recipe.block * int(model.config.get_text_config().hidden_size) * 4
    there = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    if visits < 2 * blocks:
        return False, seen
    fits = size <= _OF_FREE * shutil.disk_usage(there).free
    return fits, f"{seen}, {size / 1e6:,.0f} MB" + ("" if fits else " are too many for the disk")


def last_hidden(job: Job, batch: Batch, part: list[tuple[int, Batch]]) -> Tensor:
    """Last hidden states of the numbered blocks in `part`, which are joined in `batch`."""
    ids = batch.ids.to(device_of(job.model))
    if not (job.saves.cached and job.run.lowest > 0):
        last: Tensor = backbone_of(job.model)(input_ids=ids, use_cache=False).last_hidden_state
        return last
    folder = own_folder(job.out / PREFIX)
    stored = [_prefix(job, folder / f"{n}.safetensors", block) for n, block in part]
    padded = [F.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1])) for hidden in stored]
    start = torch.cat(padded).to(ids.device, job.model.dtype)
    return run_from(job.model, ids, job.run.lowest, start)


def _prefix(job: Job, path: Path, block: Batch) -> Tensor:
    """What enters the lowest operated layer for one block.

    From disk after the first time: no layer below changes. A damaged file, or one of another run,
    is made again.
    """
    if path.exists():
        with contextlib.suppress(ArtefactError):
            tensors, metadata = read_safetensors(path)
            require_run(metadata.get(RUN_KEY), job.run.identity, path)
            return tensors[_HIDDEN]
    with torch.no_grad():
        hidden = layer_input(job.model, block.ids.to(device_of(job.model)), job.run.lowest)
    found = hidden.float().cpu().contiguous()
    with each_writes():
        write_safetensors(path, {_HIDDEN: found}, {RUN_KEY: job.run.identity})
    return found
