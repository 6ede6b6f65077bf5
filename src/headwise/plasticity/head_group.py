"""One unit of work: a key head with the query heads that use it, from files to numbers.

Keys are read, oriented and differenced once for the whole group; each batch of differences is then
scored by every query head. A query head that cannot be used is reported and does not stop the
others.

Invariant: a head's result depends on its two files and the settings only.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.errors import ArtefactError, HeadwiseError
from headwise.plasticity.key_pairs import (
    PairBatch,
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
    Rotation,
    build_model,
    predict_positions,
    rotate_queries,
    sort_queries,
)
from headwise.plasticity.reader import (
    HeadGroup,
    QKFolder,
    VectorTable,
    orientation_of,
    read_vectors,
)
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.tally import (
    GRADIENT_PAIRS,
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


def analyse_group(
    folder: QKFolder, group: HeadGroup, settings: PlasticitySettings
) -> list[HeadRecord | HeadFailure]:
    """Measure the query heads of one group; failures are values, in the order of the heads."""
    try:
        keys, signs = _read_keys(folder, group, settings)
    except (HeadwiseError, OSError, MemoryError) as error:
        return [HeadFailure(group.layer, q_head, str(error)) for q_head in group.q_heads]
    prepared: list[tuple[dict[str, Any], Tally] | HeadFailure] = []
    for q_head in group.q_heads:
        try:
            prepared.append(_prepare(folder, group, q_head, keys, signs, settings))
        except (HeadwiseError, OSError, MemoryError, ArithmeticError, ValueError) as error:
            prepared.append(HeadFailure(group.layer, q_head, str(error)))
    ready = [head for head in prepared if not isinstance(head, HeadFailure)]
    if settings.draws_as_public_code:
        for columns, tally in ready:
            _score_as_public_code(tally, group, columns["q_head"], settings)
    else:
        _score_together([tally for _, tally in ready], group, keys, settings)
    return [head if isinstance(head, HeadFailure) else _record(*head) for head in prepared]


def _read_keys(
    folder: QKFolder, group: HeadGroup, settings: PlasticitySettings
) -> tuple[VectorTable, Float[np.ndarray, " dim"]]:
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
    keys: VectorTable,
    signs: Float[np.ndarray, " dim"],
    settings: PlasticitySettings,
) -> tuple[dict[str, Any], Tally]:
    """The columns of a query head that its pairs do not change, and what will score those."""
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
    fifth = (5 * queries.position / (queries.position.max() + 1)).astype(np.int64)
    columns = {
        "layer": group.layer,
        "q_head": q_head,
        "k_head": group.k_head,
        "n_k_tokens": len(keys.example),
        "fifths": {  # each query bucket's queries by fifth of the position range
            int(bucket): np.bincount(fifth[queries.rows(index)], minlength=5).tolist()
            for index, bucket in enumerate(queries.buckets)
        },
        **_describe(queries, rotation, settings),
    }
    return columns, _make_tally(queries, rotation, keys, settings)


def _describe(
    queries: VectorTable, rotation: Rotation, settings: PlasticitySettings
) -> dict[str, Any]:
    """The columns about a head's queries: how they follow position, how normal they are."""
    num_rows, dim = len(queries.position), len(rotation.beta)
    residual = rotation.along_axis - rotation.line(queries.position)
    skew, kurtosis, distance = 0.0, 0.0, 0.0
    if num_rows > 1 and residual.std(ddof=1) > 0:
        skew, kurtosis, distance = describe_sample(residual)
    noise = describe_noise(
        islice(rotation.components(queries), 1, None),
        num_dims=dim - 1,
        num_rows=num_rows,
        max_dims=settings.normality_max_dims,
        alpha=settings.p_alpha,
        seed=settings.seed,
    )
    return {
        "n_q_tokens": num_rows,
        "d_model": dim,
        "q_R2_pos": float(np.nanmean(rotation.r2)),
        "q_beta_norm": float(np.linalg.norm(rotation.beta)),
        **predict_positions(queries, rotation),
        "q_resid0_skew": skew,
        "q_resid0_kurt": kurtosis,
        "q_resid0_ks_p": float(ks_p_values(np.array([distance]), num_rows)[0]),
        "q_resid0_lilliefors_p": float(lilliefors_p_values(np.array([distance]), num_rows)[0]),
        **noise,
        "r2": tuple(defined(value) for value in rotation.r2),
    }


