"""A patch of low rank as an exact PEFT adapter.

The change of every projection is split by singular values in float64. Its rank is the number of
those above what rounding to the model's precision makes of nothing; a change that needs more
numbers as two factors than as a matrix is refused with its rank, unless full rank is asked for.
A changed bias becomes PEFT's `lora_bias`, and needs a bias in every changed projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.artefacts import to_json, write_text
from headwise.errors import HeadwiseError
from headwise.handover.merging import folder_of
from headwise.models.architectures import is_transposed
from headwise.models.first_token import num_embeddings
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.models.tensor_files import write_safetensors

WEIGHTS, ADAPTED_PATCH = "adapter_model.safetensors", "headwise_patch"


@dataclass(frozen=True)
class Factors:
    """The change of one projection as B A, and of its bias."""

    module: str
    a: Float[Tensor, "rank in"] = field(repr=False)
    b: Float[Tensor, "out rank"] = field(repr=False)
    bias: Float[Tensor, "out"] | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """How many directions change."""
        return int(self.a.shape[0])

    @property
    def is_low(self) -> bool:
        """Whether the factors have fewer numbers than the matrix."""
        rows, columns = self.b.shape[0], self.a.shape[1]
        return self.rank * (rows + columns) < rows * columns


@dataclass(frozen=True)
class Exported:
    """A patch as another tool reads it; in words too."""

    path: Path
    stored: dict[str, str]  # projection -> its rank, or tensor -> its type
    error: float  # of an adapter's logits on random tokens; of a file's values, by rounding
    summary: str

    def __str__(self) -> str:
        return self.summary


def export_peft(
    loaded: LoadedModel,
    patch: Patch,
    out: Path | str,
    *,
    full_rank: bool = False,
    force: bool = False,
) -> Exported:
    """Write a patch as a PEFT adapter that `PeftModel.from_pretrained` loads; proves it."""
    if patch.is_empty:
        raise HeadwiseError("the patch changes nothing", fix="the model is as good without it")
    model, out = loaded.model, Path(out)
    with patch.applied(model, force=force):
        expected = _logits(model)
    found = factors_of(model, patch)
    high = [one for one in found if not one.is_low]
    rank, sides = max(one.rank for one in found), sum(o.a.shape[1] + o.b.shape[0] for o in found)
    if not high and rank * sides > patch.num_weights and not full_rank:
        raise HeadwiseError(
            f"the patch is not of low rank: an adapter of rank {rank} would have "
            f"{rank * sides:,} weights, the patch changes {patch.num_weights:,}",
            where=f"{len(found)} projections",
            fix="merge it with `headwise apply`, or pass --full-rank for a large adapter",
        )
    if high and not full_rank:
        raise HeadwiseError(
            f"the patch is not of low rank: {high[0].module} changes with rank {high[0].rank} of "
            f"{min(high[0].b.shape[0], high[0].a.shape[1])}",
            where=f"{len(high)} of {len(found)} projections",
            fix="merge it with `headwise apply`, or pass --full-rank for a large adapter",
        )
    _write(model, found, loaded.id, out, patch.fingerprint())
    weights = sum(one.a.numel() + one.b.numel() for one in found)
    difference = float((_adapted_logits(model, out) - expected).abs().max())
    return Exported(
        out,
        dict.fromkeys((one.module for one in found), f"rank {rank}"),
        difference,
        f"rank {rank} in {len(found)} projections, {weights:,} weights; logits of base + adapter "
        f"and of the patched model differ by {difference:.1e}",
    )


def factors_of(model: PreTrainedModel, patch: Patch) -> list[Factors]:
    """Every changed projection, in order of names."""
    changes: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    for part in patch.slices.values():
        name = part.span.parameter
        if name not in changes:
            changes[name] = torch.zeros_like(model.get_parameter(name), dtype=torch.float64)
        after = part.after.double()
        part.span.within(changes[name]).copy_(after - part.before.double())
        rounding = torch.finfo(part.after.dtype).eps * float(after.norm())
        scales[name] = (scales.get(name, 0.0) ** 2 + rounding**2) ** 0.5
    modules = sorted({name.rpartition(".")[0] for name in changes})
    return [_factors(model, module, changes, scales) for module in modules]


def _factors(
    model: PreTrainedModel, module: str, changes: dict[str, Tensor], scales: dict[str, float]
) -> Factors:
    layer = model.get_submodule(module)
    if not isinstance(layer, nn.Linear) and not is_transposed(layer):
        raise HeadwiseError(
            f"{module} is a {type(layer).__name__}, which PEFT has no low-rank update for",
            fix="merge the patch with `headwise apply`",
        )
    name = f"{module}.weight"
    change = changes.get(name)
    if change is None:
        change = torch.zeros_like(layer.get_parameter("weight"), dtype=torch.float64)
    if is_transposed(layer):
        change = change.T
    a, b = split_rank(change, scales.get(name, 0.0))
    bias = changes.get(f"{module}.bias")
    return Factors(module, a, b, None if bias is None else bias.float())


def split_rank(
    change: Float[Tensor, "out in"], rounding: float
) -> tuple[Float[Tensor, "rank in"], Float[Tensor, "out rank"]]:
    """A and B in float32 with B A the change, of the rank that is above rounding."""
    rows = torch.nonzero(change.any(1)).squeeze(1)  # the change of a few heads is mostly zeros
    left, values, right = torch.linalg.svd(change[rows], full_matrices=False)
    rank = int((values > rounding).sum())
    root = values[:rank].sqrt()
    b = torch.zeros(change.shape[0], rank, dtype=torch.float64)
    b[rows] = left[:, :rank] * root
    return (root[:, None] * right[:rank]).float(), b.float()


def _write(
    model: PreTrainedModel, found: Sequence[Factors], base: str, out: Path, patch: str
) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, all factors padded to one rank."""
    rank = max(1, *(one.rank for one in found))
    biased = any(one.bias is not None for one in found)
    tensors: dict[str, Tensor] = {}
    for one in found:
        prefix, pad = f"base_model.model.{one.module}", rank - one.rank
        tensors[f"{prefix}.lora_A.weight"] = nn.functional.pad(one.a, (0, 0, 0, pad)).contiguous()
        tensors[f"{prefix}.lora_B.weight"] = nn.functional.pad(one.b, (0, pad)).contiguous()
        if biased:
            tensors[f"{prefix}.lora_B.bias"] = _bias(model, one)
    first = model.get_submodule(found[0].module)
    config = _config(base, [one.module for one in found], rank, biased, is_transposed(first))
    metadata = {"format": "pt", ADAPTED_PATCH: patch}  # whose adapter it is
    write_safetensors(out / WEIGHTS, tensors, metadata)
    write_text(out / "adapter_config.json", to_json(config))


