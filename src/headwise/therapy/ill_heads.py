"""Which heads `auto` treats if no plan names them: found on training text, by symptom or by gain.

A head is ill if it stares at the first token (sick) or gives next to nothing (silent). One that
looks there less, but still much, is *drowsy*, and healthy models have such heads: it is ill only if
triage finds it asleep. Without any symptom a gain by treatment is no illness: on text that a
healthy model was not made for, many of its heads have one (LOG).
"""

from __future__ import annotations

from collections.abc import Sequence

from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.heads import Head, format_heads
from headwise.models.loaded_model import LoadedModel
from headwise.progress import Progress, silent, stage
from headwise.proof.staged import document_order
from headwise.settings import changed
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import Recipe
from headwise.surgery.sink_directions import measure_directions
from headwise.texts.corpus import Corpus, spread_blocks
from headwise.texts.text_sets import TextSet
from headwise.therapy.triage import gaining_heads, query_plan, selected_heads, triage_heads

_ILL = "sick, output_norm_ratio < 0.05"  # the least of the healthy heads that were seen has 0.48
_DROWSY = "first_token_mass > 0.3"  # where Gu et al. (2410.10781) begin to speak of a sink
_BLOCKS = 32  # training blocks on which symptoms are looked for
_DOCUMENTS = 32  # on which drowsy heads are triaged
_AWAKENED = 8  # drowsy heads that are triaged at most: those that to first order gain most


def plan_ill_heads(
    loaded: LoadedModel, corpus: Corpus, recipe: Recipe, *, progress: Progress = silent
) -> SurgeryPlan:
    """A plan for the heads that are ill on training text; it may have no targets.

    A head that lost its values gives nothing wherever it looks, and need not look at the sink.
    """
    rows = [
        row[:length].tolist()
        for block in spread_blocks(corpus.train, _BLOCKS)
        for row, length in zip(block.ids, block.lengths, strict=True)
    ]
    texts = tuple(str(loaded.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows)
    found = diagnose(loaded, TextSet(corpus.name, texts), max_length=recipe.block)
    ill = selected_heads(found, _ILL)
    ill += _asleep(loaded, found, corpus, selected_heads(found, f"{_DROWSY} - ({_ILL})"), progress)
    if ill:
        return make_plan(found, heads=format_heads(ill))
    return changed(make_plan(found, heads="all"), targets="", healthy="all", summary=None)


def _asleep(
    loaded: LoadedModel,
    diagnosis: Diagnosis,
    corpus: Corpus,
    drowsy: Sequence[Head],
    progress: Progress,
) -> list[Head]:
    """The drowsy heads that a treatment wakes, each for itself."""
    model, texts = loaded.model, training_documents(corpus, _DOCUMENTS)
    if not drowsy or len(texts) < 2:
        return []
    directions = measure_directions(model, corpus.train, [head.layer for head in drowsy])
    plan = query_plan(diagnosis, drowsy)
    likely = gaining_heads(model, plan, texts, directions, progress=progress)[:_AWAKENED]
    if not likely:
        return []
    stage(f"triage of {len(likely)} heads that may be drowsy", progress)
    plan = query_plan(diagnosis, likely)
    found, _ = triage_heads(model, plan, texts, directions=directions, progress=progress)
    return [Head.parse(name) for name, row in found.items() if row.class_ == "asleep"]


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
