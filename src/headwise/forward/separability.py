"""Is the architecture known, and are its heads separable? The gate for every row of the table.

Names in a table prove nothing, behaviour does: noise in one head's query weights must change that
head and no other, noise in key or value weights exactly the heads of their group, each must change
only the queries, keys or values it is named after, and zeroed output weights must give the same
logits as removing the head's output while the model runs. Before all that, what headwise computes
must be what the model computes (`faithfulness`).

What is sampled: heads of the first, middle and last layer and of the first layer of each other
kind. `everything` tries every head of every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import HeadwiseError, UnknownArchitectureError
from headwise.forward.faithfulness import (
    SHORTEST,
    Difference,
    compare_runs,
    found_difference,
    proof_length,
    random_ids,
    relative,
    require_eval,
    tolerance_of,
)
from headwise.forward.partial_run import SeenError, run_until_seen
from headwise.forward.tap import LayerAttention, tapped
from headwise.heads import Head
from headwise.models.architectures import (
    architecture_of,
    geometry_of,
    is_proposed,
    keep_row,
    layer_window,
    require_groups,
    require_plain,
)
from headwise.models.families.layout import Architecture, Role
from headwise.models.families.proposal import propose_rows
from headwise.models.loaded_model import LoadedModel
from headwise.models.slices import Span, head_spans, read_slices, spans_of, write_slices
from headwise.progress import Progress, Work, silent, track

_PROVED = "_headwise_proved"  # on the model itself: its row, once the check has passed
NUM_TOKENS = 12  # for the isolation of heads; `compare_runs` goes past windows and chunks
ATTENTION_TOLERANCE = 1e-3  # of masses, and of a head's mean entropy in nats


@dataclass(frozen=True)
class Probe:
    """One tried slice: which heads should have moved, which did, and by which of q, k and v."""

    head: Head
    role: Role
    expected: tuple[int, ...]
    moved: tuple[int, ...]
    touched: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether exactly the expected heads moved, through their own role."""
        return self.expected == self.moved and self.touched == (self.role,)

    def reason(self) -> str:
        """Why it failed, in words."""
        what = f"noise in the {self.role} weights of {self.head}"
        if self.expected == self.moved:
            return f"{what} changed its layer's {', '.join(self.touched) or 'nothing'}"
        return f"{what} moved heads {list(self.moved)} of its layer, expected {list(self.expected)}"


@dataclass(frozen=True)
class HeadCheck:
    """All probes of one model and the worst disagreement of silencing with ablation."""

    probes: tuple[Probe, ...]
    silencing_error: float
    difference: Difference  # tapped against untapped
    tolerance: float

    def __repr__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        return f"HeadCheck({word}: {len(self.probes)} slices, logits {self.logit_change:.0e})"

    @property
    def logit_change(self) -> float:
        """How far the tap moves the logits, of their size."""
        return self.difference.logits

    @property
    def passed(self) -> bool:
        """Whether the heads are where the table says, and separable."""
        return not self.reason()

    def to_json(self) -> dict[str, Any]:
        """The body of `check.json`."""
        return {
            "passed": self.passed,
            "reason": self.reason(),
            "tokens": self.difference.length,
            "sampled": {
                "layers": sorted({probe.head.layer for probe in self.probes}),
                "heads": sorted({probe.head.index for probe in self.probes}),
                "logit_positions": self.difference.positions,
            },
            "implementations": list(self.difference.implementations),
            "silencing_error": self.silencing_error,
            "logit_change": self.logit_change,
            "loss_path_error": self.difference.losses,
            "attention_error": self.difference.attention,
            "probes": [
                {
                    "head": str(probe.head),
                    "role": probe.role,
                    "passed": probe.passed,
                    "expected": list(probe.expected),
                    "moved": list(probe.moved),
                }
                for probe in self.probes
            ],
        }

    def reason(self) -> str:
        """Why the check failed, in words; nothing if it passed."""
        runs, limit = self.difference, self.tolerance
        if runs.logits >= limit:
            size = f"{runs.logits:.1e} of their size ({runs.length} tokens)"
            return f"the tap changes the logits by {size}"
        if runs.layers:
            return f"run by headwise {runs.layers}"
        if runs.contributions >= limit:
            size = f"{runs.contributions:.1e} of its size"
            return f"a head's output is changed before the output projection reads it, by {size}"
        if runs.losses >= limit:
            return f"the loss path's logits differ from the model's own by {runs.losses:.1e}"
        # half precision rounds masses and entropies too
        if runs.attention is not None and runs.attention >= max(ATTENTION_TOLERANCE, limit / 2):
            return f"attention differs from the model's own by {runs.attention:.1e}"
        for probe in self.probes:
            if not probe.passed:
                return probe.reason()
        if self.silencing_error >= limit:
            return f"zeroing its output weights differs from ablation by {self.silencing_error:.1e}"
        return ""


