"""Which heads are useful: what each costs when it is taken away, on as much text as decides it.

A head is useful if its zero ablation raises the loss: its interval lies above 0 and it is among
the discoveries at the false discovery rate over all judged heads. It is not useful if more than
the negligible is ruled out. Documents are added until one of the two is shown, or until neither
is to be hoped for. Mean ablation, which decides nothing here, is measured for useful heads alone,
on five documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.forward.interventions import ZERO, mean_output
from headwise.forward.variant_losses import head_costs
from headwise.heads import Head
from headwise.intervals import ERROR, Interval
from headwise.progress import Progress, silent
from headwise.proof.values import HeadCost, HeadCosts
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


def useful_rows(staged: Staged) -> Bool[np.ndarray, "head"]:
    """Discoveries whose whole interval lies above 0."""
    rows = range(len(staged.last_look))
    p_values = np.array([staged.p_value(row, _ONE) for row in rows])
    above = np.array([staged.interval(row, _ONE).low > 0 for row in rows], dtype=bool)
    useful: Bool[np.ndarray, "head"] = discoveries(p_values) & above
    return useful


def verdicts(staged: Staged) -> list[str]:
    """`useful`, `not useful` or `undecided` for every head."""
    return [
        "useful"
        if useful
        else "not useful"
        if staged.interval(row, _ONE).high < NEGLIGIBLE
        else "undecided"
        for row, useful in enumerate(useful_rows(staged))
    ]


def open_rows(staged: Staged) -> Bool[np.ndarray, "head"]:
    """Heads for which more text is worth its work: undecided, and not without hope of it."""
    return np.array(
        [
            verdict == "undecided" and max(staged.chances(row, NEGLIGIBLE)) > HOPE
            for row, verdict in enumerate(verdicts(staged))
        ],
        dtype=bool,
    )


def decide(heads: int, tokens: Int[np.ndarray, "document"], measure: Measure) -> Staged:
    """Ask for more documents of the heads that are still open, look by look."""
    return in_stages(looks_at(len(tokens), _FIRST_LOOK), tokens, (heads, 1), measure, open_rows)


def judge_heads(
    model: PreTrainedModel,
    encoded: Sequence[Sequence[int]],
    heads: Sequence[Head],
    means: Float[Tensor, "layer head value"],
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> HeadCosts:
    """Ablate each head alone, until it is decided or the text is used up."""
    chosen = sorted(heads)
    documents = [encoded[i] for i in document_order(len(encoded), seed)]
    tokens = np.array([len(ids) - 1 for ids in documents])

    def measure(rows: Sequence[int], taken: Sequence[int]) -> Float[np.ndarray, "row 1 document"]:
        texts, some = [documents[i] for i in taken], [chosen[row] for row in rows]
        return head_costs(model, texts, some, [ZERO], progress=progress)

    staged = decide(len(chosen), tokens, measure)
    zero = {
        str(head): _named(head, staged.interval(row, _ONE), int(documents), bool(useful))
        for row, (head, documents, useful) in enumerate(
            zip(chosen, staged.documents, useful_rows(staged), strict=True)
        )
    }
    useful = [head for head in chosen if zero[str(head)].useful]
    mean = _mean_costs(model, documents[:FIRST_LOOK], useful, means)
    return HeadCosts(len(encoded), zero, mean, decisions=staged.decisions())


def _named(head: Head, cost: Interval, documents: int, useful: bool | None = None) -> HeadCost:
    return HeadCost(cost.value, cost.low, cost.high, (str(head),), useful, documents)


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
