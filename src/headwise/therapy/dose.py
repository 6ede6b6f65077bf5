"""Dose by measurement: treatment and amount per head, chosen on training text alone.

First one treatment and amount for all heads at once, because heads that work together wake together
(a copying head alone is worth nothing), with and without the heads that triage would spare; then
head by head around the best of these, nothing included, as long as training loss falls by more than
its own noise. A head whose treatment turns out not to matter is not tuned, and one that has nothing
yet is tried only where triage saw a gain, which must be more than the negligible and more than what
so many trials show by chance. Exact: only the layers from the changed head on are run again. A
clear loss ends a trial early. Validation and evaluation text is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from headwise.forward.tap import tapped
from headwise.forward.variant_losses import BasePass, base_pass, losses_from
from headwise.heads import Head
from headwise.intervals import LEVEL
from headwise.models.patch import Patch, Slice
from headwise.models.rope import length_class
from headwise.surgery.operation import unchanged
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.sink_directions import LayerDirections
from headwise.surgery.treatments import (
    Dose,
    Prescription,
    joined_slices,
    treated_slices,
    treatment_named,
)
from headwise.texts.batches import Batch, join_batches, split_batch
from headwise.texts.corpus import spread_blocks
from headwise.therapy.values import Tried
from headwise.triaging.settings import TriageThresholds

SEARCHED = ("release", "centre", "evict")
# What is searched for heads whose trouble is not where they look
OTHERS: dict[str, tuple[str, ...]] = {"harmful": ("mute", "retire"), "flat": ("seek", "sharpen")}
REGROWN = ("release+regrow", "centre+regrow")  # searched too where values or outputs decayed
DOSE_BLOCKS = 16  # training blocks on which doses are compared
TRIALS = len(SEARCHED) + 3  # doses that are tried for one head: none, the common, less and more
_BATCH = 4  # blocks a forward pass
_NEGLIGIBLE = TriageThresholds().gain  # nats per token: a gain that is not worth a treatment
_CLEAR = 2.0  # standard errors over documents that a change must be away from nothing
_HARM = 0.01  # a head whose treatment costs more than this must not be touched at all
_STEP = 0.1  # a head's own amount is looked for in steps of this around the common one
_MOST = 1.5  # no amount beyond this is tried

Sums = Float[np.ndarray, "document"]


def choose_doses(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    blocks: Sequence[Batch],
    directions: Mapping[int, LayerDirections],
    *,
    spared: Collection[Head] = (),
    promising: Collection[Head] | None = None,
    others: Mapping[str, Sequence[Head]] | None = None,
) -> tuple[dict[Head, Dose], list[Tried]]:
    """The doses of the plan's heads with the least training loss that the search met, and its way.

    `spared` heads are treated only if all heads together do better with them than without. Where
    all together gain nothing, decayed heads and `promising` ones (by default all not spared) are
    tried alone. `others` are heads of the kinds of `OTHERS`, which get other treatments, last.
    Treatment `none` is for heads that sleep with the others but gain nothing by waking at once:
    their slices are trained as they are. Heads that do better left alone have no dose. The model is
    unchanged.
    """
    heads = plan.target_heads
    if not heads:
        return {}, []
    mixed = _mixed_batches(model, spread_blocks(blocks, DOSE_BLOCKS))
    search = _Search(model, plan, directions, mixed)
    search.begin({})
    apart = {head for some in (others or {}).values() for head in some}
    pulled = [head for head in heads if head not in apart]
    decayed = search.decayed(pulled)
    treatments = (*SEARCHED, *(REGROWN if decayed else ()))
    hopeful = {*decayed, *(set(pulled) - set(spared) if promising is None else promising)}
    tried = _searched(search, _joint_sets(pulled, spared), treatments, hopeful)
    for kind, some in (others or {}).items():
        tried += _searched(search, {kind: list(some)}, OTHERS[kind], some)
    # heads whose treatment did harm are not even trained
    harmed = {row.heads for row in tried if row.kept and row.change < -_HARM}
    return {h: d for h, d in search.state.items() if str(h) not in harmed or d.amount}, tried


def _searched(
    search: _Search,
    sets: Mapping[str, list[Head]],
    treatments: Sequence[str],
    hopeful: Collection[Head],
) -> list[Tried]:
    """Sets of heads at once, then head by head; those left out alone, where there is hope."""
    heads = sorted({head for some in sets.values() for head in some})
    if not heads:
        return []
    tried = _all_at_once(search, sets, treatments)
    common = _best_amounts(tried, treatments)
    sure = _sure(len(set(hopeful) & set(heads)) * len(common), len(search.tokens))
    for head in heads:
        if head in search.state:
            tried += _tuned(search, head, common)
        elif head in hopeful:
            tried += _first_dose(search, head, common, sure)
    return tried


def _mixed_batches(model: PreTrainedModel, blocks: Sequence[Batch]) -> list[Batch]:
    """Batches with short and long blocks in each: the first ones may have to speak for all."""
    count, kind = -(-len(blocks) // _BATCH), length_class(model)
    mixed = [join_batches(blocks[at::count]) for at in range(count)]
    return [part for batch in mixed for part in split_batch(batch, kind)]


class _Search:
    """The current prescription with its losses and layer inputs, against which others are tried."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: SurgeryPlan,
        directions: Mapping[int, LayerDirections],
        batches: Sequence[Batch],
    ) -> None:
        self.model, self.plan, self.directions = model, plan, directions
        self.batches = batches
        lengths = torch.cat([b.lengths for b in batches])
        self.tokens = (lengths - 1).numpy()
        self.state: dict[Head, Dose] = {}
        self.untreated = unchanged(model, plan)
        self.known: dict[tuple[Head, Dose], dict[str, Slice]] = {}

    def begin(self, prescription: Prescription) -> None:
        """Make a prescription the current one: one whole pass that keeps every layer's input."""
        self.state = dict(prescription)
        with self._treated(prescription), torch.inference_mode():
            self.base: list[BasePass] = [base_pass(self.model, batch) for batch in self.batches]
        self.sums = np.concatenate([base.losses for base in self.base])

    def losses(self, prescription: Prescription, lowest: int) -> Sums:
        """Losses under another prescription that differs from the current one from `lowest` on.

        Of documents that follow a clear loss nothing is asked: no such prescription is taken.
        """
        sums = np.zeros(0)
        with self._treated(prescription), torch.inference_mode():
            for base in self.base:
                with tapped(self.model):
                    sums = np.concatenate([sums, losses_from(self.model, base, lowest)[0]])
                mean, error = self.change(sums)
                if mean - error > 0:
                    break
        return sums

    def decayed(self, heads: Sequence[Head]) -> list[Head]:
        """The heads that have values or outputs to regrow."""
        return [head for head in heads if self._slices(head, Dose("regrow", 1.0))]

    def _treated(self, prescription: Prescription) -> AbstractContextManager[None]:
        slices: dict[str, Slice] = {}
        for head, dose in sorted(prescription.items()):
            slices = joined_slices(slices, self._slices(head, dose))
        return Patch(slices, self.untreated.info).applied(self.model)

    def _slices(self, head: Head, dose: Dose) -> dict[str, Slice]:
        """What a dose changes; the model is as it was whenever this is asked for the first time."""
        if (head, dose) not in self.known:
            self.known[head, dose] = treated_slices(
                self.model, self.plan, head, dose, self.untreated, self.directions
            )
        return self.known[head, dose]

    def change(self, sums: Sums) -> tuple[float, float]:
        """Mean change of loss per token against the current state, and its standard error.

        Of as many documents as there are sums.
        """
        deltas, tokens = sums - self.sums[: len(sums)], self.tokens[: len(sums)]
        mean = float(deltas.sum() / tokens.sum())
        scatter = deltas - mean * tokens
        error = float(np.sqrt((scatter**2).sum()) / tokens.sum())
        return mean, error


