"""Treatments: what is done to a head's slices before training, one row each.

A row is a formula in float32 on the head's own slices as (out, in) matrices; `treat` turns a
prescription (head -> treatment and dose) into the `Patch` that training starts from. Nothing but
the plan's slices is ever written, whatever a formula returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import SelectionError
from headwise.forward.losses import shifted_targets, summed_loss
from headwise.forward.tap import tapped
from headwise.heads import Head, format_heads
from headwise.models.architectures import backbone_of, device_of, geometry_of, layer_window
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span, head_spans, output_bias_span, read_slices, spans_of
from headwise.models.values import PatchInfo
from headwise.settings import changed
from headwise.surgery.operation import healthy_std, operate, unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.sink_directions import (
    LayerDirections,
    measure_directions,
    with_directions,
)
from headwise.surgery.slice_training import make_masters, master_slices, training_slices
from headwise.texts.batches import Batch
from headwise.texts.corpus import spread_blocks

SLOPE_BLOCKS = 16  # training blocks that slopes are measured on
_TINY = 1e-12
_PARKED_ERROR = 0.02  # a parked head's outputs may differ by so much from the first token's
RetiredBy = Literal["bias", "parked", "zeroed"]
Slices = dict[str, Float[Tensor, "..."]]  # by role: q, q_bias, k, ...; weights as (out, in)


@dataclass(frozen=True)
class Case:
    """One head on the table: its slices, what was measured of its layer, and where it is."""

    model: PreTrainedModel = field(repr=False)
    plan: SurgeryPlan = field(repr=False)
    head: Head
    slices: Slices = field(repr=False)
    directions: LayerDirections | None = field(repr=False)

    @property
    def measured(self) -> LayerDirections:
        """The directions of the head's layer."""
        if self.directions is None:
            raise SelectionError(f"{self.head}: this treatment needs measured directions")
        return self.directions

    @property
    def retired_by(self) -> RetiredBy:
        """How the head comes to give its mean output: by the bias, parked, or not at all."""
        if "o_bias" in self.slices:
            return "bias"
        if layer_window(self.model, self.head.layer) is not None:
            return "zeroed"  # the token that it would be parked on leaves the window
        error = float(self.measured.parked_error[self.head.index])
        return "parked" if self.plan.bos and error <= _PARKED_ERROR else "zeroed"

    def noise(self, role: str, like: Tensor) -> Tensor:
        """Standard normal numbers that follow from the plan's seed, the head and the role alone."""
        digest = hashlib.sha256(f"{self.plan.seed}/{self.head}.{role}/noise".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        return torch.randn(like.shape, generator=generator)


Formula = Callable[[Case, float], Slices]


@dataclass(frozen=True)
class Treatment:
    """One row: what it writes, by which formula, and what it needs to know."""

    name: str
    writes: str  # roles: q, k, v, o; biases come with their weights
    formula: Formula = field(repr=False)
    says: str
    dose: float = 1.0  # if none is asked for
    doses: tuple[float, ...] = ()  # what a search tries; () if there is nothing to search
    preserves_function: bool = False
    measures: bool = False  # needs `measure_directions`
    slopes: bool = False  # and `with_slopes`


def _release(case: Case, dose: float) -> Slices:
    u = case.measured.sink[case.head.index]
    return {role: part - dose * _along(u, part) for role, part in _queries(case).items()}


def _along(u: Float[Tensor, "dim"], part: Tensor) -> Tensor:
    """What of a weight (dim, hidden) or a bias (dim) points along u."""
    return u * (u @ part) if part.ndim == 1 else torch.outer(u, u @ part)


def _queries(case: Case) -> Slices:
    return {role: part for role, part in case.slices.items() if role in ("q", "q_bias")}


def _centre(case: Case, dose: float) -> Slices:
    return _shifted(case, dose * case.measured.query_mean[case.head.index])


def _centre_sink(case: Case, dose: float) -> Slices:
    u, mean = case.measured.sink[case.head.index], case.measured.query_mean[case.head.index]
    return _shifted(case, dose * u * (u @ mean))


def _shifted(case: Case, shift: Float[Tensor, "dim"]) -> Slices:
    """Queries less a constant: in the bias, or by rank one on what is constant in the input."""
    if "q_bias" in case.slices:
        return {"q_bias": case.slices["q_bias"] - shift}
    return {"q": case.slices["q"] - torch.outer(shift, case.measured.constant)}


def _evict(case: Case, dose: float) -> Slices:
    """The sink's key becomes the mean of the others; keys of the mean input stay."""
    if "k" not in case.slices:
        return {}  # its key/value group is shared with heads outside the plan
    found = case.measured
    gap = dose * found.key_gap[case.head.index]
    first, mean = found.sink_input[case.head.index], found.mean_input
    if "k_bias" in case.slices:
        w = (first - mean) / (first - mean).square().sum()
        bias = case.slices["k_bias"] + gap * (w @ mean)
        return {"k": case.slices["k"] - torch.outer(gap, w), "k_bias": bias}
    apart = first - mean * (first @ mean) / (mean @ mean)
    return {"k": case.slices["k"] - torch.outer(gap, apart / (apart @ first))}


def _temper(case: Case, dose: float) -> Slices:
    return {role: part * dose for role, part in _queries(case).items()}


def _seek(case: Case, dose: float) -> Slices:
    """One step down the slope of the loss, `dose` tenths as long as a healthy head's W_q.

    A head without queries has keys, values and outputs that fit what it once looked for; where
    that was, only the loss knows. How far the slope holds is for a search to find out.
    """
    slopes = case.measured.query_slope
    if slopes is None:
        raise SelectionError(f"{case.head}: seek needs the slope of the loss by the queries")
    q, slope = case.slices["q"], slopes[case.head.index]
    healthy = healthy_std(case.model, case.plan, case.head.layer, "q") * q.numel() ** 0.5
    step = 0.1 * dose * healthy / slope.norm().clamp_min(_TINY)
    return {"q": q - step * slope}


def _shrink_perturb(case: Case, dose: float) -> Slices:
    """`dose` of the weight, the rest as noise of the size of the layer's healthy heads."""
    found: Slices = {}
    for role in ("q", "k"):
        if role in case.slices:
            std = healthy_std(case.model, case.plan, case.head.layer, role)
            noise = case.noise(role, case.slices[role]) * std
            found[role] = dose * case.slices[role] + (1 - dose) * noise
    return found


def _regrow(case: Case, dose: float) -> Slices:
    """V and O as large as in the layer's healthy heads, where they are less than half of that.

    Weight decay shrinks the slices of a head that gets no gradient and keeps their direction: what
    the head could do is small, not gone. Slices that are large enough stay as they are.
    """
    found: Slices = {}
    for role in ("v", "o"):
        own = float(case.slices[role].std()) if role in case.slices else 0.0
        growth = healthy_std(case.model, case.plan, case.head.layer, role) / own if own else 1.0
        if growth > _DECAYED:
            names = {role, "v_bias"} if role == "v" else {role}  # the output bias is the layer's
            found |= {name: case.slices[name] * growth**dose for name in names & set(case.slices)}
    return found


def _donor(case: Case, dose: float) -> Slices:
    """Q and K of the nearest healthy head, plus `dose` of its size as noise; V and O are kept."""
    healthy = case.plan.healthy_heads
    if not healthy:
        raise SelectionError("the donor treatment needs a healthy head", fix="plan another one")
    at = case.head
    donor = min(healthy, key=lambda h: (abs(h.layer - at.layer), abs(h.index - at.index), h))
    given = head_slices(case.model, donor, "qk")
    return {
        role: part + dose * part.std() * case.noise(role, part) if part.ndim == 2 else part
        for role, part in given.items()
        if role in case.slices
    }


def _mute(case: Case, dose: float) -> Slices:
    return {"o": case.slices["o"] * (1 - dose)}


def _retire(case: Case, dose: float) -> Slices:
    """The mean output at every token; where it cannot be had, nothing (`retired_by` says which).

    A parked head gives v0, the first token's output, at every token: W_o m v0^T / |v0|^2 turns it
    into W_o m. The dose does not matter: a head is retired or not.
    """
    weight, way = case.slices["o"], case.retired_by
    if way == "zeroed":
        return {"o": torch.zeros_like(weight)}
    given = weight @ case.measured.mean_output[case.head.index]
    if way == "bias":
        return {"o": torch.zeros_like(weight), "o_bias": case.slices["o_bias"] + given}
    first = case.measured.first_output[case.head.index]
    query = case.measured.parked_query[case.head.index]
    rank_one = {"o": torch.outer(given, first / first.square().sum())}
    if "q_bias" in case.slices:
        return rank_one | {"q": torch.zeros_like(case.slices["q"]), "q_bias": query}
    return rank_one | {"q": torch.outer(query, case.measured.constant)}


def _nothing(case: Case, dose: float) -> Slices:
    return {}


_DECAYED = 2.0  # times smaller than in healthy heads: from here on slices count as decayed
_STRENGTHS = (0.6, 0.8, 0.9, 1.0)

TREATMENTS: dict[str, Treatment] = {
    row.name: row
    for row in (
        Treatment(
            "reinitialise", "qkvo", _nothing, "fresh Q, K, V and a silenced output: the surgery"
        ),
        Treatment(
            "release",
            "q",
            _release,
            "W_q - dose u u^T W_q: the query can no longer single out its sink",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment(
            "centre",
            "q",
            _centre,
            "q - dose mean(q): what is constant in the query goes, what varies stays",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment(
            "centre-sink",
            "q",
            _centre_sink,
            "q - dose u u^T mean(q): the constant part along the pull of the sink goes",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment(
            "evict",
            "k",
            _evict,
            "the sink's key becomes like the others; whole key/value groups only",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment("temper", "q", _temper, "q times the dose: flatter attention", dose=0.1),
        Treatment(
            "sharpen", "q", _temper, "q times the dose: sharper attention", 2.0, (1.5, 2.0, 4.0)
        ),
        Treatment(
            "seek",
            "q",
            _seek,
            "W_q moves down the slope of the training loss, dose tenths of a healthy head's W_q",
            dose=0.5,
            doses=(0.2, 0.5, 1.0),
            measures=True,
            slopes=True,
        ),
        Treatment("mute", "o", _mute, "the output times 1 - dose", doses=(0.5, 1.0)),
        Treatment(
            "retire",
            "qo",
            _retire,
            "the mean output at every token: in the output bias, or parked behind a BOS, else none",
            doses=(1.0,),
            measures=True,
        ),
        Treatment(
            "shrink-perturb", "qk", _shrink_perturb, "dose times Q and K, the rest noise", dose=0.5
        ),
        Treatment(
            "regrow",
            "vo",
            _regrow,
            "V and O back to the size of healthy heads, where they decayed below half of it",
        ),
        Treatment(
            "donor", "qk", _donor, "Q and K of the nearest healthy head plus noise", dose=0.1
        ),
        Treatment(
            "none", "", _nothing, "the slices as they are: gradients alone", preserves_function=True
        ),
    )
}


@dataclass(frozen=True)
class Dose:
    """What one head is given, and how much of it."""

    treatment: str
    amount: float

    def __str__(self) -> str:
        return f"{self.treatment} {self.amount:g}"


Prescription = Mapping[Head, Dose]


def treatment_named(name: str) -> Treatment:
    """A row of the table, or several joined by `+`; an unknown name lists the known ones."""
    first, *others = [_row(part) for part in name.split("+")]
    return replace(first, name=name) if not others else _joined(name, first, others)


def _row(name: str) -> Treatment:
    if name not in TREATMENTS:
        raise SelectionError(
            f"no treatment is called {name!r}",
            fix=f"choose auto, {', '.join(TREATMENTS)}, or two of them as in release+regrow",
        )
    return TREATMENTS[name]


def _joined(name: str, first: Treatment, others: Sequence[Treatment]) -> Treatment:
    """One treatment after the other: the dose is the first one's, the others get their own."""
    if any(row.name == "reinitialise" for row in (first, *others)):
        raise SelectionError(f"{name}: a reinitialised head has nothing else to treat")

    def formula(case: Case, dose: float) -> Slices:
        found = first.formula(case, dose)
        for row in others:
            later = replace(case, slices={**case.slices, **found})
            found |= row.formula(later, row.dose)
        return found

    rows = (first, *others)
    return replace(
        first,
        name=name,
        writes="".join(role for role in "qkvo" if any(role in row.writes for row in rows)),
        formula=formula,
        says=", then ".join(row.says for row in rows),
        preserves_function=all(row.preserves_function for row in rows),
        measures=any(row.measures for row in rows),
        slopes=any(row.slopes for row in rows),
    )


def prescribed(plan: SurgeryPlan) -> dict[Head, Dose]:
    """What a plan gives each of its targets; those it does not name are reinitialised."""
    given = dict.fromkeys(plan.target_heads, "reinitialise")
    for name, selection in plan.treatments.items():
        treatment_named(name)
        heads = plan.heads_of(selection)
        outside = sorted(set(heads) - set(given))
        if outside:
            raise SelectionError(
                f"{name} is prescribed to {outside[0]}, which is no target of the plan",
                fix="add it to the targets, or take it out of the treatments",
            )
        given |= dict.fromkeys(heads, name)
    return {head: Dose(name, _amount(plan, head, name)) for head, name in given.items()}


def _amount(plan: SurgeryPlan, head: Head, name: str) -> float:
    default = plan.doses.get(name, treatment_named(name).dose)
    return plan.doses.get(str(head), default)


def with_treatment(plan: SurgeryPlan, name: str, dose: float | None = None) -> SurgeryPlan:
    """The plan with one treatment for all of its targets."""
    amount = treatment_named(name).dose if dose is None else dose
    return changed(plan, treatments={name: plan.targets}, doses={name: amount})


def with_prescription(plan: SurgeryPlan, prescription: Prescription) -> SurgeryPlan:
    """The plan for exactly the heads of a prescription, treatment and amount head by head."""
    heads: dict[str, list[Head]] = {}
    for head, dose in sorted(prescription.items()):
        heads.setdefault(dose.treatment, []).append(head)
    return changed(
        plan,
        targets=format_heads(prescription),
        treatments={name: format_heads(found) for name, found in sorted(heads.items())},
        doses={str(head): dose.amount for head, dose in sorted(prescription.items())},
    )


def head_slices(model: PreTrainedModel, head: Head, roles: str) -> Slices:
    """Float32 copies of a head's slices by role, weights turned to (out, in)."""
    found: Slices = {}
    for role in roles:
        spans = _role_spans(model, head, role)
        for name, value in read_slices(model, spans).items():
            found[name.rsplit(".", 1)[1]] = _turned(role, spans[name], value).float().cpu()
    return found


def _role_spans(model: PreTrainedModel, head: Head, role: str) -> dict[str, Span]:
    """The slices that a treatment of a role may write: with an output goes its layer's bias."""
    bias = output_bias_span(model, head.layer) if role == "o" else {}
    return head_spans(model, head, role) | bias  # type: ignore[arg-type]


def _turned(role: str, span: Span, value: Tensor) -> Tensor:
    """A slice between (out, in) and the way its parameter holds it: o is cut along its inputs."""
    return value.T if value.ndim == 2 and (span.axis == 1) != (role == "o") else value


def treat(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    prescription: Prescription,
    *,
    directions: Mapping[int, LayerDirections] | None = None,
    mean_outputs: Tensor | None = None,
) -> Patch:
    """The patch that training starts from: the plan's slices, treated where prescribed."""
    start = unchanged(model, plan)
    slices = dict(start.slices)
    fresh = [h for h, dose in prescription.items() if dose.treatment == "reinitialise"]
    if fresh:
        part = plan.model_copy(update={"targets": format_heads(fresh)})
        slices |= operate(model, part, mean_outputs=mean_outputs).slices
    for head, dose in sorted(prescription.items()):
        treated = treated_slices(model, plan, head, dose, start, directions or {})
        slices = joined_slices(slices, treated)
    ways: dict[str, list[Head]] = {}
    for head in sorted(h for h, d in prescription.items() if d.treatment == "retire"):
        way = _case(model, plan, head, "qo", start, directions or {}).retired_by
        ways.setdefault(way, []).append(head)
    retired = {way: format_heads(heads) for way, heads in ways.items()} or None
    return Patch(slices, replace(start.info, retired=retired))


def joined_slices(slices: Mapping[str, Slice], others: Mapping[str, Slice]) -> dict[str, Slice]:
    """Slices with those of another head: what both add to their layer's output bias adds up."""
    joined = dict(slices)
    for name, part in others.items():
        if name.endswith(".o_bias") and name in slices:
            after = slices[name].after + (part.after - part.before)
            joined[name] = Slice(part.span, part.before, after)
        else:
            joined[name] = part
    return joined


def treated_slices(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    head: Head,
    dose: Dose,
    start: Patch,
    directions: Mapping[int, LayerDirections],
) -> dict[str, Slice]:
    """The slices that one head's treatment changes, by their full names: of `start`, or a bias."""
    row = treatment_named(dose.treatment)
    case = _case(model, plan, head, row.writes, start, directions)
    spans = {n: s for role in row.writes for n, s in _role_spans(model, head, role).items()}
    named = {name.rsplit(".", 1)[1]: (name, span) for name, span in spans.items()}
    treated: dict[str, Slice] = {}
    for role, value in row.formula(case, dose.amount).items():
        name, span = named[role]
        before = start.slices[name].before if name in start.slices else span.of(model).detach()
        after = _turned(role, span, value).to(before).contiguous()
        treated[name] = Slice(span, before.clone(), after)
    return treated


def retire(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    blocks: Sequence[Batch],
    means: Float[Tensor, "layer head value"] | None = None,
) -> Patch:
    """The patch under which the plan's heads give their mean outputs; the model is not changed.

    Layer by layer, each measured with the layers below retired. `means` are those of
    `measure_means`, by default the means over `blocks`. The patch's `info.retired` says which heads
    do it by the output bias, which are parked and which are zeroed because neither can be.
    """
    every = with_treatment(plan, "retire")
    done = Patch({}, PatchInfo(plan.model.id, every.model_dump(mode="json"), retired={}))
    for layer in sorted({head.layer for head in plan.target_heads}):
        heads = [head for head in plan.target_heads if head.layer == layer]
        part = changed(plan, targets=format_heads(heads))
        with done.applied(model):  # what a layer's first token gives depends on the heads below
            found = measure_directions(model, blocks, [layer], plan.sink_positions)[layer]
            if means is not None:
                found = replace(found, mean_output=means[geometry_of(model).layers.index(layer)])
            given = dict.fromkeys(heads, Dose("retire", 1.0))
            patch = treat(model, part, given, directions={layer: found}).without_unchanged()
        done = _both(done, patch)
    return done


def _both(first: Patch, second: Patch) -> Patch:
    """Two patches of different layers as one."""
    ways = dict(first.info.retired or {})
    for way, heads in (second.info.retired or {}).items():
        ways[way] = ",".join(filter(None, (ways.get(way), heads)))
    return Patch({**first.slices, **second.slices}, replace(first.info, retired=ways))


def _case(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    head: Head,
    writes: str,
    start: Patch,
    directions: Mapping[int, LayerDirections],
) -> Case:
    """A head with those of its slices that the plan may change, and its layer's output bias."""
    spans = {n: s for role in writes for n, s in _role_spans(model, head, role).items()}
    free = {n.rsplit(".", 1)[1] for n in spans if n in start.slices or n.endswith(".o_bias")}
    slices = {n: part for n, part in head_slices(model, head, writes).items() if n in free}
    return Case(model, plan, head, slices, directions.get(head.layer))


def measure_for(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    prescription: Prescription,
    blocks: Sequence[Batch],
    known: Mapping[int, LayerDirections],
) -> dict[int, LayerDirections]:
    """What `treat` needs measured, of layers that are not among the known ones."""
    rows = {head: treatment_named(dose.treatment) for head, dose in prescription.items()}
    layers = [head.layer for head, row in rows.items() if row.measures]
    every = with_directions(known, model, blocks, layers, plan.sink_positions)
    sloped = {head.layer for head, row in rows.items() if row.slopes}
    return with_slopes(every, model, blocks, sloped)


def with_slopes(
    known: Mapping[int, LayerDirections],
    model: PreTrainedModel,
    blocks: Sequence[Batch],
    layers: Collection[int],
) -> dict[int, LayerDirections]:
    """The directions with the slope of the loss on some blocks by all query weights of `layers`."""
    missing = [layer for layer in sorted(set(layers)) if known[layer].query_slope is None]
    if not missing:
        return dict(known)
    count = geometry_of(model).num_heads
    spans = spans_of(model, [Head(layer, at) for layer in missing for at in range(count)], "q")
    weights = {name: span for name, span in spans.items() if name.endswith(".q")}
    values = read_slices(model, weights)
    masters = make_masters({n: Slice(s, values[n], values[n]) for n, s in weights.items()}, model)
    with training_slices(model, masters), tapped(model), torch.enable_grad():
        for block in spread_blocks(blocks, SLOPE_BLOCKS):
            ids = block.ids.to(device_of(model))
            last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            summed_loss(model, last, shifted_targets(ids, block.lengths)).backward()
    for master in masters:
        assert master.value.grad is not None
        master.value.data = master.value.grad
    slopes = {name: _turned("q", *part).cpu() for name, part in master_slices(masters).items()}
    found = dict(known)
    for layer in missing:
        rows = [slopes[f"{Head(layer, at)}.q"] for at in range(count)]
        found[layer] = replace(found[layer], query_slope=torch.stack(rows))
    return found
