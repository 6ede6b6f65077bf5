"""Which heads `auto` treats if no plan names them: found on training text, by symptom or by harm.

The rows of `diagnosis/symptoms.py` that are sure make a head ill. A head with another symptom, or
with none, is ill only if triage finds it asleep, or harmful: the loss falls without it. Exact costs
on training text decide, and first-order estimates only say for which heads they are measured. A
harmful head must not be one that other text needs: on text that a healthy model was not made for,
many of its heads do harm (LOG). That other text is one that no evaluation reads unless it is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headwise.diagnosis.diagnose import diagnosis_measurement
from headwise.diagnosis.symptoms import SYMPTOMS, Symptom
from headwise.diagnosis.values import Diagnosis
from headwise.forward.interventions import ZERO
from headwise.forward.measurements import run_measurement
from headwise.forward.variant_losses import head_costs
from headwise.heads import Head, format_heads
from headwise.models.loaded_model import LoadedModel
from headwise.models.patient import patient_texts
from headwise.progress import Progress, silent, stage
from headwise.provenance import MeasureSettings, TextInfo
from headwise.settings import changed
from headwise.staged import document_order
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import Recipe
from headwise.surgery.sink_directions import (
    LayerDirections,
    directions_are_known,
    measure_directions,
)
from headwise.texts.batches import encode_for
from headwise.texts.corpus import Corpus, in_validation, spread_blocks
from headwise.triaging.settings import TriageThresholds
from headwise.triaging.triage import (
    INTERVENTIONS,
    query_plan,
    selected_heads,
    suspects,
    triage_heads,
)
from headwise.triaging.values import HeadTriage

_BLOCKS = 32  # training blocks on which symptoms are looked for
_DOCUMENTS = 32  # on which suspects are triaged
_SUSPECTS = 8  # heads that are triaged at most for a gain by treatment, and for harm
_OTHER_TEXTS, _OTHER_LENGTH = 8, 256  # of each kind, and tokens of a text

# Blocks through a forward pass, at most: the diagnosis, first-order estimates with their backward
# pass, and triage, in which a head is changed in half of the layers on average.
SEARCH_BLOCKS = _BLOCKS + _DOCUMENTS * (4 + INTERVENTIONS * 2 * _SUSPECTS)


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
    rows: Sequence[Symptom] = SYMPTOMS,
    progress: Progress = silent,
) -> IllHeads:
    """The heads that are ill on training text."""
    stage("auto: looking for ill heads on training text", progress)
    encoded = [
        row[:length].tolist()
        for block in spread_blocks(corpus.train, _BLOCKS)
        for row, length in zip(block.ids, block.lengths, strict=True)
    ]
    texts = TextInfo(corpus.info.name, len(encoded), corpus.info.sha256, sum(map(len, encoded)))
    settings = MeasureSettings(recipe.block, bos=loaded.bos)
    found = run_measurement(loaded.model, diagnosis_measurement(loaded, encoded, texts, settings))
    symptoms = found.with_symptoms(rows)
    ill = {head for row in rows if row.sure for head in symptoms.get(row.name, [])}
    doubtful = {head for some in symptoms.values() for head in some} - ill
    others = [head for head in selected_heads(found, "all") if head not in ill]
    judged, directions = _judged(loaded, found, corpus, (others, doubtful), progress)
    if not ill and not judged:
        nothing = changed(make_plan(found, heads="all"), targets="", healthy="all", summary=None)
        return IllHeads(nothing, found)
    plan = make_plan(found, heads=format_heads([*ill, *judged]))
    return IllHeads(plan, found, judged, directions)


def _judged(
    loaded: LoadedModel,
    diagnosis: Diagnosis,
    corpus: Corpus,
    heads: tuple[Sequence[Head], Collection[Head]],  # to be judged, and those with a symptom
    progress: Progress,
) -> tuple[dict[Head, HeadTriage], dict[int, LayerDirections]]:
    """The other heads that triage finds asleep or harmful, and the layers' directions.

    A gain by treatment counts only where there is a symptom, harm everywhere.
    """
    model, texts = loaded.model, training_documents(corpus, _DOCUMENTS)
    others, doubtful = heads
    if not others or len(texts) < 2 or not directions_are_known(model):
        return {}, {}
    layers = sorted({head.layer for head in others})
    directions = measure_directions(model, corpus.train, layers, diagnosis.sinks)
    plan = query_plan(diagnosis, others)
    gaining, harming = suspects(model, plan, texts, directions, progress=progress)
    likely = [head for head in gaining if head in doubtful][:_SUSPECTS]
    likely += [head for head in harming if head not in likely][:_SUSPECTS]
    if not likely:
        return {}, directions
    stage(f"triage of {len(likely)} heads that may be asleep or harmful", progress)
    plan = query_plan(diagnosis, likely)
    rows, _ = triage_heads(model, plan, texts, directions=directions, progress=progress)
    judged = {Head.parse(name): row for name, row in rows.items()}
    harmful = [head for head, row in judged.items() if row.class_ == "harmful"]
    needed = _needed_elsewhere(loaded, harmful)
    asleep = [h for h, row in judged.items() if row.class_ == "asleep" and h in doubtful]
    kept = [*asleep, *(head for head in harmful if head not in needed)]
    return {head: judged[head] for head in sorted(kept)}, directions


def _needed_elsewhere(loaded: LoadedModel, heads: Sequence[Head]) -> list[Head]:
    """The heads without which the loss on `other_texts` rises."""
    if not heads:
        return []
    encoded = encode_for(loaded, other_texts(), max_length=_OTHER_LENGTH)
    costs = head_costs(loaded.model, encoded, heads, [ZERO])[:, 0].sum(1)
    tokens = sum(len(ids) - 1 for ids in encoded)
    negligible = TriageThresholds().negligible
    return [head for head, cost in zip(heads, costs / tokens, strict=True) if cost > negligible]


def other_texts() -> list[str]:
    """Scripture and speeches of the patient's two training corpora.

    Evaluations and auto's judge read the bundled varied texts, or the patient's held-out ones,
    where nothing else is named: a head that was spared on those would be judged on them as well.
    """
    scripture = [text for text in patient_texts("train", "scripture") if not in_validation(text)]
    speeches = patient_texts("second")
    return [
        text
        for texts in (scripture, speeches)
        for text in texts[:: len(texts) // _OTHER_TEXTS][:_OTHER_TEXTS]
    ]


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