def check(
    model: LoadedModel | PreTrainedModel,
    *,
    seed: int = 0,
    everything: bool = False,
    progress: Progress = silent,
) -> HeadCheck:
    """Prove where heads are, on a sample of layers and heads or on all; no bit of the model moves.

    A family without a row is checked with the row that its shape suggests, if one holds.
    """
    if isinstance(model, LoadedModel):
        model = model.model
    require_eval(model)
    if is_proposed(model):
        prove_row(model)
    return _check_row(model, seed, everything, progress)


def check_work(model: PreTrainedModel, *, everything: bool = False) -> Work:
    """What a check costs: eleven runs of up to two long texts, then two short ones a head."""
    length, heads = proof_length(model), len(_tried_heads(model, everything))
    tokens = 17 * length + heads * (2 + 3) * NUM_TOKENS
    return Work(tokens, 2 * length, less="check without --all")


def _tried_heads(model: PreTrainedModel, everything: bool) -> list[Head]:
    """Heads at both ends and in the middle of layers at both ends, in the middle, of each kind."""
    geometry = geometry_of(model)
    layers, indices = geometry.layers, list(range(geometry.num_heads))
    if not everything:
        kinds = {(geometry_of(model, one), layer_window(model, one)): one for one in layers[::-1]}
        layers = tuple(sorted({*(layers[row] for row in _ends(len(layers))), *kinds.values()}))
        indices = _ends(geometry.num_heads)
    return [Head(layer, index) for layer in layers for index in indices]


def _check_row(
    model: PreTrainedModel,
    seed: int = 0,
    everything: bool = False,
    progress: Progress = silent,
) -> HeadCheck:
    require_groups(model)
    require_plain(model)  # weights are moved here
    _require_row_fits(model)
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(model, 1, NUM_TOKENS, seed)
    heads = _tried_heads(model, everything)
    layers = sorted({head.layer for head in heads})
    difference = compare_runs(model, seed=seed, everything=everything, progress=progress)
    probes, silencing = list[Probe](), 0.0
    with torch.inference_mode(), _noise(model, _pruned(model, layers), generator):
        before = {layer: _seen(model, ids, layer) for layer in layers}
        for head in track(heads, "moving the slices of heads", progress):
            probes += [
                _probe(model, ids, head, role, before[head.layer], generator)
                for role in ("q", "k", "v")
            ]
            silencing = max(silencing, _silencing_error(model, ids, head))
    return HeadCheck(tuple(probes), silencing, difference, tolerance_of(model))


def _pruned(model: PreTrainedModel, layers: list[int]) -> list[Span]:
    """Weights of nothing but zeros: a head with such keys does not move with its queries."""
    zeros: list[Span] = []
    for layer in layers:
        for index in range(geometry_of(model, layer).num_heads):
            for role in ("q", "k", "v"):
                spans = head_spans(model, Head(layer, index), role).values()
                zeros += [s for s in spans if s.of(model).ndim == 2 and not s.of(model).any()]
    return list(dict.fromkeys(zeros))