def _bias(model: PreTrainedModel, one: Factors) -> Tensor:
    layer: Any = model.get_submodule(one.module)
    if layer.bias is None:
        raise HeadwiseError(
            f"the patch changes biases, and {one.module} has none: PEFT adds a bias to every "
            "changed projection or to none",
            fix="merge the patch with `headwise apply`",
        )
    return torch.zeros_like(layer.bias).float() if one.bias is None else one.bias


def _config(
    base: str, modules: list[str], rank: int, biased: bool, transposed: bool
) -> dict[str, object]:
    try:
        from peft import LoraConfig
    except ImportError:
        raise HeadwiseError("the export needs PEFT", fix="pip install 'headwise[lora]'") from None
    folder = folder_of(base)
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        target_modules=modules,
        lora_bias=biased,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(folder) if base == "patient" else base,
    )
    # sets have no order of their own, and the same patch is to give the same bytes
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {key: getattr(value, "value", value) for key, value in plain.items()}


def _ids(model: PreTrainedModel) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(num_embeddings(model), (2, 32), generator=drawn).to(model.device)


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    ids = _ids(model.get_base_model() if hasattr(model, "get_base_model") else model)  # type: ignore[arg-type, operator]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _adapted_logits(model: PreTrainedModel, folder: Path) -> Tensor:
    """The logits of plain transformers and PEFT; the model is given back as it was."""
    from peft import PeftModel

    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    adapted = PeftModel.from_pretrained(model, str(folder))
    try:
        return _logits(adapted)
    finally:
        adapted.unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
