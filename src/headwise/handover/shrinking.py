"""A physically smaller model: heads that a patch retired are cut out of the weights.

A config has one number of heads for all layers, so every layer loses as many: those of the layer
that retired fewest. Retired heads beyond that stay as the patch has them. A head that gives a
constant leaves it in the output bias, if the family's config can have one. What is written was
compared, logit by logit, with the patched model whose retired heads give their constants; a family
that cannot be shrunk so says why.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headwise.artefacts import load_artefact, save_artefact
from headwise.errors import HeadwiseError, ModelError
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head, format_heads
from headwise.models.architectures import dense_weight, geometry_of, projection_name, projection_of
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import quietly
from headwise.models.patch import Patch
from headwise.models.slices import Span, head_spans
from headwise.surgery.plan import plans_of
from headwise.values import from_plain, plain_fields

SHRUNKEN = "headwise_shrink.json"
TOLERANCE = 1e-5  # of the largest logit
_COMPARED = (2, 48)  # texts and tokens on which logits are compared


@dataclass(frozen=True)
class Shrunken:
    """What was cut, what that saves, and how equal the smaller model is."""

    removed: str  # heads
    num_heads: int  # of every layer, afterwards
    num_kv_heads: int
    weights: int  # of the smaller model
    saved_weights: int
    saved_cache_bytes: int  # per token
    largest_difference: float  # of logits to those of the patched model, relative to their size

    @staticmethod
    def load(folder: Path) -> Shrunken:
        """Read what a shrunken model directory says of itself."""
        path = folder / SHRUNKEN
        return from_plain(Shrunken, load_artefact(path, "shrink"), path)

    def __str__(self) -> str:
        share = self.saved_weights / (self.weights + self.saved_weights)
        return (
            f"{self.num_heads} heads on {self.num_kv_heads} key/value heads are left in every "
            f"layer; {self.saved_weights:,} weights ({share:.1%}) and {self.saved_cache_bytes:,} "
            f"bytes of cache per token are saved; logits differ by {self.largest_difference:.0e} "
            "of their size"
        )


def shrink(loaded: LoadedModel, patch: Patch, out: Path) -> Shrunken:
    """Write the model that carries `patch` without the heads that it retired."""
    model = loaded.model
    heads, num_heads, num_kv_heads = removable_heads(model, patch)
    given = _given_at_first(loaded)
    constants = _constants(model, heads, given)
    config = copy.deepcopy(model.config)
    _set_heads(model, config.get_text_config(), num_heads, num_kv_heads, bool(constants))
    try:
        small = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise _refusal(model, f"its code cannot build such a model ({str(error)[:120]})") from None
    _fill(model, small, heads, num_kv_heads < geometry_of(model).num_kv_heads, constants)
    difference = _difference(model, small, heads, given)
    if difference > TOLERANCE:
        raise _refusal(
            model,
            f"its logits would differ by {difference:.1e} of their size: something in it depends "
            "on the number of a head",
        )
    with quietly():
        small.save_pretrained(out)
        loaded.tokenizer.save_pretrained(out)
    shape, weights = geometry_of(model), sum(p.numel() for p in small.parameters())
    each = model.dtype.itemsize * (shape.key_dim + shape.head_dim) * shape.num_layers
    shrunken = Shrunken(
        removed=format_heads(heads),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        weights=weights,
        saved_weights=sum(p.numel() for p in model.parameters()) - weights,
        saved_cache_bytes=each * (shape.num_kv_heads - num_kv_heads),
        largest_difference=difference,
    )
    save_artefact(out / SHRUNKEN, "shrink", plain_fields(shrunken))
    return shrunken


def removable_heads(model: PreTrainedModel, patch: Patch) -> tuple[list[Head], int, int]:
    """The heads to cut, and how many heads and key/value heads every layer keeps.

    Whole groups if every layer retired one; else as many heads of every group.
    """
    shape, plans = geometry_of(model), plans_of([patch.info])
    selections = (patch.info.retired or {}).values()
    retired = {head for plan in plans for one in selections for head in plan.heads_of(one)}
    if not retired:
        raise ModelError(
            "the patch retires no head", fix="apply a patch of `headwise prune` (with --even)"
        )
    group, heads = shape.group, list[Head]()
    members = {
        (layer, kv): [Head(layer, kv * group + i) for i in range(group)]
        for layer in shape.layers
        for kv in range(shape.num_kv_heads)
    }
    whole = {
        layer: [kv for kv in range(shape.num_kv_heads) if retired >= set(members[layer, kv])]
        for layer in shape.layers
    }
    fewest = min(min(map(len, whole.values())), shape.num_kv_heads - 1)
    if fewest:
        cut = [(layer, kv) for layer, kvs in whole.items() for kv in kvs[:fewest]]
        heads = [head for place in cut for head in members[place]]
        return sorted(heads), shape.num_heads - fewest * group, shape.num_kv_heads - fewest
    gone = {place: [head for head in some if head in retired] for place, some in members.items()}
    place = min(gone, key=lambda place: len(gone[place]))
    fewest = min(len(gone[place]), group - 1)
    if not fewest:
        what = f"group {place[1]} of layer {place[0]}" if group > 1 else f"layer {place[0]}"
        raise _refusal(model, f"{what} loses no head, and its config has one number for all")
    heads = [head for some in gone.values() for head in some[:fewest]]
    return sorted(heads), shape.num_heads - fewest * shape.num_kv_heads, shape.num_kv_heads


def _refusal(model: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"the model cannot be written smaller: {why}",
        where=f"model_type={model.config.model_type!r}",
        fix="apply without --shrink; prune --even takes as many heads from every layer, and "
        "--replacement zero needs no output bias",
    )


@torch.inference_mode()
def _given_at_first(loaded: LoadedModel) -> dict[int, Float[Tensor, "head value"]]:
    """What heads give at the first token, by layer: a retired one gives the same everywhere."""
    outputs: dict[int, Tensor] = {}
    with tapped(loaded.model, lambda one: outputs.__setitem__(one.layer, one.out[0, :, 0].float())):
        first = loaded.tokenizer.bos_token_id if loaded.bos else 0
        loaded.model(torch.tensor([[first or 0]]), use_cache=False)
    return outputs


def _constants(
    model: PreTrainedModel, heads: Sequence[Head], given: Mapping[int, Tensor]
) -> dict[int, Float[Tensor, "hidden"]]:
    """What the heads add to the output of their layers at every token, where that is anything."""
    constants: dict[int, Tensor] = {}
    for layer, out in given.items():
        columns = dense_weight(projection_of(model, layer, "o")).T.unflatten(0, (len(out), -1))
        gone = [head.index for head in heads if head.layer == layer]
        added = torch.einsum("hv,hvd->d", out[gone], columns[gone])
        if bool(added.any()):
            constants[layer] = added
    return constants


def _set_heads(
    model: PreTrainedModel, config: object, num_heads: int, num_kv_heads: int, biased: bool
) -> None:
    """Change the config; refuse what it has no field for."""
    shape, fields = geometry_of(model), vars(config)
    biases = getattr(projection_of(model, shape.layers[0], "o"), "bias", None)
    if biased and biases is None and "attention_bias" not in fields:
        raise _refusal(model, "its heads give a constant, and its config has no output bias")
    if not hasattr(config, "head_dim"):
        raise _refusal(model, "its config has no head_dim: width and number of heads are one")
    changes: dict[str, object] = {"num_attention_heads": num_heads, "head_dim": shape.head_dim}
    if hasattr(config, "num_key_value_heads"):
        changes["num_key_value_heads"] = num_kv_heads
    if biased and biases is None:
        changes["attention_bias"] = True
    for name, value in changes.items():
        setattr(config, name, value)


@torch.no_grad()
def _fill(
    model: PreTrainedModel,
    small: PreTrainedModel,
    heads: Sequence[Head],
    groups: bool,
    constants: Mapping[int, Tensor],
) -> None:
    """Copy every weight but the cut slices; new biases are 0 but for the constants."""
    cut: dict[str, list[Span]] = {}
    for head in heads:
        for role in "qkvo" if groups else "qo":
            for span in head_spans(model, head, role).values():  # type: ignore[arg-type]
                cut.setdefault(span.parameter, []).append(span)
    old = dict(model.named_parameters())
    biases = {f"{projection_name(model, n, 'o')}.bias": c for n, c in constants.items()}
    for name, parameter in small.named_parameters():
        value = old[name].detach() if name in old else torch.zeros_like(parameter)
        if name in cut:
            axis = cut[name][0].axis
            gone = {i for span in cut[name] for i in range(span.start, span.stop)}
            value = value.index_select(
                axis, torch.tensor([i for i in range(value.shape[axis]) if i not in gone])
            )
        if value.shape != parameter.shape:
            raise _refusal(
                model,
                f"{name} would be {tuple(value.shape)}, its code expects {tuple(parameter.shape)}",
            )
        parameter.copy_(value + biases[name].to(value) if name in biases else value)
    missing = set(biases) - {name for name, _ in small.named_parameters()}
    if missing:
        raise _refusal(model, "its heads give a constant, and its code has no output bias")


@torch.inference_mode()
def _difference(
    model: PreTrainedModel,
    small: PreTrainedModel,
    heads: Sequence[Head],
    given: Mapping[int, Tensor],
) -> float:
    """The largest difference of logits on random tokens, relative to the largest logit.

    In the larger model the heads give their constants: tokens that no text has wake parked heads.
    """

    def ablate(attention: LayerAttention) -> Tensor | None:
        gone = [head.index for head in heads if head.layer == attention.layer]
        out = attention.out.clone()
        out[:, gone] = given[attention.layer][gone][:, None].to(out)
        return out

    size, start = int(model.config.get_text_config().vocab_size), model.config.bos_token_id
    ids = torch.randint(size, _COMPARED, generator=torch.Generator().manual_seed(0))
    if isinstance(start, int):
        ids[:, 0] = start
    try:
        ours = small(ids, use_cache=False).logits.float()
        with tapped(model, ablate):
            theirs = model(ids, use_cache=False).logits.float()
    except RuntimeError as error:
        raise HeadwiseError(f"the smaller model does not run ({str(error)[:120]})") from None
    return float((ours - theirs).abs().max() / theirs.abs().max())