def _joint_sets(heads: Sequence[Head], spared: Collection[Head]) -> dict[str, list[Head]]:
    """The heads that are treated together, under the names that the record gives them."""
    others = [head for head in heads if head not in spared]
    sets = {"all": list(heads), "not spared": others}
    return {name: some for name, some in sets.items() if some and (name == "all" or spared)}


def _all_at_once(
    search: _Search, sets: Mapping[str, list[Head]], treatments: Sequence[str]
) -> list[Tried]:
    """Every treatment and amount for all heads of a set; the best becomes the current state."""
    rows: list[Tried] = []
    best, least, before = None, -_NEGLIGIBLE, search.state
    for name, heads in sets.items():
        lowest = min(head.layer for head in heads)
        for dose in _searched_doses(treatments):
            given = {**before, **dict.fromkeys(heads, dose)}
            mean, error = search.change(search.losses(given, lowest))
            rows.append(Tried(name, str(dose), mean, error, False))
            if _gains(rows[-1], least):
                best, least = (len(rows) - 1, given), mean
    if best is not None:
        search.begin(best[1])
        rows[best[0]] = replace(rows[best[0]], kept=True)
    return rows


def _searched_doses(treatments: Sequence[str]) -> list[Dose]:
    return [Dose(name, amount) for name in treatments for amount in treatment_named(name).doses]


