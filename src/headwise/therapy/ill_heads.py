"""Which heads `auto` treats if no plan names them: found on training text, by symptom or by gain.

A head is ill if it stares at the first token (sick) or gives next to nothing (silent). One that
looks there less, but still much, is *drowsy*, and healthy models have such heads: it is ill only if
triage finds it asleep. Without any symptom a gain by treatment is no illness: on text that a
healthy model was not made for, many of its heads have one (LOG).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwise.diagnosis.diagnose import diagnosis_measurement
from headwise.diagnosis.values import Diagnosis
from headwise.forward.measurements import run_measurement
from headwise.heads import Head, format_heads
from headwise.models.loaded_model import LoadedModel
from headwise.progress import Progress, silent, stage
from headwise.provenance import MeasureSettings, TextInfo
from headwise.settings import changed
from headwise.staged import document_order
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import Recipe
from headwise.surgery.sink_directions import LayerDirections, measure_directions
from headwise.texts.corpus import Corpus, spread_blocks
from headwise.triaging.triage import (
    INTERVENTIONS,
    gaining_heads,
    query_plan,
    selected_heads,
    triage_heads,
)
from headwise.triaging.values import HeadTriage

SYMPTOMS = "sick, output_norm_ratio < 0.05"  # the least of the healthy heads that were seen: 0.48
DROWSY = "first_token_mass > 0.3"  # where Gu et al. (2410.10781) begin to speak of a sink
_BLOCKS = 32  # training blocks on which symptoms are looked for
_DOCUMENTS = 32  # on which drowsy heads are triaged
_AWAKENED = 8  # drowsy heads that are triaged at most: those that to first order gain most

# Blocks through a forward pass, at most: the diagnosis, first-order estimates with their backward
# pass, and triage, in which a head is changed in half of the layers on average.
SEARCH_BLOCKS = _BLOCKS + _DOCUMENTS * (4 + INTERVENTIONS * _AWAKENED / 2)


@dataclass(frozen=True)
class IllHeads:
    """A plan for the ill heads, which may have no targets, and what was measured on the way."""

    plan: SurgeryPlan
    diagnosis: Diagnosis | None = field(default=None, repr=False)  # None: the plan was given
    triaged: Mapping[Head, HeadTriage] = field(default_factory=dict, repr=False)
    directions: Mapping[int, LayerDirections] = field(default_factory=dict, repr=False)


def find_ill_heads(
    loaded: LoadedModel,
    corpus: Corpus,
    recipe: Recipe,
    *,
    symptoms: str = SYMPTOMS,
    drowsy: str = DROWSY,
    progress: Progress = silent,
) -> IllHeads:
    """The heads that are ill on training text.

    A head that lost its values gives nothing wherever it looks, and need not look at the sink.
    """
    stage("auto: looking for ill heads on training text", progress)
    rows = [
        row[:length].tolist()
        for block in spread_blocks(corpus.train, _BLOCKS)
        for row, length in zip(block.ids, block.lengths, strict=True)
    ]
    texts = TextInfo(corpus.name, len(rows), corpus.info.sha256, sum(map(len, rows)))
    settings = MeasureSettings(recipe.block, bos=loaded.bos)
    found = run_measurement(loaded.model, diagnosis_measurement(loaded, rows, texts, settings))
    ill = selected_heads(found, symptoms)
    sleepy = selected_heads(found, f"{drowsy} - ({symptoms})")
    asleep, directions = _asleep(loaded, found, corpus, sleepy, progress)
    if not ill and not asleep:
        nothing = changed(make_plan(found, heads="all"), targets="", healthy="all", summary=None)
        return IllHeads(nothing, found)
    plan = make_plan(found, heads=format_heads([*ill, *asleep]))
    return IllHeads(plan, found, asleep, directions)


def _asleep(
    loaded: LoadedModel,
    diagnosis: Diagnosis,
    corpus: Corpus,
    drowsy: Sequence[Head],
    progress: Progress,
) -> tuple[dict[Head, HeadTriage], dict[int, LayerDirections]]:
    """The drowsy heads that a treatment wakes, each for itself, and the layers' directions."""
    model, texts = loaded.model, training_documents(corpus, _DOCUMENTS)
    if not drowsy or len(texts) < 2:
        return {}, {}
    directions = measure_directions(model, corpus.train, [head.layer for head in drowsy])
    plan = query_plan(diagnosis, drowsy)
    likely = gaining_heads(model, plan, texts, directions, progress=progress)[:_AWAKENED]
    if not likely:
        return {}, directions
    stage(f"triage of {len(likely)} heads that may be drowsy", progress)
    plan = query_plan(diagnosis, likely)
    rows, _ = triage_heads(model, plan, texts, directions=directions, progress=progress)
    asleep = {Head.parse(name): row for name, row in rows.items() if row.class_ == "asleep"}
    return asleep, directions


def training_documents(corpus: Corpus, most: int) -> list[list[int]]:
    """One piece of each of a few training documents, in the order in which they are used."""
    pieces = {  # one per document: intervals take them for independent
        owner: ids[:length].tolist()
        for block in spread_blocks(corpus.train, 2 * most)
        for owner, ids, length in zip(block.index, block.ids, block.lengths, strict=True)
        if length > 1
    }
    rows = list(pieces.values())
    order = document_order(len(rows), 0)[:most]
    return [rows[i] for i in order]
