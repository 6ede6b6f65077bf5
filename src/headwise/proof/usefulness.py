"""Which heads are useful: what each costs when it is taken away, on as much text as decides it.

A head is useful if its zero ablation raises the loss: its interval lies above 0 and it is among
the discoveries at the false discovery rate over all judged heads. It is not useful if more than
the negligible is ruled out. Documents are added until one of the two is shown, or until neither
is to be hoped for. Mean ablation, which decides nothing here, is measured for useful heads alone,
on five documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import ZERO, mean_output
from headwise.forward.variant_losses import head_costs
from headwise.heads import Head
from headwise.intervals import ERROR, Interval
from headwise.progress import Progress, silent
from headwise.proof.values import HeadCost
from headwise.staged import (
    FIRST_LOOK,
    HOPE,
    Measure,
    Staged,
    discoveries,
    document_order,
    in_stages,
    looks_at,
    student_interval,
)

NEGLIGIBLE = 0.001  # nats per token; a head that costs less for sure is not useful


# documents at the first look; a look at five costs as much in all, and is wrong more often where
# texts differ much (MiniMind2 on the bundled set, made free of effect: 7 instead of 6% of draws)
_FIRST_LOOK = 8


_ONE = np.ones(1)


@dataclass(frozen=True)
class Usefulness:
    """Every head's cost by zero ablation, and by mean ablation where the head is useful."""

    heads: tuple[Head, ...]
    staged: Staged = field(repr=False)
    mean: Mapping[str, HeadCost] = field(default_factory=dict, repr=False)
    negligible: float = NEGLIGIBLE

    def cost(self, row: int) -> Interval:
        """Change of loss per token, positive where the head was useful."""
        return self.staged.interval(row, _ONE)

    def useful(self) -> Bool[np.ndarray, "head"]:
        """Discoveries whose whole interval lies above 0."""
        rows = range(len(self.heads))
        p_values = np.array([self.staged.p_value(row, _ONE) for row in rows])
        above = np.array([self.cost(row).low > 0 for row in rows], dtype=bool)
        useful: Bool[np.ndarray, "head"] = discoveries(p_values) & above
        return useful

    def verdicts(self) -> list[str]:
        """`useful`, `not useful` or `undecided` for every head."""
        return [
            "useful"
            if yes
            else "not useful"
            if self.cost(row).high < self.negligible
            else "undecided"
            for row, yes in enumerate(self.useful())
        ]

    def open_rows(self) -> Bool[np.ndarray, "head"]:
        """Heads for which more text is worth its work: undecided, and not without hope of it."""
        return np.array(
            [
                verdict == "undecided" and max(self.staged.chances(row, self.negligible)) > HOPE
                for row, verdict in enumerate(self.verdicts())
            ],
            dtype=bool,
        )

    def zero(self) -> dict[str, HeadCost]:
        """Costs by head name, as `evaluation.json` holds them."""
        useful, documents = self.useful(), self.staged.documents
        return {
            str(head): _named(head, self.cost(row), int(documents[row]), bool(useful[row]))
            for row, head in enumerate(self.heads)
        }


def _named(head: Head, cost: Interval, documents: int, useful: bool | None = None) -> HeadCost:
    return HeadCost(cost.value, cost.low, cost.high, (str(head),), useful, documents)


def judge_heads(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    means: Float[Tensor, "layer head value"],
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> Usefulness:
    """Ablate each head alone, until it is decided or the text is used up."""
    chosen = tuple(sorted(heads))
    documents = [encoded[i] for i in document_order(len(encoded), seed)]
    tokens = np.array([len(ids) - 1 for ids in documents])

    def measure(rows: Sequence[int], taken: Sequence[int]) -> Float[np.ndarray, "row 1 document"]:
        texts, some = [documents[i] for i in taken], [chosen[row] for row in rows]
        return head_costs(model, texts, some, [ZERO], progress=progress)

    judged = decide(chosen, tokens, measure)
    useful = [head for head, yes in zip(chosen, judged.useful(), strict=True) if yes]
    return replace(judged, mean=_mean_costs(model, documents[:FIRST_LOOK], useful, means))


def decide(
    heads: tuple[Head, ...], tokens: Int[np.ndarray, "document"], measure: Measure
) -> Usefulness:
    """Ask for more documents of the heads that are still open, look by look."""

    def undecided(staged: Staged) -> Bool[np.ndarray, "row"]:
        return Usefulness(heads, staged).open_rows()

    looks = looks_at(len(tokens), _FIRST_LOOK)
    return Usefulness(heads, in_stages(looks, tokens, (len(heads), 1), measure, undecided))


def _mean_costs(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    heads: Sequence[Head],
    means: Float[Tensor, "layer head value"],
) -> dict[str, HeadCost]:
    """What remains of a useful head's cost when only what varies in its output is lost."""
    if not heads:
        return {}
    tokens = np.array([len(ids) - 1 for ids in documents])
    costs = head_costs(model, documents, heads, [mean_output(model, means)])
    intervals = [student_interval(row[0], tokens, ERROR) for row in costs]
    pairs = zip(heads, intervals, strict=True)
    return {str(head): _named(head, interval, len(documents)) for head, interval in pairs}