def _best_amounts(tried: Sequence[Tried], treatments: Sequence[str]) -> list[Dose]:
    """The amount of each treatment that did best when all heads were given it."""
    found = []
    for name in treatments:
        doses = {str(dose): dose for dose in _searched_doses([name])}
        rows = [row for row in tried if row.dose in doses]
        found.append(doses[min(rows, key=lambda row: row.change).dose])
    return found


def _first_dose(search: _Search, head: Head, common: Sequence[Dose], sure: float) -> list[Tried]:
    """The common doses for a head that has none; it must gain what is worth a treatment."""
    rows = [_trial(search, head, dose) for dose in common]
    return _kept(search, head, rows, common, -_NEGLIGIBLE, sure)


def _sure(trials: int, documents: int) -> float:
    """Standard errors that none of so many trials without effect is away from 0, at 95%.

    Of a hundred heads tried alone some gain by chance; a Student quantile with Bonferroni's share.
    """
    from scipy.stats import t as student  # late: slow to load

    return float(student.ppf(LEVEL + (1 - LEVEL) * (1 - 1 / max(trials, 1)), max(documents - 1, 1)))


def _tuned(search: _Search, head: Head, common: Sequence[Dose]) -> list[Tried]:
    """Other doses for a treated head: nothing; and if that would cost, less, more, another kind."""
    now, without = search.state[head], Dose("none", 0.0)
    rows, doses = [_trial(search, head, without)], [without]
    if rows[0].change - rows[0].error > 0 and rows[0].change > _NEGLIGIBLE:
        ahead = _options(now, common)
        while ahead:
            doses.append(ahead.pop(0))
            rows.append(_trial(search, head, doses[-1]))
            if _gains(rows[-1], 0.0) and rows[-1] == min(rows, key=lambda row: row.change):
                ahead += _further(now, doses[-1])
    return _kept(search, head, rows, doses, 0.0)


def _trial(search: _Search, head: Head, dose: Dose) -> Tried:
    mean, error = search.change(search.losses({**search.state, head: dose}, head.layer))
    return Tried(str(head), str(dose), mean, error, False)


def _gains(row: Tried, least: float, clear: float = _CLEAR) -> bool:
    """Less than `least`, and by more than the noise."""
    return row.change + clear * row.error < 0 and row.change < least


def _kept(
    search: _Search,
    head: Head,
    rows: Sequence[Tried],
    doses: Sequence[Dose],
    least: float,
    clear: float = _CLEAR,
) -> list[Tried]:
    """The best of the trials becomes the current state if it gains; the record says which."""
    best = min(range(len(rows)), key=lambda at: rows[at].change)
    if not _gains(rows[best], least, clear):
        return list(rows)
    search.begin({**search.state, head: doses[best]})
    return [replace(row, kept=at == best) for at, row in enumerate(rows)]


def _options(now: Dose, common: Sequence[Dose]) -> list[Dose]:
    """The common amounts, and a little less or more of what the head has now."""
    every = [*common, _moved(now, -_STEP), _moved(now, _STEP)]
    return [dose for dose in dict.fromkeys(every) if dose != now]


def _further(now: Dose, better: Dose) -> list[Dose]:
    """The next amount in the direction that helped, up to one half more than a whole dose."""
    if better.treatment != now.treatment:
        return []
    step = math.copysign(_STEP, better.amount - now.amount)
    further = _moved(better, step)
    return [further] if 0 < further.amount <= _MOST else []


def _moved(dose: Dose, step: float) -> Dose:
    return Dose(dose.treatment, round(dose.amount + step, 6))