def _ends(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _probe(
    model: PreTrainedModel,
    ids: Tensor,
    head: Head,
    role: Role,
    before: dict[str, Float[Tensor, "heads position dim"]],
    generator: torch.Generator,
) -> Probe:
    geometry = geometry_of(model, head.layer)
    spans = list(head_spans(model, head, role).values())
    with _noise(model, spans, generator):
        after = _seen(model, ids, head.layer)
    outs = zip(before["out"], after["out"], strict=True)
    moved = [i for i, (old, new) in enumerate(outs) if not torch.equal(old, new)]
    touched = [name for name in "qkv" if not torch.equal(before[name], after[name])]
    first = head.index // geometry.group * geometry.group
    expected = (head.index,) if role == "q" else tuple(range(first, first + geometry.group))
    return Probe(head, role, expected, tuple(moved), tuple(touched))


def _require_row_fits(model: PreTrainedModel) -> None:
    """Refuse a row whose names or ranges do not exist in the model at hand."""
    geometry = geometry_of(model)
    last = Head(geometry.layers[-1], geometry.num_heads - 1)
    try:
        for span in spans_of(model, [last]).values():
            span.of(model)
    except (AttributeError, RuntimeError, IndexError) as error:
        raise UnknownArchitectureError(
            f"the row for {model.config.model_type!r} does not fit this model ({error})",
            fix="correct the row in src/headwise/models/families/known_families.py",
        ) from None


def _seen(model: PreTrainedModel, ids: Tensor, layer: int) -> dict[str, Tensor]:
    """Queries, keys, values and head outputs of one layer for one text."""

    def read(attention: LayerAttention) -> None:
        if attention.layer == layer:
            scores = attention.scores
            parts = {"q": scores.q, "k": scores.k, "v": attention.v, "out": attention.out}
            raise SeenError({name: part[0] for name, part in parts.items()})

    with tapped(model, read):
        parts: dict[str, Tensor] = run_until_seen(model, ids)
    return parts


@contextmanager
def _noise(model: PreTrainedModel, spans: list[Span], generator: torch.Generator) -> Iterator[None]:
    named = {str(number): span for number, span in enumerate(spans)}
    before = read_slices(model, named)
    try:
        noisy = {}
        for number, span in named.items():
            value = before[number]
            noise = torch.randn(value.shape, generator=generator).to(value)
            noisy[span] = value + noise * (value.float().std(correction=0) + 0.1).to(value)
        write_slices(model, noisy)
        yield
    finally:
        write_slices(model, {span: before[number] for number, span in named.items()})


def _silencing_error(model: PreTrainedModel, ids: Tensor, head: Head) -> float:
    spans = head_spans(model, head, "o")
    before = read_slices(model, spans)
    try:
        write_slices(model, {span: torch.zeros_like(before[n]) for n, span in spans.items()})
        silenced = model(ids, use_cache=False).logits
    finally:
        write_slices(model, {span: before[n] for n, span in spans.items()})

    def ablate(attention: LayerAttention) -> Tensor | None:
        if attention.layer != head.layer:
            return None
        out = attention.out.clone()
        out[:, head.index] = 0
        return out

    with tapped(model, ablate):
        ablated = model(ids, use_cache=False).logits
    return relative(ablated, silenced)


def prove_row(model: PreTrainedModel) -> Architecture:
    """The row that this model's shape suggests, if one passes the whole check on it."""
    proved: Architecture | None = vars(model).get(_PROVED)
    if proved is not None:
        return proved
    architecture_of(model)  # a family that is refused by name, or has no shape to read
    reasons = []
    for row in propose_rows(model):
        reason = _tried(model, row)
        if not reason:
            vars(model)[_PROVED] = row
            return row
        reasons.append(reason)
    keep_row(model, None)
    raise UnknownArchitectureError(
        f"no head layout is known for model_type={model.config.model_type!r}, and the one that its "
        f"modules suggest does not hold: {reasons[0]}",
        fix="choose a model of another family; `headwise check` lists the known ones",
    )


def _tried(model: PreTrainedModel, row: Architecture) -> str:
    """Why a row does not hold for the model; nothing if it does."""
    keep_row(model, row)
    try:
        difference = found_difference(model, SHORTEST)
        if difference:
            return f"run by headwise {difference}"
        return _check_row(model).reason()
    except HeadwiseError as error:
        return str(error).partition("\n")[0]
    except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
