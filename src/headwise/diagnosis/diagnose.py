"""Diagnosis: measure every head, give it a class, and describe the band of sick ones.

`diagnose` runs a model and returns a frozen `Diagnosis`; everything after it (plan, compare,
report) reads that value and never the model. First-token mass is the paper's "BOS mass", but the
first token need not be a BOS: BLOOM's tokenizer adds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.alarms import Alarm, loss_alarms, merge_alarms
from headwise.artefacts import versions
from headwise.diagnosis.dormancy import dormancy_of, dormant_weights
from headwise.diagnosis.measures import Measured, heads_measurement, positional_baseline
from headwise.diagnosis.role_measures import role_reader
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.token_rows import waking_of
from headwise.diagnosis.values import Diagnosis, Pooled, Profile, SinkRate, diagnosis_from
from headwise.forward.guard import guard
from headwise.forward.measurements import Measurement, run_measurement
from headwise.models.architectures import alibi_slopes, geometry_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.progress import Progress, silent
from headwise.provenance import MeasureSettings, Provenance, TextInfo
from headwise.texts.batches import DEFAULT_MAX_LENGTH, batches, encode_for
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.texts.unigram import unigram_loss

_READ, _READ_TOKENS = 4, 128  # texts and tokens that tell whether the model reads at all
_DEFAULT_TEXTS = 120  # enough for a map, in seconds; given texts are all read
SINK_RATE_EPSILON = 0.3  # Gu et al. 2410.10781


@takes_model
def diagnose(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    max_length: int = DEFAULT_MAX_LENGTH,
    batch_size: int = 4,
    skip_queries: int = 0,
    bos: bool | None = None,
    thresholds: Thresholds | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Measure and classify every head of a loaded model; `bos` overrules its first token."""
    loaded, max_length = loaded.reading(bos), loaded.length(max_length)
    chosen = as_text_set(texts, loaded.id, most=_DEFAULT_TEXTS)
    encoded = encode_for(
        loaded, chosen.texts, max_length=max_length, minimum=max(2, skip_queries + 1)
    )
    measurement = diagnosis_measurement(
        loaded,
        encoded,
        chosen.describe(sum(map(len, encoded))),
        MeasureSettings(max_length, skip_queries, loaded.bos),
        batch_size=batch_size,
        thresholds=thresholds,
    )
    return run_measurement(loaded.model, measurement, progress=progress)


def diagnosis_measurement(
    loaded: LoadedModel,
    encoded: list[list[int]],
    texts: TextInfo,
    settings: MeasureSettings,
    *,
    batch_size: int = 4,
    thresholds: Thresholds | None = None,
) -> Measurement[Diagnosis]:
    """The diagnosis on tokenised text, as a measurement that may share its passes with others.

    `texts` and `settings` say how the text was tokenised.
    """
    model, skip_queries = loaded.model, settings.skip_queries
    lengths = [len(ids) for ids in encoded]
    guard(model, max(lengths))
    dormant = list[Tensor | None]()
    work = list(batches(encoded, batch_size, model=model))
    roles = None if loaded.tokenizer is None else role_reader(loaded, work, skip_queries)
    measured = yield from heads_measurement(
        model,
        work,
        skip_queries=skip_queries,
        visit=lambda layer: dormant.append(dormant_weights(model, layer)),
        sample=_sample(encoded),
        roles=roles,
    )
    maps = {**measured.means(), **_positional_maps(model, lengths, skip_queries)}
    diagnosis = diagnosis_from(
        model=loaded.describe(),
        maps=maps,
        thresholds=thresholds or Thresholds(),
        spread=measured.spreads(),
        profile=_profile(measured),
        pooled=_pooled(measured),
        sink_rate=_sink_rate(measured),
        mlp_dormancy=dormancy_of(dormant),
        provenance=Provenance(
            texts=texts,
            settings=settings,
            versions=versions(),
        ),
        alarms=merge_alarms(loaded.alarms, _unusable(loaded, encoded, measured.sample_loss)),
    )
    if roles is None or measured.awake_sum is None or measured.awake_text is None:
        return diagnosis
    awake, text = measured.awake_sum, measured.awake_text
    layers, words = diagnosis.model.layer_numbers, loaded.tokenizer
    waking = waking_of(roles.rows, awake, text, diagnosis.sick, layers, words, encoded[0])
    return replace(diagnosis, waking=waking)


def _sample(encoded: list[list[int]]) -> dict[int, int]:
    """A few texts, and how far they are read to tell whether the model reads at all."""
    texts = range(0, len(encoded), max(1, len(encoded) // _READ))[:_READ]
    return {text: min(_READ_TOKENS, len(encoded[text])) for text in texts}


def _unusable(loaded: LoadedModel, encoded: list[list[int]], loss: float) -> tuple[Alarm, ...]:
    """Whether the model reads a few of these texts worse than a guess."""
    mean = loss / sum(length - 1 for length in _sample(encoded).values())
    unigram = unigram_loss(encoded, loaded.num_embeddings)
    return loss_alarms("a sample of the texts", mean, loaded.num_embeddings, unigram)


def _positional_maps(
    model: PreTrainedModel, lengths: list[int], skip: int
) -> dict[str, Float[np.ndarray, "layer head"]]:
    geometry = geometry_of(model)
    slopes = alibi_slopes(model)
    per_head = np.zeros(geometry.num_heads) if slopes is None else slopes.double().numpy()
    rows = positional_baseline(per_head, lengths, skip)
    if slopes is not None:
        rows["slope"] = per_head
    return {name: np.tile(row, (geometry.num_layers, 1)) for name, row in rows.items()}


def _profile(measured: Measured) -> Profile:
    filled = np.flatnonzero(measured.profile_count)
    mass = measured.profile_sum[filled] / measured.profile_count[filled, None, None]
    return Profile(
        *_bucket_edges(filled),
        num_queries=tuple(int(n) for n in measured.profile_count[filled]),
        first_token_mass=mass.transpose(1, 2, 0),
    )


def _pooled(measured: Measured) -> Pooled:
    last = int(np.flatnonzero(measured.profile_count)[-1]) + 1
    counts = np.maximum(measured.profile_count[:last], 1)[:, None]
    maps = (measured.pooled_sum[:, :, :last, :last] / counts).round(6)
    return Pooled(*_bucket_edges(np.arange(last)), maps=maps)


def _bucket_edges(filled: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first query of each bucket, and the one after its last."""
    starts = tuple(0 if b == 0 else 2 ** (int(b) - 1) for b in filled)
    return starts, tuple(1 if b == 0 else 2 ** int(b) for b in filled)


def _sink_rate(measured: Measured) -> SinkRate:
    masses = measured.values["first_token_mass"]
    return SinkRate(SINK_RATE_EPSILON, float((masses > SINK_RATE_EPSILON).mean()))
