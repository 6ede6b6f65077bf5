"""Treatments: what is done to a head's slices before training, one row each.

A row is a formula in float32 on the head's own slices as (out, in) matrices; `treat` turns a
prescription (head -> treatment and dose) into the `Patch` that training starts from. Nothing but
the plan's slices is ever written, whatever a formula returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.errors import SelectionError
from headwise.heads import Head, format_heads
from headwise.models.architectures import geometry_of
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span, head_spans, read_slices
from headwise.settings import changed
from headwise.surgery.operation import healthy_std, operate, unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.sink_directions import LayerDirections

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
    def kv(self) -> int:
        """The head's key/value head."""
        return self.head.index // geometry_of(self.model).group

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
    """The first key becomes the mean of the others; keys of the mean input stay."""
    if "k" not in case.slices:
        return {}  # its key/value group is shared with heads outside the plan
    found = case.measured
    gap, first, mean = dose * found.key_gap[case.kv], found.first_input, found.mean_input
    if "k_bias" in case.slices:
        w = (first - mean) / (first - mean).square().sum()
        bias = case.slices["k_bias"] + gap * (w @ mean)
        return {"k": case.slices["k"] - torch.outer(gap, w), "k_bias": bias}
    apart = first - mean * (first @ mean) / (mean @ mean)
    return {"k": case.slices["k"] - torch.outer(gap, apart / (apart @ first))}


def _temper(case: Case, dose: float) -> Slices:
    return {role: part * dose for role, part in _queries(case).items()}


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
            parts = {name: part for name, part in case.slices.items() if name[0] == role}
            found |= {name: part * growth**dose for name, part in parts.items()}
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
            "W_q - dose u u^T W_q: the query can no longer single out the first key",
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
            "q - dose u u^T mean(q): the constant part along the pull of the first key goes",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment(
            "evict",
            "k",
            _evict,
            "the first key becomes like the others; whole key/value groups only",
            doses=_STRENGTHS,
            measures=True,
        ),
        Treatment("temper", "q", _temper, "q times the dose: flatter attention", dose=0.1),
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
        spans = head_spans(model, head, role)  # type: ignore[arg-type]
        for name, value in read_slices(model, spans).items():
            found[name.rsplit(".", 1)[1]] = _turned(role, spans[name], value).float().cpu()
    return found


def _turned(role: str, span: Span, value: Tensor) -> Tensor:
    """A q, k or v slice between (out, in) and the way its parameter holds it."""
    return value.T if span.axis == 1 and role != "o" else value


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
        slices |= treated_slices(model, plan, head, dose, start, directions or {})
    return Patch(slices, start.info)


def treated_slices(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    head: Head,
    dose: Dose,
    start: Patch,
    directions: Mapping[int, LayerDirections],
) -> dict[str, Slice]:
    """The slices of `start` that one head's treatment changes, by their full names."""
    row = treatment_named(dose.treatment)
    names = {
        name.rsplit(".", 1)[1]: name
        for role in row.writes
        for name in head_spans(model, head, role)  # type: ignore[arg-type]
        if name in start.slices
    }
    every = head_slices(model, head, row.writes)
    slices = {role: part for role, part in every.items() if role in names}
    case = Case(model, plan, head, slices, directions.get(head.layer))
    found: dict[str, Slice] = {}
    for role, value in row.formula(case, dose.amount).items():
        old = start.slices[names[role]]
        after = _turned(role, old.span, value).to(old.before)
        found[names[role]] = Slice(old.span, old.before, after)
    return found


def measured_layers(prescription: Prescription) -> list[int]:
    """Layers whose directions must be measured before `treat`."""
    measured = {h.layer for h, d in prescription.items() if treatment_named(d.treatment).measures}
    return sorted(measured)
