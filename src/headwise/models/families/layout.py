"""What headwise knows of a model family: the fields of one row of `known_families.py`.

Every layout met so far is one of three orders of rows in the projections (`split`, `concat`,
`grouped`); BLOOM's "interleaved per head" is `grouped` with one query head per key head. The fourth
is latent attention: keys and values of a head are rows of one matrix behind a shared compression.
The defaults are the layout of Llama, which most families copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

Order = Literal["split", "concat", "grouped", "latent"]
Positions = Literal["rope", "alibi", "learned", "none"]
Role = Literal["q", "k", "v", "o"]


@dataclass(frozen=True)
class AttentionInputs:
    """One call of an attention module that bypasses transformers' AttentionInterface.

    The family's function says what is attended to what; the tap does the attending.
    """

    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value"]
    scale: float
    mask: Tensor | None
    finish: Callable[[Tensor], Any] = field(repr=False)  # merged heads -> what the module returns
    alibi: bool = False  # the tap adds the ALiBi bias of the row's slopes
    bias: Float[Tensor, "batch head 1 key"] | None = None  # or the bias that the model itself made
    window: int | None = None  # a query sees this many keys, itself included


@dataclass(frozen=True)
class Architecture:
    """One family: dotted module paths, the order of heads in the projections, and its habits."""

    layers: str = "model.layers"  # the list of layers, from the model
    attention: str = "self_attn"  # from a layer
    # q, k, v, or the one fused projection; from the attention module
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    order: Order = "split"
    positions: Positions = "rope"
    # from a layer; two names for a gated MLP, one name with `*2` if fused, none for experts
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"

    # Functions, where a family has its own way
    slopes: Callable[[PreTrainedModel], Tensor] | None = None  # of ALiBi, as executed
    # (module, attention implementation when not tapped, arguments of its forward...); None: the
    # family goes through transformers' AttentionInterface
    attention_call: Callable[..., AttentionInputs] | None = None

    # Names of config fields; "" where the family has none
    alibi_if: str = ""  # true: ALiBi instead of `positions`
    clip: str = ""  # bound of |q|, |k| and |v| before they are rotated
    query_rank: str = ""  # of latent attention; without one queries come straight from q_proj
    logits_times: str = ""
    logits_over: str = ""
    logits_cap: str = ""  # cap * tanh(logits / cap)

    # Habits of the family's code
    before_logits: str = ""  # a module between the last hidden states and the output projection
    layer_returns_tuple: bool = False  # (hidden, weights) rather than hidden alone
    takes_position_ids: bool = True  # False: it counts positions from the attention mask
    gate_in_query: bool = False  # q_proj holds query and gate, head by head
    gated: bool = False  # a gate between attention and output projection: read behind it
    needs_mask: bool = False  # it reads the mask even where all is visible
    slow_gelu: str = ""  # the class of a tanh GELU spelled out in several passes over memory
