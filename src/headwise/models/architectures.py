"""Where the heads of a loaded model are: its row of `families.py`, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import UnknownArchitectureError
from headwise.models.families import ARCHITECTURES, NOT_SEPARABLE
from headwise.models.family import Architecture, Positions, Role
from headwise.models.offloading import execution_device, held_tensor


@dataclass(frozen=True)
class Geometry:
    """The counts that a head's place follows from."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def architecture_of(model: PreTrainedModel) -> Architecture:
    """The row of a loaded model, with a refusal that says why where there is none."""
    family = str(model.config.model_type)
    if family in NOT_SEPARABLE:
        raise UnknownArchitectureError(
            f"heads of {family!r} models are not separable: {NOT_SEPARABLE[family]}",
            fix="choose a model of another family; `headwise check` lists the known ones",
        )
    row = ARCHITECTURES.get(family)
    if row is None:
        raise UnknownArchitectureError(
            f"no head layout is known for model_type={family!r}",
            where=f"known: {', '.join(sorted(ARCHITECTURES))}",
            fix="add one row to ARCHITECTURES in src/headwise/models/families.py,\n"
            "then prove it with `headwise check MODEL`",
        )
    if row.alibi_if and getattr(model.config, row.alibi_if, False):
        return replace(row, positions="alibi")
    return row


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, in order."""
    return list(model.get_submodule(architecture_of(model).layers).children())


def attention_of(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of one layer."""
    return layers_of(model)[layer].get_submodule(architecture_of(model).attention)


def projection_name(model: PreTrainedModel, layer: int, role: Role) -> str:
    """The dotted name of the linear module with a role's weights (one name for a fused q, k, v)."""
    row = architecture_of(model)
    if role == "o":
        name = row.output
    else:
        name = row.projections["qkv".index(role) if len(row.projections) == 3 else 0]
    return f"{row.layers}.{layer}.{row.attention}.{name}"


def projection_of(model: PreTrainedModel, layer: int, role: Role) -> nn.Module:
    """The linear module with a role's weights."""
    return model.get_submodule(projection_name(model, layer, role))


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Head counts, read from the config and the shape of the output projection."""
    config = model.config.get_text_config()
    num_heads = int(config.num_attention_heads)
    output = projection_of(model, 0, "o")
    shape = output.weight.shape  # also of an offloaded weight
    assert isinstance(shape, torch.Size)
    width = shape[0 if is_transposed(output) else 1]
    return Geometry(
        num_layers=len(layers_of(model)),
        num_heads=num_heads,
        num_kv_heads=int(architecture_of(model).kv_heads(config) or num_heads),
        head_dim=int(width) // num_heads,
    )


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module, detached: the same storage unless it is offloaded."""
    return held_tensor(module, "weight")


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D keeps (in, out) where a Linear keeps (out, in)."""
    return type(module).__name__ == "Conv1D"


def positions_of(model: PreTrainedModel) -> Positions:
    """How the model knows positions."""
    return architecture_of(model).positions


def alibi_slopes(model: PreTrainedModel) -> Float[Tensor, "head"] | None:
    """Slopes as the model executes them (Falcon rounds its own to bfloat16), or None."""
    row = architecture_of(model)
    return row.slopes(model) if row.positions == "alibi" and row.slopes else None


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's first weights are when it runs: its input goes there."""
    name, _ = next(model.named_parameters())
    return execution_device(model, name)
