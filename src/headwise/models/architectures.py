"""Where the heads of a loaded model are: its row of `families`, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import ArtefactError, ModelError, UnknownArchitectureError
from headwise.models.families.known_families import ARCHITECTURES, NOT_SEPARABLE
from headwise.models.families.layout import Architecture, Positions, Role
from headwise.models.offloading import execution_device, held_tensor

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Geometry:
    """The counts that a head's place follows from."""

    num_layers: int  # with attention
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of values: what the output projection reads of a head
    key_dim: int  # of queries and keys
    own_key_dim: int  # of the key rows a head (or group) has to itself
    layers: tuple[int, ...]  # the model's own numbers of the layers with attention

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have no attention."""
        return self.layers != tuple(range(self.num_layers))

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
    row = ARCHITECTURES.get(family) or proposed_row(model)
    if row is None:
        raise UnknownArchitectureError(
            f"no head layout is known for model_type={family!r}",
            where=f"known: {', '.join(sorted(ARCHITECTURES))}",
            fix="its modules have no shape that headwise can read heads from; add one row to\n"
            "models/families/known_families.py, then prove it with `headwise check MODEL`",
        )
    if not (row.alibi_if or row.query_rank):  # a config takes 65 us to ask, and this is asked often
        return row
    config = model.config.get_text_config()
    if row.alibi_if and getattr(config, row.alibi_if, False):
        return replace(row, positions="alibi")
    if row.query_rank and not getattr(config, row.query_rank, None):
        return replace(row, projections=("q_proj", *row.projections[1:]))
    return row


_PROPOSED = "_headwise_row"  # on the model itself, which alone it was proposed for


def proposed_row(model: PreTrainedModel) -> Architecture | None:
    """The row that the shape of a model without one suggests; `guard` proves or refuses it."""
    row: Architecture | None = vars(model).get(_PROPOSED)
    if row is None:
        from headwise.models.families.proposal import propose_rows  # late: few models need it

        row = next(iter(propose_rows(model)), None)
        keep_row(model, row)
    return row


def keep_row(model: PreTrainedModel, row: Architecture | None) -> None:
    """Use this row for this one model."""
    vars(model)[_PROPOSED] = row


def is_proposed(model: PreTrainedModel) -> bool:
    """Whether the model's family has no row of its own."""
    return str(model.config.model_type) not in ARCHITECTURES


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its output head; some families name none of their own."""
    base: nn.Module = model.base_model
    if base is not model:
        return base
    return model.get_submodule(architecture_of(model).layers.rpartition(".")[0])


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, in order."""
    return list(model.get_submodule(architecture_of(model).layers).children())


