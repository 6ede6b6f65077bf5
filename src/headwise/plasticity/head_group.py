"""One unit of work: a key head with the query heads that use it, from files to numbers.

Keys are read, oriented and differenced once for the whole group; each batch of differences is then
scored by every query head. A query head that cannot be used is reported and does not stop the
others.

Invariant: a head's result depends on its two files and the settings only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.errors import ArtefactError, HeadwiseError
from headwise.plasticity.key_pairs import (
    PairBatch,
    SortedKeys,
    draw_public_pairs,
    listed_batch,
    pair_batches,
    sort_keys,
)
from headwise.plasticity.normality import (
    describe_noise,
    describe_sample,
    ks_p_values,
    lilliefors_p_values,
)
from headwise.plasticity.query_model import (
    PositionFit,
    Queries,
    Rotation,
    build_model,
    predict_positions,
    rotate_queries,
    sort_queries,
)
from headwise.plasticity.reader import HeadGroup, QKFolder, orientation_of, read_vectors
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.tally import (
    GRADIENT_PAIRS,
    Scoring,
    Tally,
    choose_documents,
    document_index,
    fifth_means,
    make_probes,
    open_cells,
    pair_moments,
    plasticity_of,
    preference_gradient,
)
from headwise.plasticity.values import HeadFailure, HeadRecord, defined

EMPIRICAL_PAIRS = 512  # scored at a time: pairs x queries of a bucket must stay small


@dataclass(frozen=True)
class _Prepared:
    """A query head that was read, before its pairs are scored."""

    q_head: int
    metrics: dict[str, Any]  # columns of the head's record
    fit: PositionFit
    fifths: dict[int, list[int]]  # each query bucket's queries by fifth of the position range
    tally: Tally


def analyse_group(
    folder: QKFolder, group: HeadGroup, settings: PlasticitySettings
) -> list[HeadRecord | HeadFailure]:
    """Measure the query heads of one group; failures are values, in the order of the heads."""
    try:
        keys, signs = _read_keys(folder, group, settings)
    except (HeadwiseError, OSError, MemoryError) as error:
        return [HeadFailure(group.layer, q_head, str(error)) for q_head in group.q_heads]
    prepared: list[_Prepared | HeadFailure] = []
    for q_head in group.q_heads:
        try:
            prepared.append(_prepare(folder, group, q_head, keys, signs, settings))
        except (HeadwiseError, OSError, MemoryError, ArithmeticError, ValueError) as error:
            prepared.append(HeadFailure(group.layer, q_head, str(error)))
    ready = [head for head in prepared if isinstance(head, _Prepared)]
    if settings.draws_as_public_code:
        for head in ready:
            _score_as_public_code(head, group, keys, settings)
    else:
        _score_together([head.tally for head in ready], group, keys, settings)
    return [head if isinstance(head, HeadFailure) else _record(group, head) for head in prepared]


def _read_keys(
    folder: QKFolder, group: HeadGroup, settings: PlasticitySettings
) -> tuple[SortedKeys, Float[np.ndarray, " dim"]]:
    path = folder.verified_file(group.layer, group.k_head, "k")
    table = read_vectors(path, max_rows=settings.max_tokens_per_head, seed=settings.seed)
    whole = table
    if settings.draws_as_public_code and len(table.bucket) == settings.max_tokens_per_head:
        whole = read_vectors(path)  # the public code looks before it samples
    signs = orientation_of(whole)
    return sort_keys(table, signs), signs


def _prepare(
    folder: QKFolder,
    group: HeadGroup,
    q_head: int,
    keys: SortedKeys,
    signs: Float[np.ndarray, " dim"],
    settings: PlasticitySettings,
) -> _Prepared:
    path = folder.verified_file(group.layer, q_head, "q")
    table = read_vectors(path, max_rows=settings.max_tokens_per_head, seed=settings.seed)
    if table.vectors.shape[1] != keys.vectors.shape[1]:
        raise ArtefactError(
            f"queries have {table.vectors.shape[1]} components, their keys {keys.vectors.shape[1]}",
            where=path,
            fix=f"check that query head {q_head} uses key head {group.k_head}",
        )
    queries = sort_queries(table, signs)
    rotation = rotate_queries(queries, public=settings.definition == "linear-diagonal")
    metrics = _describe(queries, rotation, len(keys.example), settings)
    scoring = _make_scoring(queries, rotation, keys, table.window, settings)
    return _Prepared(q_head, metrics, rotation.fit, _count_by_fifth(queries), Tally(scoring, keys))


def _count_by_fifth(queries: Queries) -> dict[int, list[int]]:
    fifth = (5 * queries.position / (queries.position.max() + 1)).astype(np.int64)
    return {
        int(bucket): np.bincount(fifth[queries.rows(index)], minlength=5).tolist()
        for index, bucket in enumerate(queries.buckets)
    }


def _describe(
    queries: Queries, rotation: Rotation, num_keys: int, settings: PlasticitySettings
) -> dict[str, Any]:
    """The columns about a head's queries: how they follow position, how normal they are."""
    place = predict_positions(queries, rotation)
    fit, residual = rotation.fit, rotation.residual
    skew, kurtosis, distance = 0.0, 0.0, 0.0
    if len(residual) > 1 and residual.std(ddof=1) > 0:
        shape = describe_sample(residual)
        skew, kurtosis, distance = shape.skew, shape.kurtosis, shape.distance
    noise = describe_noise(
        islice(rotation.reflection.components(queries, rotation.along_v), 1, None),
        num_dims=len(fit.beta) - 1,
        num_rows=len(residual),
        max_dims=settings.normality_max_dims,
        alpha=settings.p_alpha,
        seed=settings.seed,
    )
    return {
        "n_q_tokens": len(queries.position),
        "n_k_tokens": num_keys,
        "d_model": len(fit.beta),
        "q_R2_pos": float(np.nanmean(fit.r2)),
        "q_beta_norm": float(np.linalg.norm(fit.beta)),
        "q_R2_scalar": place.r2,
        "q_mae_baseline": place.mae_baseline,
        "q_mae_proj": place.mae_projection,
        "q_mae_ratio": place.mae_ratio,
        "q_resid0_skew": skew,
        "q_resid0_kurt": kurtosis,
        "q_resid0_ks_p": float(ks_p_values(np.array([distance]), len(residual))[0]),
        "q_noise_med_abs_skew": noise.median_abs_skew,
        "q_noise_med_abs_kurt": noise.median_abs_kurtosis,
        "q_noise_med_ks_p": noise.median_ks_p,
        "q_noise_frac_ks_p_lt_alpha": noise.rejected_by_ks,
        "q_resid0_lilliefors_p": float(lilliefors_p_values(np.array([distance]), len(residual))[0]),
        "q_noise_med_lilliefors_p": noise.median_lilliefors_p,
        "q_noise_frac_lilliefors_p_lt_alpha": noise.rejected_by_lilliefors,
    }