def _make_tally(
    queries: VectorTable,
    rotation: Rotation,
    keys: VectorTable,
    settings: PlasticitySettings,
) -> Tally:
    documents, num_documents = choose_documents(keys.example, queries.example)
    return Tally(
        definition=settings.definition,
        keys=keys,
        buckets=queries.buckets,
        counts=queries.counts,
        tau=queries.mean_positions,
        open=open_cells(queries, keys, window_in_buckets=settings.window_in_buckets),
        min_queries=1 if settings.draws_as_public_code else 2,
        model=build_model(settings.definition, queries, rotation),
        queries=queries if settings.definition == "empirical" else None,
        documents=documents,
        num_documents=num_documents,
        probes=make_probes(settings.definition, queries, rotation.axis, documents),
    )


def _score_together(
    tallies: list[Tally], group: HeadGroup, keys: VectorTable, settings: PlasticitySettings
) -> None:
    """Every batch of key pairs is made once and scored by all heads of the group."""
    limit = settings.pair_limit
    for index, bucket in enumerate(keys.buckets.tolist()):
        if not any(len(tally.columns(index)) for tally in tallies):
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
    columns = tally.columns(index)
    if len(columns) == 0:
        return
    if tally.queries is not None:
        _score_empirically(tally, index, batch, tally.queries, share)
        return
    tally.add(index, batch, columns, plasticity_of(*pair_moments(batch, tally.model, columns)))
    if tally.probes:
        step = -(-len(batch.identical) // max(1, round(GRADIENT_PAIRS * share)))
        pick = np.arange(0, len(batch.identical), step)
        gradients = preference_gradient(batch, tally.model, columns, pick)
        for column, (by_mean, by_covariance) in zip(columns.tolist(), gradients, strict=True):
            tally.add_moment_influence(column, by_mean, by_covariance, share)


def _score_empirically(
    tally: Tally, index: int, batch: PairBatch, queries: VectorTable, share: float
) -> None:
    """Count, for every pair, the bucket's own queries that prefer its first key."""
    differences = batch.differences()
    for column in tally.columns(index).tolist():
        rows = queries.rows(column)
        p, effect = _preferences(differences, queries.vectors.T[:, rows].astype(np.float64))
        scale = len(effect) / (len(effect) - 1)
        tally.add(index, batch, np.array([column]), (4.0 * scale * p * (1.0 - p))[None])
        place = document_index(queries.example[rows], tally.documents)
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
    tally: Tally, group: HeadGroup, q_head: int, settings: PlasticitySettings
) -> None:
    """Draw and score cell by cell, in the order that fixes the public code's random numbers."""
    assert settings.pairs != "all"
    rng = np.random.default_rng(settings.seed + 10007 * group.layer + 379 * q_head)
    keys = tally.keys
    drawn: dict[tuple[int, int], PairBatch] = {}
    for column, index in np.argwhere(tally.open).tolist():
        start, size = keys.passages_of(index)
        if len(size):
            first, second = draw_public_pairs(rng, start, size, settings.pairs)
            drawn[column, index] = listed_batch(keys, first, second)
    for index in range(len(keys.buckets)):
        for (column, at), batch in drawn.items():
            if at == index:
                columns = np.array([column])
                values = plasticity_of(*pair_moments(batch, tally.model, columns))
                tally.add(index, batch, columns, values)
        tally.close(index)


def _record(columns: dict[str, Any], tally: Tally) -> HeadRecord:
    """The head's numbers as plain values; NaN as None."""
    numbers: dict[str, Any] = {
        name: defined(value) if isinstance(value, float) else value
        for name, value in columns.items()
    }
    cells = tally.cells()
    overall, error = tally.overall()
    fifths = fifth_means(cells, numbers.pop("fifths"), weighted=tally.weighted)
    numbers |= {f"ap_quintile_{number}": value for number, value in enumerate(fifths, start=1)}
    return HeadRecord(
        **numbers, ap_overall=overall, ap_se=error, cells=cells, distance=tally.distance()
    )
