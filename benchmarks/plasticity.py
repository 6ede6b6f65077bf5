"""Plasticity: CPU and memory per head, beside the public algorithm done plainly.

The peer below is our own plain transcription of the public algorithm (reference, section 3): the
same statistics, 256 key pairs per cell drawn and scored one at a time, with one scalar normal CDF.
Each side runs in a process of its own with one thread, on the same files, imports not counted.
headwise scores *all* pairs and adds standard errors, a valid normality test and a distance map.

Invariant: both sides read the same files in the same run; only the ratio is meant to be compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Options, command_of, cpu_seconds, peak_mb, run_side
from headwise.errors import HeadwiseError

BUCKETS = 16


@dataclass(frozen=True)
class PlasticityRow:
    """Both sides on one head dimension: CPU seconds per head, their ratio, peak memory."""

    dim: int
    rows: int
    group: int
    headwise_cpu_s: float
    peer_cpu_s: float
    ratio: float
    headwise_peak_mb: float
    peer_peak_mb: float


PEER_PAIRS = 256


def run(options: Options) -> list[PlasticityRow]:
    """50,000 rows a head, or 5,000."""
    return bench_plasticity(rows=5_000) if options.quick else bench_plasticity()


def bench_plasticity(
    *, dims: tuple[int, ...] = (64, 128), rows: int = 50_000, group: int = 1, heads: int = 2
) -> list[PlasticityRow]:
    """One row for each head dimension: seconds per head of both sides, their ratio, peak memory.

    `group` query heads share a key head; `heads` query heads are measured by headwise, one by the
    peer (its cost does not depend on sharing).
    """
    result = []
    for dim in dims:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_synthetic(root, dim=dim, rows=rows, num_q_heads=heads, group=group)
            ours, peer = _measured("headwise", root, heads), _measured("peer", root, 1)
        result.append(
            PlasticityRow(
                dim=dim,
                rows=rows,
                group=group,
                headwise_cpu_s=ours["cpu_s"],
                peer_cpu_s=peer["cpu_s"],
                ratio=peer["cpu_s"] / ours["cpu_s"],
                headwise_peak_mb=ours["peak_mb"],
                peer_peak_mb=peer["peak_mb"],
            )
        )
    return result


def write_synthetic(root: Path, *, dim: int, rows: int, num_q_heads: int, group: int) -> None:
    """Base-rate-3 captures: 16 uniform buckets, about three tokens per document and bucket."""
    size = 8192 // BUCKETS if dim <= 64 else 32768 // BUCKETS
    num_k_heads = -(-num_q_heads // group)
    rng = np.random.default_rng(dim)
    mixing = rng.normal(size=(dim, dim)) / np.sqrt(dim) + np.eye(dim)
    for kind, count in (("q", num_q_heads), ("k", num_k_heads)):
        for head in range(count):
            example = np.sort(rng.integers(rows // (3 * BUCKETS), size=rows))
            position = rng.integers(size * BUCKETS, size=rows)
            drift = np.outer(position / (size * BUCKETS), rng.normal(size=dim))
            vectors = rng.normal(size=(rows, dim)) @ mixing + drift + 0.3
            path = root / f"l00h{head:02d}{kind}" / "data.parquet"
            path.parent.mkdir()
            _write(path, position // size, example, position, vectors)


def _write(path: Path, *columns: np.ndarray) -> None:
    bucket, example, position, vectors = columns
    flat = pa.array(vectors.astype(np.float32).ravel())
    table = pa.table(
        {
            "bucket": pa.array(bucket.astype(np.int32)),
            "example_id": pa.array(example.astype(np.int32)),
            "position": pa.array(position.astype(np.int32)),
            "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            "sliding_window": pa.nulls(len(bucket)),
        }
    )
    pq.write_table(table, path, compression="zstd")


def _measured(side: str, root: Path, heads: int) -> dict[str, float]:
    """CPU seconds per head and peak memory of one side, in a fresh single-threaded process."""
    done = run_side(command_of("plasticity", side, root, heads))
    if done.returncode:
        raise HeadwiseError(f"the {side} side of the benchmark failed", where=done.stderr[-2000:])
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _run_side(side: str, root: Path, heads: int) -> dict[str, float]:
    from headwise.plasticity.head_group import analyse_group
    from headwise.plasticity.reader import find_heads, group_heads
    from headwise.plasticity.settings import PlasticitySettings
    from headwise.plasticity.values import HeadFailure

    folder, settings = find_heads(root), PlasticitySettings()
    groups = group_heads(folder)

    def measure() -> None:
        if side == "peer":
            peer_head(folder.file(0, 0, "q"), folder.file(0, 0, "k"), seed=0)
            return
        for group in groups:
            for result in analyse_group(folder, group, settings):
                if isinstance(result, HeadFailure):
                    raise HeadwiseError(result.reason)

    return {"cpu_s": cpu_seconds(measure) / heads, "peak_mb": peak_mb()}


def peer_head(query_file: Path, key_file: Path, *, seed: int) -> dict[tuple[int, int], float]:
    """The peer: one head by the public algorithm, plainly, one pair at a time."""
    from headwise.plasticity.reader import orientation_of, read_vectors

    queries, keys = read_vectors(query_file), read_vectors(key_file)
    signs = orientation_of(keys)
    q, k = queries.vectors * signs, keys.vectors * signs
    position = queries.position.astype(np.float64)
    _, beta = _peer_fit(position, q)
    unit = beta / np.linalg.norm(beta)
    v = unit - np.eye(len(unit))[0]
    v /= np.linalg.norm(v)
    householder = np.eye(len(unit)) - 2 * np.outer(v, v)
    q, k = q @ householder, k @ householder
    alpha, beta = _peer_fit(position, q)
    residual = q - alpha - np.outer(position, beta)
    _peer_normality(residual[:, 0], q[:, 1:], seed)
    model = (alpha, beta, residual.var(axis=0, ddof=1))
    passages: dict[int, dict[int, list[int]]] = {}
    for row, (bucket, example) in enumerate(
        zip(keys.bucket.tolist(), keys.example.tolist(), strict=True)
    ):
        passages.setdefault(bucket, {}).setdefault(example, []).append(row)
    rng = np.random.default_rng(seed)
    cells = {}
    for q_bucket in np.unique(queries.bucket[queries.bucket > 0]).tolist():
        tau = float(position[queries.bucket == q_bucket].mean())
        for k_bucket in sorted(bucket for bucket in passages if bucket < q_bucket):
            usable = [np.array(rows) for rows in passages[k_bucket].values() if len(rows) >= 2]
            pairs = list(_peer_pairs(rng, usable, k, model, tau))
            cells[q_bucket, k_bucket] = float(np.mean(pairs)) if pairs else float("nan")
    return cells


def _peer_fit(position: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    centred = position - position.mean()
    beta = (centred[:, None] * vectors).sum(axis=0) / (centred * centred).sum()
    alpha = vectors.mean(axis=0) - beta * position.mean()
    fitted = alpha + np.outer(position, beta)
    total = ((vectors - vectors.mean(axis=0)) ** 2).sum(axis=0)
    _ = 1 - ((vectors - fitted) ** 2).sum(axis=0) / np.maximum(total, 1e-12)
    return alpha, beta


def _peer_normality(first: np.ndarray, semantic: np.ndarray, seed: int) -> list[float]:
    from scipy import stats

    z = (first - first.mean()) / first.std(ddof=1)
    found = [
        stats.skew(z, bias=False),
        stats.kurtosis(z, bias=False),
        stats.kstest(z, "norm").pvalue,
    ]
    z = (semantic - semantic.mean(axis=0)) / semantic.std(axis=0, ddof=1)
    found.append(np.median(np.abs(stats.skew(z, axis=0, bias=False))))
    found.append(np.median(np.abs(stats.kurtosis(z, axis=0, bias=False))))
    dims = np.random.default_rng(seed).choice(z.shape[1], min(64, z.shape[1]), replace=False)
    found.append(np.median([stats.kstest(z[:, dim], "norm").pvalue for dim in dims]))
    return found


def _peer_pairs(
    rng: np.random.Generator,
    usable: list[np.ndarray],
    k: np.ndarray,
    model: tuple[np.ndarray, np.ndarray, np.ndarray],
    tau: float,
) -> Iterator[float]:
    from scipy.stats import norm

    alpha, beta, variance = model
    ends = np.cumsum([len(rows) * (len(rows) - 1) // 2 for rows in usable])
    for _ in range(min(PEER_PAIRS, int(ends[-1])) if len(ends) else 0):
        rows = usable[int(np.searchsorted(ends, rng.integers(int(ends[-1])), side="right"))]
        one, two = rng.choice(rows, 2, replace=False)
        difference = k[one] - k[two]
        spread = float((variance * difference * difference).sum())
        if spread > 0:
            p = float(norm.cdf((alpha + beta * tau) @ difference / np.sqrt(spread)))
            yield 4 * p * (1 - p)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_side(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