def attention_of(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of one layer."""
    return layers_of(model)[layer].get_submodule(architecture_of(model).attention)


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of all layers that have one, by the layers' own numbers."""
    layers, inside = layers_of(model), architecture_of(model).attention
    return {number: layers[number].get_submodule(inside) for number in attention_layers(model)}


def projection_name(model: PreTrainedModel, layer: int, role: Role) -> str:
    """The dotted name of the linear module with a role's weights (one name for a fused q, k, v)."""
    row = architecture_of(model)
    if role == "o":
        name = row.output
    else:
        name = row.projections[min("qkv".index(role), len(row.projections) - 1)]
    return f"{row.layers}.{layer}.{row.attention}.{name}"


def projection_of(model: PreTrainedModel, layer: int, role: Role) -> nn.Module:
    """The linear module with a role's weights."""
    return model.get_submodule(projection_name(model, layer, role))


def attention_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The model's own numbers of the layers that have attention: all of them but in hybrids."""
    row = architecture_of(model)
    paths = [f"{row.attention}.{name}" for name in (*row.projections, row.output)]
    layers = enumerate(layers_of(model))
    return tuple(n for n, layer in layers if all(_submodule(layer, path) for path in paths))


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    inner: nn.Module | None = module
    for name in path.split("."):
        inner = None if inner is None else getattr(inner, "_modules", {}).get(name)
    return inner


def geometry_of(model: PreTrainedModel, layer: int | None = None) -> Geometry:
    """Head counts: the config says how many heads, the shapes of the projections the rest.

    Of one layer, or of the first one where they are all alike.
    """
    row, layers = architecture_of(model), attention_layers(model)
    if not layers:
        raise UnknownArchitectureError(
            f"the row for {model.config.model_type!r} fits no layer of this model",
            where=f"{row.layers}.*.{row.attention}: {', '.join((*row.projections, row.output))}",
            fix="correct the row in src/headwise/models/families/known_families.py",
        )
    chosen = layers[0] if layer is None else layer
    config = model.config.get_text_config()
    counts = getattr(config, "num_attention_heads_per_layer", None) or config.num_attention_heads
    if not isinstance(counts, int) and len(set(counts)) > 1:
        raise UnknownArchitectureError(
            f"the layers of this {model.config.model_type!r} model have different numbers of heads "
            f"({', '.join(map(str, sorted(set(counts))))}), and its maps would not be tables",
            where="num_attention_heads_per_layer of its config",
            fix="choose a model whose layers have one number of heads",
        )
    num_heads = counts if isinstance(counts, int) else int(counts[0])
    value_dim = widths(projection_of(model, chosen, "o"))[0] // num_heads
    query_rows = widths(projection_of(model, chosen, "q"))[1]
    key_rows = widths(projection_of(model, chosen, "k"))[1]
    key_dim = own_key_dim = value_dim
    kv_heads = num_heads
    if row.order == "latent":
        key_dim, own_key_dim = query_rows // num_heads, key_rows // num_heads - value_dim
    elif row.order == "split":
        key_dim = own_key_dim = query_rows // num_heads // (2 if row.gate_in_query else 1)
        kv_heads = key_rows // key_dim
    else:
        kv_heads = (query_rows // value_dim - num_heads) // 2
    return Geometry(len(layers), num_heads, kv_heads, value_dim, key_dim, own_key_dim, layers)


def widths(module: nn.Module) -> tuple[int, int]:
    """What a linear module reads and writes, also where its weight is packed or offloaded."""
    features = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if None not in features:
        return int(features[0] or 0), int(features[1] or 0)
    shape = module.weight.shape
    assert isinstance(shape, torch.Size)
    return (shape[0], shape[1]) if is_transposed(module) else (shape[1], shape[0])


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module, detached: the same storage unless it is offloaded."""
    return held_tensor(module, "weight")


def is_plain(module: nn.Module) -> bool:
    """Whether a projection is an ordinary matrix of floating-point numbers, not a packed one."""
    weight = getattr(module, "weight", None)
    falcon = isinstance(module, nn.Linear) and type(module).__name__ == "FalconLinear"
    if not (type(module) is nn.Linear or falcon or is_transposed(module)):
        return False
    return isinstance(weight, Tensor) and type(weight.data) is Tensor and weight.is_floating_point()


def require_plain(model: PreTrainedModel, layers: Iterable[int] | None = None) -> None:
    """Refuse packed numbers: a quantised projection has no slices that could be written."""
    for layer in sorted(attention_layers(model) if layers is None else layers):
        for role in ROLES:
            module = projection_of(model, layer, role)
            if not is_plain(module):
                raise ArtefactError(
                    f"the {role} weights of layer {layer} are quantised, and slices of them "
                    "cannot be written",
                    where=f"{projection_name(model, layer, role)}: {type(module).__name__}",
                    fix="operate on the model before it is quantised (a float16 or bfloat16 "
                    "checkpoint), and\nquantise the result; diagnose, evaluate and capture work",
                )


def is_packed(model: PreTrainedModel) -> bool:
    """Whether some attention weights are quantised."""
    layers = attention_layers(model)
    return not all(is_plain(projection_of(model, n, role)) for n in layers for role in ROLES)


def dense_weight(module: nn.Module) -> Float[Tensor, "out in"]:
    """What a projection multiplies by, in float32; of a quantised one, what it does to each unit.

    A quantised projection is asked for its answers: however it packs its numbers, it is linear.
    """
    if is_plain(module):
        weight = weight_of(module).float()
        return weight.T if is_transposed(module) else weight
    name, parameter = next(iter(module.named_parameters()), ("", None))
    device = None if parameter is None else execution_device(module, name)
    units = torch.eye(widths(module)[0], device=device)
    with torch.inference_mode():
        answers: Tensor = module(units) - module(torch.zeros_like(units[:1]))
    return answers.float().T


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D keeps (in, out) where a Linear keeps (out, in)."""
    return type(module).__name__ == "Conv1D"


def positions_of(model: PreTrainedModel) -> Positions:
    """How the model knows positions."""
    return architecture_of(model).positions


def max_positions(model: PreTrainedModel) -> int | None:
    """The positions the model was made for, None where it has no limit of its own."""
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min((int(limit) for limit in named if limit), default=None)


def layer_window(model: PreTrainedModel, layer: int) -> int | None:
    """The sliding window of a layer in tokens, None for full attention."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def require_groups(model: PreTrainedModel) -> None:
    """Refuse heads that cannot share keys evenly; such a model does not run."""
    for layer in attention_layers(model):
        shape = geometry_of(model, layer)
        if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
            raise ModelError(
                f"its config has {shape.num_heads} heads on {shape.num_kv_heads} key/value heads",
                where=f"layer {layer} of {model.config._name_or_path or model.config.model_type}",
                fix="correct num_key_value_heads in its config.json: it divides the heads",
            )


def alibi_slopes(model: PreTrainedModel) -> Float[Tensor, "head"] | None:
    """Slopes as the model executes them (Falcon rounds its own to bfloat16), or None."""
    row = architecture_of(model)
    return row.slopes(model) if row.positions == "alibi" and row.slopes else None


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's first weights are when it runs: its input goes there."""
    name, _ = next(model.named_parameters())
    return execution_device(model, name)
