"""Heads judged on as little text as needed, beside every head on every text.

Costs of all heads are measured once; then the decisions are replayed in several orders of the
texts, and on losses without effect (each head's made free of its mean, texts resampled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from benchmarks.harness import Options
from headwise.heads import Head, all_heads
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    from headwise.staged import Staged

ORDERS = 6
Costs = Float[np.ndarray, "head document"]
Tokens = Int[np.ndarray, "document"]


@dataclass(frozen=True)
class DecisionsRow:
    """Work as a share of zero and mean ablation of every head on every text; decisions; errors."""

    heads: int
    texts: int
    work_to_fixed: float  # mean over the orders
    largest_work: float
    most_decisions_lost: int  # decided on all texts, undecided here
    most_decisions_turned: int  # useful on all texts and not useful here, or the other way round
    draws_with_a_false_discovery: float


def run(options: Options) -> list[DecisionsRow]:
    """64 texts of 256 tokens, or few short ones."""
    if options.quick:
        return bench_decisions(model=options.model, texts=16, length=64, draws=100)
    return bench_decisions(model=options.model, progress=options.progress)


def bench_decisions(
    *,
    model: str | None = None,
    texts: int = 64,
    length: int = 256,
    draws: int = 1000,
    progress: Progress = silent,
) -> list[DecisionsRow]:
    """Every head of the patient on its held-out text, or of another model on its speeches."""
    heads, costs, tokens = _measured(model or "patient", texts, length, progress)
    from headwise.proof.usefulness import verdicts

    fixed = verdicts(_fixed(costs, tokens))
    orders = [np.random.default_rng(seed).permutation(len(tokens)) for seed in range(ORDERS)]
    found = [_staged(costs[:, order], tokens[order]) for order in orders]
    work = [_work(one) for one in found]
    decided = [list(zip(fixed, verdicts(one), strict=True)) for one in found]
    lost = [sum(a != b == "undecided" for a, b in pairs) for pairs in decided]
    turned = [sum("undecided" not in (a, b) and a != b for a, b in pairs) for pairs in decided]
    wrong = _false_discoveries(costs, tokens, draws)
    return [
        DecisionsRow(
            heads=len(heads),
            texts=len(tokens),
            work_to_fixed=round(float(np.mean(work)), 3),
            largest_work=round(max(work), 3),
            most_decisions_lost=max(lost),
            most_decisions_turned=max(turned),
            draws_with_a_false_discovery=wrong,
        )
    ]


def _measured(
    name: str, texts: int, length: int, progress: Progress
) -> tuple[tuple[Head, ...], Costs, Tokens]:
    """Zero-ablation costs of all heads on every text."""
    from headwise.forward.interventions import ZERO
    from headwise.forward.variant_losses import head_costs
    from headwise.models.architectures import geometry_of
    from headwise.models.loading import load_model
    from headwise.models.patient import PATIENTS, patient_texts
    from headwise.texts.batches import encode_for

    loaded = load_model(name)
    domain = () if name in PATIENTS else ("union",)
    every = list(patient_texts("heldout", *domain))
    chosen = every[:: max(1, len(every) // texts)][:texts]
    encoded = encode_for(loaded, chosen, max_length=loaded.length(length))
    shape = geometry_of(loaded.model)
    heads = tuple(all_heads(shape.num_layers, shape.num_heads, shape.layers))
    costs = head_costs(loaded.model, encoded, heads, [ZERO], progress=progress)
    return heads, costs[:, 0], np.array([len(ids) - 1 for ids in encoded])


def _fixed(costs: Costs, tokens: Tokens) -> Staged:
    """One look at all texts."""
    from headwise.staged import Staged

    return Staged((len(tokens),), costs[:, None], tokens, np.zeros(len(costs), dtype=int))


def _staged(costs: Costs, tokens: Tokens) -> Staged:
    from headwise.proof.usefulness import decide

    def measure(rows: Sequence[int], texts: Sequence[int]) -> np.ndarray:
        found: np.ndarray = costs[np.ix_(rows, texts)][:, None]
        return found

    return decide(len(costs), tokens, measure)


def _work(found: Staged) -> float:
    """Zero ablations, and mean ablations of useful heads on a few texts, of both on all texts."""
    from headwise.proof.usefulness import useful_rows
    from headwise.staged import FIRST_LOOK

    tokens = found.tokens
    means = float(useful_rows(found).mean() * tokens[:FIRST_LOOK].sum() / tokens.sum())
    return (found.work + means) / 2


def _false_discoveries(costs: Costs, tokens: Tokens, draws: int) -> float:
    """Share of draws without any effect in which some head is found useful or harmful."""
    from headwise.staged import discoveries

    centred = costs - np.outer(costs.sum(1) / tokens.sum(), tokens)
    random, one, wrong = np.random.default_rng(0), np.ones(1), 0
    for _ in range(draws):
        drawn = random.integers(0, len(tokens), len(tokens))
        staged = _staged(centred[:, drawn], tokens[drawn])
        p_values = [staged.p_value(row, one) for row in range(len(costs))]
        wrong += bool(discoveries(np.array(p_values)).any())
    return wrong / draws