def _make_scoring(
    queries: Queries,
    rotation: Rotation,
    keys: SortedKeys,
    window: int | None,
    settings: PlasticitySettings,
) -> Scoring:
    model = build_model(settings.definition, queries, rotation)
    documents, num_documents = choose_documents(keys.example, queries.example)
    return Scoring(
        definition=settings.definition,
        buckets=queries.buckets,
        counts=queries.counts,
        tau=queries.mean_positions,
        open=open_cells(queries, keys, window, window_in_buckets=settings.window_in_buckets),
        min_queries=1 if settings.draws_as_public_code else 2,
        model=model,
        queries=queries if settings.definition == "empirical" else None,
        documents=documents,
        num_documents=num_documents,
        probes=make_probes(settings.definition, queries, model, documents),
    )


def _score_together(
    tallies: list[Tally], group: HeadGroup, keys: SortedKeys, settings: PlasticitySettings
) -> None:
    """Every batch of key pairs is made once and scored by all heads of the group."""
    limit = settings.pair_limit
    for index, bucket in enumerate(keys.buckets.tolist()):
        if not any(len(tally.scoring.columns(index)) for tally in tallies):
            continue
        seed = (settings.seed, group.layer, group.k_head, abs(bucket))
        _, size = keys.passages_of(index)
        total = min(limit, int((size * (size - 1) // 2).sum()))
        for batch in pair_batches(keys, index, limit=limit, seed=seed):
            for tally in tallies:
                _score_batch(tally, index, batch, share=len(batch.identical) / total)
        for tally in tallies:
            tally.close(index)


def _score_batch(tally: Tally, index: int, batch: PairBatch, *, share: float) -> None:
    columns = tally.scoring.columns(index)
    if len(columns) == 0:
        return
    if tally.scoring.queries is not None:
        _score_empirically(tally, index, batch, tally.scoring.queries, share)
        return
    tally.add(
        index, batch, columns, plasticity_of(*pair_moments(batch, tally.scoring.model, columns))
    )
    if tally.scoring.probes:
        step = -(-len(batch.identical) // max(1, round(GRADIENT_PAIRS * share)))
        pick = np.arange(0, len(batch.identical), step)
        gradients = preference_gradient(batch, tally.scoring.model, columns, pick)
        for column, (by_mean, by_covariance) in zip(columns.tolist(), gradients, strict=True):
            tally.add_moment_influence(column, by_mean, by_covariance, share)


def _score_empirically(
    tally: Tally, index: int, batch: PairBatch, queries: Queries, share: float
) -> None:
    """Count, for every pair, the bucket's own queries that prefer its first key."""
    differences = batch.differences()
    for column in tally.scoring.columns(index).tolist():
        rows = queries.rows(column)
        p, effect = _preferences(differences, queries.vectors[:, rows].astype(np.float64))
        scale = len(effect) / (len(effect) - 1)
        tally.add(index, batch, np.array([column]), (4.0 * scale * p * (1.0 - p))[None])
        place = document_index(queries.example[rows], tally.scoring.documents)
        tally.add_query_influence(column, scale * effect, place, share)


def _preferences(
    differences: Float[np.ndarray, "pair dim"], queries: Float[np.ndarray, "dim row"]
) -> tuple[Float[np.ndarray, " pair"], Float[np.ndarray, " row"]]:
    """Each pair's share of queries that prefer it, and each query's effect on the mean 4p(1-p)."""
    p, effect = np.empty(len(differences)), np.zeros(queries.shape[1])
    for begin in range(0, len(p), EMPIRICAL_PAIRS):
        part = slice(begin, begin + EMPIRICAL_PAIRS)
        prefers = differences[part] @ queries > 0
        p[part] = np.count_nonzero(prefers, axis=1) / len(effect)
        slope = (4.0 * (1.0 - 2.0 * p[part]) / len(p)).astype(np.float32)
        effect += slope @ prefers.astype(np.float32)
    return p, effect


def _score_as_public_code(
    head: _Prepared, group: HeadGroup, keys: SortedKeys, settings: PlasticitySettings
) -> None:
    """Draw and score cell by cell, in the order that fixes the public code's random numbers."""
    assert settings.pairs != "all"
    rng = np.random.default_rng(settings.seed + 10007 * group.layer + 379 * head.q_head)
    scoring = head.tally.scoring
    drawn: dict[tuple[int, int], PairBatch] = {}
    for column, index in np.argwhere(scoring.open).tolist():
        start, size = keys.passages_of(index)
        if len(size):
            first, second = draw_public_pairs(rng, start, size, settings.pairs)
            drawn[column, index] = listed_batch(keys, first, second)
    for index in range(len(keys.buckets)):
        for (column, at), batch in drawn.items():
            if at == index:
                columns = np.array([column])
                values = plasticity_of(*pair_moments(batch, scoring.model, columns))
                head.tally.add(index, batch, columns, values)
        head.tally.close(index)


def _record(group: HeadGroup, head: _Prepared) -> HeadRecord:
    """The head's numbers as plain values; NaN as None."""
    numbers: dict[str, Any] = {
        name: defined(value) if isinstance(value, float) else value
        for name, value in head.metrics.items()
    }
    cells = head.tally.cells()
    overall, error = head.tally.overall()
    fifths = fifth_means(cells, head.fifths, weighted=head.tally.scoring.weighted)
    numbers |= {f"ap_quintile_{number}": value for number, value in enumerate(fifths, start=1)}
    return HeadRecord(
        layer=group.layer,
        q_head=head.q_head,
        k_head=group.k_head,
        **numbers,
        ap_overall=overall,
        ap_se=error,
        r2=tuple(defined(value) for value in head.fit.r2),
        cells=cells,
        distance=head.tally.distance(),
    )
