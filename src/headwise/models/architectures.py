"""Where the heads of each model family live: one table row a family.

Every layout met so far is one of three orders of rows in the projections (`split`, `concat`,
`grouped`); BLOOM's "interleaved per head" is `grouped` with one query head a key head. A row is a
claim; `check.py` proves it on the model at hand by moving weights and watching the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.errors import UnknownArchitectureError

Order = Literal["split", "concat", "grouped"]


Positions = Literal["rope", "alibi", "learned", "none"]


Role = Literal["q", "k", "v", "o"]


@dataclass(frozen=True)
class Architecture:
    """One family: dotted module paths and the order of heads inside the projections."""

    blocks: str  # the list of layers, from the model
    attention: str  # from a layer
    projections: tuple[str, ...]  # q, k, v, or the one fused projection; from the attention module
    output: str
    order: Order
    positions: Positions
    mlp_in: tuple[str, ...]  # from a layer; two names for a gated MLP, one name with `*2` if fused
    mlp_out: str
    interface: bool = True  # False: the family bypasses transformers' AttentionInterface


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


_QKV = ("q_proj", "k_proj", "v_proj")


_GATED = ("mlp.gate_proj", "mlp.up_proj")


def _llama(positions: Positions = "rope") -> Architecture:
    return Architecture(
        "model.layers", "self_attn", _QKV, "o_proj", "split", positions, _GATED, "mlp.down_proj"
    )


ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture(
        "transformer.h",
        "self_attention",
        ("query_key_value",),
        "dense",
        "grouped",
        "alibi",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        interface=False,
    ),
    "falcon": Architecture(  # rope unless config.alibi
        "transformer.h",
        "self_attention",
        ("query_key_value",),
        "dense",
        "grouped",
        "rope",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        interface=False,
    ),
    "mpt": Architecture(
        "transformer.blocks",
        "attn",
        ("Wqkv",),
        "out_proj",
        "concat",
        "alibi",
        ("ffn.up_proj",),
        "ffn.down_proj",
        interface=False,
    ),
    "gpt2": Architecture(
        "transformer.h",
        "attn",
        ("c_attn",),
        "c_proj",
        "concat",
        "learned",
        ("mlp.c_fc",),
        "mlp.c_proj",
    ),
    "gptj": Architecture(
        "transformer.h",
        "attn",
        _QKV,
        "out_proj",
        "split",
        "rope",
        ("mlp.fc_in",),
        "mlp.fc_out",
        interface=False,
    ),
    "gpt_neox": Architecture(
        "gpt_neox.layers",
        "attention",
        ("query_key_value",),
        "dense",
        "grouped",
        "rope",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
    ),
    "opt": Architecture(
        "model.decoder.layers", "self_attn", _QKV, "out_proj", "split", "learned", ("fc1",), "fc2"
    ),
    "phi3": Architecture(
        "model.layers",
        "self_attn",
        ("qkv_proj",),
        "o_proj",
        "concat",
        "rope",
        ("mlp.gate_up_proj*2",),
        "mlp.down_proj",
    ),
    "starcoder2": Architecture(
        "model.layers", "self_attn", _QKV, "o_proj", "split", "rope", ("mlp.c_fc",), "mlp.c_proj"
    ),
    "gemma": _llama(),
    "gemma2": _llama(),
    "gemma3_text": _llama(),
    "granite": _llama(),
    "llama": _llama(),
    "mistral": _llama(),
    "olmo": _llama(),
    "qwen2": _llama(),
    "qwen3": _llama(),
    "smollm3": _llama(),
    "stablelm": _llama(),
}


NOT_SEPARABLE: dict[str, str] = dict.fromkeys(
    ("olmo2", "olmo3", "flex_olmo", "minimax_m2", "olmo_hybrid"),
    "its query/key norm runs across all heads of a layer, so a change in one head's weights moves "
    "every other head",
)


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
            fix="add one row to ARCHITECTURES in headwise/architectures.py,\n"
            "then prove it with `headwise check MODEL`",
        )
    if family == "falcon" and getattr(model.config, "alibi", False):
        return Architecture(**{**row.__dict__, "positions": "alibi"})
    return row


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers, in order."""
    return list(model.get_submodule(architecture_of(model).blocks).children())


def attention_of(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of one layer."""
    return blocks_of(model)[layer].get_submodule(architecture_of(model).attention)


def projection_name(model: PreTrainedModel, layer: int, role: Role) -> str:
    """The dotted name of the linear module with a role's weights (one name for a fused q, k, v)."""
    row = architecture_of(model)
    if role == "o":
        name = row.output
    else:
        name = row.projections["qkv".index(role) if len(row.projections) == 3 else 0]
    return f"{row.blocks}.{layer}.{row.attention}.{name}"


def projection_of(model: PreTrainedModel, layer: int, role: Role) -> nn.Module:
    """The linear module with a role's weights."""
    return model.get_submodule(projection_name(model, layer, role))


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Head counts, read from the config and the shape of the output projection."""
    config = model.config.get_text_config()
    num_heads = int(config.num_attention_heads)
    output = projection_of(model, 0, "o")
    width = weight_of(output).shape[0 if is_transposed(output) else 1]
    return Geometry(
        num_layers=len(blocks_of(model)),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=int(width) // num_heads,
    )


def _num_kv_heads(config: object, num_heads: int) -> int:
    if getattr(config, "model_type", "") == "falcon":
        grouped = bool(getattr(config, "new_decoder_architecture", False))
        multi_query = bool(getattr(config, "multi_query", True))
        if grouped or not multi_query:
            return int(getattr(config, "num_kv_heads", None) or num_heads)
        return 1
    return int(getattr(config, "num_key_value_heads", None) or num_heads)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module, detached: the same storage, no gradient."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D keeps (in, out) where a Linear keeps (out, in)."""
    return type(module).__name__ == "Conv1D"


def positions_of(model: PreTrainedModel) -> Positions:
    """How the model knows positions."""
    return architecture_of(model).positions


def alibi_slopes(model: PreTrainedModel) -> Float[Tensor, "head"] | None:
    """Slopes as the model executes them (Falcon rounds its own to bfloat16), or None."""
    if positions_of(model) != "alibi":
        return None
    return _SLOPES[str(model.config.model_type)](model)


def _bloom_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    count = int(model.config.num_attention_heads)
    return build_alibi_tensor(torch.ones(1, 2), count, torch.float32)[:, 0, 1]


def _falcon_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    count = int(model.config.num_attention_heads)
    return build_alibi_tensor(torch.ones(1, 2), count, torch.float32)[:, 0, 1]


def _mpt_slopes(model: PreTrainedModel) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    # Keys at -1 and 0 relative to the last query: the first value is minus the slope. The model
    # itself always uses alibi_bias_max = 8, whatever its config says.
    bias: Tensor = build_mpt_alibi_tensor(int(model.config.num_attention_heads), 2)
    return -bias[:, 0, 0].float()


_SLOPES: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "bloom": _bloom_slopes,
    "falcon": _falcon_slopes,
    "mpt": _mpt_slopes,
}


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's first weights are."""
    return next(model.parameters()).device
