"""Symptoms: what makes a head worth a look, one row each. No torch.

A row is a selection on the maps of a diagnosis. Healthy models have heads with some of these
symptoms (docs/treatments.md has the rates), so only some rows are `sure`: the others are a reason
to ask triage, which measures what the head does. `ill` in a selection means any of them; `sick`
keeps its older meaning, a sink on the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.heads import Head, select_heads


@dataclass(frozen=True)
class Symptom:
    """A name, where on the maps it begins, and whether it is an illness by itself."""

    name: str
    where: str  # a selection
    sure: bool
    asks: str  # what triage has to find out


SYMPTOMS = (
    Symptom("sink", "sick", True, "does release, centre or evict bring it back?"),
    # the most of the healthy heads that were seen: 0.11; pieces from the middle of a document begin
    # with another token and halve the mass of a real one
    Symptom(
        "fixed sink",
        "strongest_mass > 0.2 & strongest_position > 0.25",
        True,
        "the same, at the position where it looks",
    ),
    # the least of the healthy heads that were seen: 0.48
    Symptom("silent", "output_norm_ratio < 0.05", True, "did its values decay, or is it empty?"),
    Symptom("flat", "normalized_entropy > 0.985", True, "does sharpen help, or training?"),
    # excess over uniform attention; the most of the healthy heads that were seen: 0.24
    Symptom("delimiter sink", "delimiter > 0.5", False, "does it rest on commas, or read them?"),
    Symptom("low_entropy", "low_entropy", False, "is what it looks at what it should look at?"),
    # where Gu et al. (2410.10781) begin to speak of a sink
    Symptom("drowsy", "first_token_mass > 0.3", False, "is it asleep?"),
)


def heads_by_symptom(
    maps: Mapping[str, Float[np.ndarray, "layer head"]],
    sets: Mapping[str, list[Head]],
    layers: tuple[int, ...] | None,
    rows: Sequence[Symptom] = SYMPTOMS,
) -> dict[str, list[Head]]:
    """The heads with each symptom; one whose measure is not among the maps has none."""
    num_layers, num_heads = maps["first_token_mass"].shape
    known = [row for row in rows if _measures(row.where) <= set(maps) | set(sets)]
    return {
        row.name: select_heads(
            row.where,
            num_layers=num_layers,
            num_heads=num_heads,
            sets=sets,
            maps=maps,
            layers=layers,
        )
        for row in known
    }


def _measures(where: str) -> set[str]:
    """The words and measures that a selection names; heads stand for themselves."""
    names = {part.split()[0] for part in where.split("&")}
    return {name for name in names if not name.startswith("L")}
