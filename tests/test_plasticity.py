"""Plasticity against closed forms, the public code's own output, and slow plain references."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import norm

from headwise.artefacts import load_artefact, save_artefact
from headwise.errors import ArtefactError, SettingsError
from headwise.models.values import ModelInfo
from headwise.plasticity.head_group import analyse_group
from headwise.plasticity.normality import describe_sample, ks_distance, lilliefors_p_values
from headwise.plasticity.query_model import reflect_onto, reflection_axis, reflection_matrix
from headwise.plasticity.reader import find_heads, group_heads, read_vectors
from headwise.plasticity.run import load_settings, measure_plasticity
from headwise.plasticity.settings import CaptureSettings, PlasticitySettings
from headwise.plasticity.tally import fifth_means
from headwise.plasticity.values import (
    CaptureInfo,
    Cell,
    HeadFailure,
    HeadRecord,
    PlasticitySummary,
)
from headwise.provenance import TextInfo

DATA = Path(__file__).parent / "data" / "plasticity"
EXPECTED = json.loads((DATA / "closed" / "expected.json").read_text())
DEFINITION_OF = {
    "original": "linear-diagonal",
    "seed_description": "seed",
    "full_covariance(bucket)": "full",
    "bucket_model(mean,var per bucket)": "full",
}
DEFINITIONS = ("seed", "full", "empirical", "linear-diagonal")
# expected.json is computed from population parameters; float32 files move them by this much.
STORAGE = 2e-9


def analyse(root: Path, **settings) -> list[HeadRecord]:
    """Every head of a folder, in this process."""
    folder, given = find_heads(root), PlasticitySettings(**settings)
    results = [r for group in group_heads(folder) for r in analyse_group(folder, group, given)]
    assert all(isinstance(result, HeadRecord) for result in results), results
    return results


def cells_of(root: Path, **settings) -> dict[tuple[int, ...], float]:
    return {
        (head.layer, head.q_head, cell.q_bucket, cell.k_bucket): cell.plasticity
        for head in analyse(root, **settings)
        for cell in head.cells
    }


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def keyed(rows: list[dict[str, str]], column: str) -> dict[tuple[int, ...], float]:
    names = ("layer", "q_head", "q_bucket", "k_bucket")
    return {tuple(int(row[name]) for name in names): float(row[column]) for row in rows}


def write_head(root: Path, name: str, rng: np.random.Generator, **changes) -> dict:
    """A small head: 4 buckets of 100 tokens, 6 documents; `changes` replace columns."""
    n, dim = changes.pop("rows", 240), changes.pop("dim", 5)
    position = rng.integers(0, 400, n)
    drift = np.outer(position / 400, np.linspace(-1, 2, dim))
    columns = {
        "bucket": pa.array(position // 100, pa.int32()),
        "example_id": pa.array(rng.integers(0, 6, n), pa.int32()),
        "position": pa.array(position, pa.int32()),
        "vector": vectors(rng.normal(size=(n, dim)) + drift + 0.3),
    } | changes
    path = root / name / "data.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path)
    return columns


def vectors(values: np.ndarray, kind=None) -> pa.Array:
    flat = pa.array(values.astype(np.float32).ravel(), kind or pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


@pytest.fixture
def small(tmp_path) -> Path:
    rng = np.random.default_rng(5)
    for name in ("l00h00q", "l00h01q", "l00h00k"):
        write_head(tmp_path / "data", name, rng)
    return tmp_path / "data"


# Right numbers


@pytest.mark.parametrize("case", sorted(set(EXPECTED) - {"nan_and_dup"}))
def test_closed_forms(case):
    entry, root = EXPECTED[case], DATA / "closed" / f"Closed_{case}"
    checked = 0
    for name, cells in entry["expected"].items():
        wanted = ["seed", "full", "linear-diagonal"] if name == "all" else [DEFINITION_OF.get(name)]
        for definition in filter(None, wanted):
            got = cells_of(root, definition=definition)
            assert len(got) == len(cells)
            limit = entry["stat_tol"] or (entry["tol"] if case == "deterministic" else STORAGE)
            for cell, value in cells.items():
                q_bucket, k_bucket = map(int, cell.split(","))
                assert got[0, 0, q_bucket, k_bucket] == pytest.approx(value, abs=limit), cell
            checked += 1
    assert checked


@pytest.mark.parametrize("definition", ["full", "linear-diagonal", "empirical"])
def test_cells_without_a_pair_that_differs_are_nan_and_left_out(definition):
    (head,) = analyse(DATA / "closed" / "Closed_nan_and_dup", definition=definition)
    empty = {f"{c.q_bucket},{c.k_bucket}" for c in head.cells if c.plasticity is None}
    assert empty == set(EXPECTED["nan_and_dup"]["expected"]["nan_cells"])
    assert all(c.n_pairs == 0 for c in head.cells if c.plasticity is None)
    assert np.isfinite(head.ap_overall)


def test_the_seeds_variance_floor_makes_identical_keys_plastic():
    (head,) = analyse(DATA / "closed" / "Closed_nan_and_dup")
    by_key = {(c.q_bucket, c.k_bucket): c.plasticity for c in head.cells}
    assert by_key[2, 1] == 1.0  # identical keys: v <= 0 -> 1e-12, m = 0
    assert by_key[3, 2] is None  # one key a group: no pair at all


@pytest.mark.parametrize("definition", DEFINITIONS)
@pytest.mark.parametrize("name", ["log", "sliding"])
def test_all_pairs_equal_the_independent_reference(name, definition):
    legacy = definition == "linear-diagonal"
    got = cells_of(DATA / name / "data", definition=definition, legacy_columns=legacy)
    expected = keyed(table(DATA / name / "exhaustive.csv"), definition.replace("-", "_"))
    if name == "log" or legacy:
        assert set(got) == set(expected)
    for cell, value in got.items():
        limit = 0.02 if definition == "empirical" else 1e-8
        assert value == pytest.approx(expected[cell], abs=limit), cell


@pytest.mark.parametrize("name", ["log", "sliding"])
def test_sampled_linear_diagonal_is_the_public_code(name, tmp_path):
    out = tmp_path / "out"
    measure_plasticity(
        DATA / name / "data",
        out=out,
        definition="linear-diagonal",
        pairs=256,
        legacy_columns=True,
    )
    for file in ("head_metrics", "head_bucket_plasticity", "head_component_weights"):
        got, expected = (
            table(out / f"{file}.csv"),
            table(DATA / name / "public_code" / f"{file}.csv"),
        )
        assert [list(row) for row in got] == [list(row) for row in expected]
        for row, reference in zip(got, expected, strict=True):
            for column, value in reference.items():
                assert float(row[column]) == pytest.approx(float(value), abs=1e-9), column


def plain_cell(definition, q, t, b, bucket, differences):
    """One cell by section 12, pair by pair, in a rotated basis made by QR, not Householder."""
    tc = t - t.mean()
    beta = tc @ q / (tc @ tc)
    alpha = q.mean(0) - beta * t.mean()
    basis = np.linalg.qr(np.column_stack([beta, np.eye(len(beta))[:, 1:]]))[0]
    inside = b == bucket
    tau = t[inside].mean()
    values = []
    for d in differences:
        if definition == "empirical":
            p = np.mean(q[inside] @ d > 0)
            n = inside.sum()
            values.append(4 * p * (1 - p) * n / (n - 1))
            continue
        if definition == "full":
            m, v = d @ q[inside].mean(0), d @ np.cov(q[inside].T) @ d
        else:
            r, turned = d @ basis, q @ basis
            s0 = (turned[:, 0] - (alpha + np.outer(t, beta)) @ basis[:, 0]).var(ddof=1)
            m = r[0] * ((alpha + beta * tau) @ basis[:, 0]) + r[1:] @ turned[inside, 1:].mean(0)
            cov = np.cov(turned[inside, 1:].T) + 1e-12 * np.eye(len(d) - 1)
            v = r[0] ** 2 * s0 + r[1:] @ cov @ r[1:]
        p = norm.cdf(m / np.sqrt(v))
        values.append(4 * p * (1 - p))
    return np.mean(values)


@pytest.mark.parametrize("definition", ["seed", "full", "empirical"])
def test_cells_equal_a_plain_reference(small, definition):
    got = cells_of(small, definition=definition)
    keys, queries = (read_vectors(small / f"l00h0{n}" / "data.parquet") for n in ("0k", "1q"))
    k, q = keys.vectors.astype(float), queries.vectors.astype(float)
    for q_bucket, k_bucket in ((1, 0), (3, 0), (3, 2)):
        rows = np.flatnonzero(keys.bucket == k_bucket)
        differences = [
            k[i] - k[j] for i in rows for j in rows if i < j and keys.example[i] == keys.example[j]
        ]
        reference = plain_cell(
            definition, q, queries.position.astype(float), queries.bucket, q_bucket, differences
        )
        assert got[0, 1, q_bucket, k_bucket] == pytest.approx(reference, abs=1e-10)


def test_the_head_is_weighted_by_queries_and_keys(small):
    head = analyse(small)[0]
    weights = [cell.n_queries * cell.n_keys for cell in head.cells]
    expected = np.average([cell.plasticity for cell in head.cells], weights=weights)
    assert head.ap_overall == pytest.approx(expected, abs=1e-14)
    plain = analyse(small, definition="linear-diagonal")[0]
    expected = np.mean([cell.plasticity for cell in plain.cells])
    assert plain.ap_overall == pytest.approx(expected, abs=1e-14)


def test_sampled_pairs_are_distinct_and_unbiased(small):
    everything, few = cells_of(small), cells_of(small, pairs=40)
    for cell, value in everything.items():
        assert few[cell] == pytest.approx(value, abs=0.2)
    counts = {c.n_pairs for c in analyse(small, pairs=40)[0].cells}
    assert counts == {40}
    enough = cells_of(small, pairs=10**6)
    assert enough == everything  # without replacement: asking for more than there is gives all


def test_sampling_without_replacement_lists_each_pair_once(small):
    from headwise.plasticity.key_pairs import pair_batches, sort_keys

    table_ = read_vectors(small / "l00h00k" / "data.parquet")
    keys = sort_keys(table_, np.ones(5))
    _, size = keys.passages_of(0)
    total = int((size * (size - 1) // 2).sum())

    def pair_set(limit, seed):
        batches = pair_batches(keys, 0, limit=limit, seed=[seed])
        rows = np.concatenate([batch.differences() for batch in batches])
        assert len(rows) == limit
        return {tuple(np.round(np.abs(row), 5)) for row in rows}

    every, seen = pair_set(total, 1), set()
    assert len(every) == total
    for seed in range(20):
        sampled = pair_set(total - 1, seed)  # all but one: drawn, not enumerated
        assert len(sampled) == total - 1
        seen |= sampled
    assert seen == every


def test_rotation_does_not_cancel_and_its_axis_is_beta():
    beta = np.array([1.0, 1e-9, -2e-9, 0.0])
    stable = reflect_onto(beta, public=False)
    assert np.allclose(reflection_axis(*stable), beta / np.linalg.norm(beta), atol=1e-15)
    basis = reflection_matrix(*stable)
    assert np.allclose(basis.T @ basis, np.eye(4), atol=1e-14)
    public = reflect_onto(np.array([0.3, 2.0, -1.0]), public=True)
    assert np.allclose(
        reflection_axis(*public), np.array([0.3, 2.0, -1.0]) / np.sqrt(5.09), atol=1e-15
    )
    assert np.linalg.det(reflection_matrix(*public)) == pytest.approx(-1)


# Uncertainty and normality


@pytest.mark.parametrize("definition", ["seed", "full", "empirical"])
def test_standard_errors_are_those_of_a_document_bootstrap(tmp_path, definition):
    rng = np.random.default_rng(2)
    root, resampled = tmp_path / "a", tmp_path / "b"
    columns = {}
    for name in ("l00h00q", "l00h00k"):
        documents = np.repeat(np.arange(40), 30)
        shift = rng.normal(size=(40, 5))[documents] * 0.3
        values = rng.normal(size=(1200, 5)) + shift + 0.4
        columns[name] = write_head(
            root, name, rng, rows=1200, vector=vectors(values), example_id=pa.array(documents)
        )
    (head,) = analyse(root, definition=definition)
    overall, draws = [], 60
    for _ in range(draws):
        chosen = rng.integers(0, 40, 40)
        for name, table_ in columns.items():
            rows = np.concatenate([np.arange(30) + 30 * document for document in chosen])
            taken = {key: value.take(pa.array(rows)) for key, value in table_.items()}
            taken["example_id"] = pa.array(np.repeat(np.arange(40), 30))
            write_head(resampled, name, rng, **taken)
        overall.append(analyse(resampled, definition=definition)[0].ap_overall)
    assert head.ap_se == pytest.approx(np.std(overall, ddof=1), rel=0.35)


def test_ks_distance_equals_scipys_and_lilliefors_is_calibrated():
    from scipy.stats import kstest

    rng = np.random.default_rng(0)
    for n in (3, 33, 64, 1001):
        z = np.sort(rng.standard_t(4, n))
        assert ks_distance(z) == pytest.approx(kstest(z, "norm").statistic, abs=1e-15)
    distance = [describe_sample(rng.normal(size=200))[2] for _ in range(3000)]
    p = lilliefors_p_values(np.array(distance), 200)
    assert np.mean(p < 0.05) == pytest.approx(0.05, abs=0.013)
    assert np.mean(p < 0.5) == pytest.approx(0.5, abs=0.03)


# Windows, layouts, grouping


def test_a_window_in_tokens_closes_far_buckets(tmp_path):
    got = {cell[2:] for cell in cells_of(DATA / "sliding" / "data") if cell[:2] == (0, 0)}
    assert got == {(b, c) for b in range(1, 8) for c in range(b) if b - c <= 2}  # 1024 = 2 x 512
    legacy = cells_of(DATA / "sliding" / "data", definition="linear-diagonal", legacy_columns=True)
    assert len([cell for cell in legacy if cell[:2] == (0, 0)]) == 28


def test_both_layouts_give_the_same(tmp_path, small):
    old = tmp_path / "root" / "Some_Model"
    shutil.copytree(small, old)
    (old.parent / "README.md").write_text("x")
    assert cells_of(old.parent) == cells_of(old) == cells_of(small)
    shutil.copytree(small, old.parent / "Other")
    with pytest.raises(ArtefactError, match="several models here: Other, Some_Model"):
        find_heads(old.parent)
    assert find_heads(old.parent, "Other").path.name == "Other"


def test_query_heads_share_their_groups_key_head():
    groups = group_heads(find_heads(DATA / "log" / "data"))
    assert [(g.layer, g.k_head, g.q_heads) for g in groups] == [(0, 0, (0, 1)), (0, 1, (2, 3))]
    with pytest.raises(SettingsError, match="num_q_heads=4 is not a multiple of num_k_heads=3"):
        group_heads(find_heads(DATA / "log" / "data"), num_q_heads=4, num_k_heads=3)


def test_a_sampled_capture_may_have_gaps(small):
    shutil.rmtree(small / "l00h00q")
    assert [g.q_heads for g in group_heads(find_heads(small))] == [(0, 1)]
    state = {"model_metadata": {"head_sampling_count": 1}}
    (small / "_saver_state.json").write_text(json.dumps(state))
    assert [g.q_heads for g in group_heads(find_heads(small))] == [(1,)]


def test_a_headwise_capture_says_what_it_holds(small):
    info = CaptureInfo(
        model=ModelInfo("org/model", "llama", "", 1, 4, 2, 5, 20, False, False, "rope", 100),
        texts=TextInfo("t", 1, ""),
        settings=CaptureSettings(),
        heads=("L0H1",),
        capture_point="",
        note="",
        versions={},
        finished=True,
    )
    info.save(small)
    folder = find_heads(small)
    assert folder.model == "org/model"
    assert [(g.k_head, g.q_heads) for g in group_heads(folder)] == [(0, (1,))]
    replace(info, finished=False).save(small)
    with pytest.raises(ArtefactError, match="the capture is not finished"):
        find_heads(small)
    body = load_artefact(small / "capture.json", "capture")
    save_artefact(small / "capture.json", "capture", body | {"heads": [3]})
    with pytest.raises(ArtefactError, match=r"heads\.0: Input should be a valid string"):
        find_heads(small)


def test_subsampling_keeps_the_drawn_order(small):
    path = small / "l00h00k" / "data.parquet"
    whole, part = read_vectors(path), read_vectors(path, max_rows=50, seed=7)
    rows = np.random.default_rng(7).choice(240, 50, replace=False)
    assert np.array_equal(part.vectors, whole.vectors[rows])
    assert np.array_equal(part.example, whole.example[rows])


# Runs


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_workers_and_resume_give_the_same_bytes(tmp_path):
    root, seen = DATA / "sliding" / "data", []
    one = measure_plasticity(root, out=tmp_path / "1", max_workers=1)
    measure_plasticity(root, out=tmp_path / "2", max_workers=2, progress=lambda *n: seen.append(n))
    assert seen[-1] == ("heads", 4, 4, "")
    assert not one.failures
    expected = outputs(tmp_path / "1")
    assert outputs(tmp_path / "2") == expected
    (tmp_path / "2" / ".heads" / "l01h00.json").unlink()
    (tmp_path / "2" / ".heads" / "l00h01.json").write_text('{"schema": "headw')
    seen.clear()
    measure_plasticity(
        root, out=tmp_path / "2", resume=True, progress=lambda *n: seen.append(n), max_workers=1
    )
    assert seen[0][1] == 3  # two were kept
    assert outputs(tmp_path / "2") == expected
    other = measure_plasticity(root, out=tmp_path / "2", resume=True, definition="full")
    assert other.heads != one.heads  # other settings: nothing is reused


def test_csv_columns_and_summary(tmp_path, small):
    result = measure_plasticity(small, out=tmp_path / "out")
    head = (tmp_path / "out" / "head_metrics.csv").read_text().splitlines()[0].split(",")
    documented = (
        "layer,q_head,k_head,n_q_tokens,n_k_tokens,d_model,q_R2_pos,q_R2_scalar,q_mae_baseline,"
        "q_mae_proj,q_mae_ratio,q_resid0_skew,q_resid0_kurt,q_resid0_ks_p,q_noise_med_abs_skew,"
        "q_noise_med_abs_kurt,q_noise_med_ks_p,q_noise_frac_ks_p_lt_alpha,ap_overall"
    )
    assert ",".join(head[:19]) == documented
    cells = (tmp_path / "out" / "head_bucket_plasticity.csv").read_text().splitlines()
    assert cells[0].startswith("layer,q_head,k_head,q_bucket,k_bucket,plasticity,n_pairs,")
    weights = table(tmp_path / "out" / "head_component_weights.csv")
    assert list(weights[0])[:5] == ["layer", "q_head", "k_head", "component", "weight"]
    assert sum(float(row["weight"]) for row in weights[:5]) == pytest.approx(1)
    summary = load_artefact(tmp_path / "out" / "plasticity.json", "plasticity")
    assert summary["maps"]["plasticity"] == [[row.ap_overall for row in result.heads]]
    pairs = np.array(summary["inter_key_distance"]["n_pairs"]).sum()
    assert pairs == sum(cell.n_pairs for head in result.heads for cell in head.cells)


def test_a_summary_is_read_back_and_a_damaged_one_is_refused(tmp_path, small):
    measure_plasticity(small, out=tmp_path)
    path = tmp_path / "plasticity.json"
    summary = PlasticitySummary.load(path)
    assert summary.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    kept = tmp_path / ".heads" / "l00h00.json"
    key, head = HeadRecord.load(kept)
    assert head.save(tmp_path / "head.json", key).read_bytes() == kept.read_bytes()
    body = load_artefact(path, "plasticity")
    save_artefact(path, "plasticity", body | {"maps": {"plasticity": [[0.5]]}})
    with pytest.raises(ArtefactError, match="no map plasticity_se"):
        PlasticitySummary.load(path)
    save_artefact(path, "plasticity", body | {"maps": {"plasticity": [["x"]]}})
    with pytest.raises(ArtefactError, match=r"maps.plasticity.0.0: Input should be a valid number"):
        PlasticitySummary.load(path)


def test_fifths_count_a_cell_where_its_queries_lie():
    cells = (Cell(1, 0, 0.8, 10, 40, 5, None, 15.0), Cell(2, 0, 0.2, 10, 20, 5, None, 25.0))
    fifths = {1: (30, 10, 0, 0, 0), 2: (0, 10, 0, 0, 10)}
    weighted = fifth_means(cells, fifths, weighted=True)
    assert weighted == [pytest.approx(0.8), pytest.approx(0.5), None, None, pytest.approx(0.2)]
    plain = fifth_means(cells, fifths, weighted=False)
    assert plain[1] == pytest.approx((0.25 * 0.8 + 0.5 * 0.2) / 0.75)


def test_the_drop_is_from_the_first_fifth_to_the_last(small):
    head = replace(analyse(small)[0], ap_quintile_1=0.8, ap_quintile_5=0.2)
    assert (head.ap_first_20pct, head.ap_last_20pct) == (0.8, 0.2)
    assert head.ap_drop == pytest.approx(0.6)
    assert replace(head, ap_quintile_5=None).ap_drop is None
    cells = (Cell(1, 0, 0.8, 10, 40, 5, None, 15.0), Cell(2, 0, None, 7, 20, 5, None, 25.0))
    assert (replace(head, cells=cells).n_cells, replace(head, cells=cells).n_pairs) == (1, 10)


def test_a_failed_head_is_told_and_the_rest_is_kept(tmp_path, small):
    rng = np.random.default_rng(0)
    broken = np.full((240, 5), np.nan)
    write_head(small, "l00h01q", rng, vector=vectors(broken))
    result = measure_plasticity(small, out=tmp_path / "out")
    assert [row.q_head for row in result.heads] == [0]
    (failure,) = result.failures
    assert (failure.layer, failure.q_head) == (0, 1)
    assert "NaN or infinity" in failure.reason
    write_head(small, "l00h01q", rng)
    again = measure_plasticity(small, out=tmp_path / "out", resume=True)
    assert len(again.heads) == 2
    assert not again.failures


@pytest.mark.slow  # three processes start, and one is killed
def test_a_killed_dask_worker_changes_nothing(tmp_path):
    distributed = pytest.importorskip("distributed")
    root = tmp_path / "data"
    for layer in range(6):
        for name in ("q", "k"):
            rng = np.random.default_rng(layer)
            write_head(root, f"l{layer:02d}h00{name}", rng, rows=6000, dim=16)
    expected = measure_plasticity(root, out=tmp_path / "here", max_workers=1)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        victims = list(client.run(lambda: __import__("os").getpid()).values())
        killed = []

        def kill_one(title: str, done: int, total: int, note: str) -> None:
            if not killed:
                killed.append(victims[0])
                __import__("os").kill(victims[0], signal.SIGKILL)

        result = measure_plasticity(
            root,
            out=tmp_path / "there",
            backend="dask",
            scheduler=cluster.scheduler_address,
            progress=kill_one,
        )
    assert killed
    assert not result.failures
    assert result.heads == expected.heads
    assert outputs(tmp_path / "there") == outputs(tmp_path / "here")


# Bad input


def failure_of(root: Path, **settings) -> str:
    folder = find_heads(root)
    given = PlasticitySettings(**settings)
    results = [r for group in group_heads(folder) for r in analyse_group(folder, group, given)]
    failed = [result for result in results if isinstance(result, HeadFailure)]
    assert failed
    return failed[0].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vector": pa.array(["x"] * 240)}, "column vector is string, expected a fixed-size list"),
        ({"position": pa.array(["x"] * 240)}, "column position is string, expected an integer"),
        ({"example_id": None}, "missing column example_id"),
        ({"vector": vectors(np.full((240, 5), np.inf))}, "NaN or infinity"),
        ({"bucket": pa.array([None] * 240, pa.int32())}, "column bucket holds nulls"),
        ({"sliding_window": pa.array([1, 2] * 120)}, "rows disagree about sliding_window: 1, 2"),
        ({"dim": 7}, "queries have 7 components, their keys 5"),
        ({"rows": 0, "vector": vectors(np.empty((0, 5)))}, "the file has no rows"),
    ],
)
def test_bad_files_are_told(small, changes, message):
    write_head(small, "l00h00q", np.random.default_rng(0), **changes)
    reason = failure_of(small)
    assert message in reason
    assert "l00h00q" in reason


def test_missing_and_cut_off_files_are_told(small):
    path = small / "l00h00k" / "data.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a readable Parquet file" in failure_of(small)
    path.unlink()
    assert "no vectors for l00h00k" in failure_of(small)
    with pytest.raises(ArtefactError, match="no captured heads here"):
        find_heads(small / "l00h00q")
    with pytest.raises(ArtefactError, match="no such folder"):
        find_heads(small / "nowhere")


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_one_key_a_group_gives_nan_cells(small, definition):
    write_head(small, "l00h00k", np.random.default_rng(0), example_id=pa.array(np.arange(240)))
    head = analyse(small, definition=definition)[0]
    assert [cell.plasticity for cell in head.cells] == [None] * len(head.cells)
    assert head.ap_overall is None


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_constant_positions_have_no_slope(small, definition):
    rng = np.random.default_rng(0)
    where = {"position": pa.array([350] * 240), "bucket": pa.array([3] * 240)}
    write_head(small, "l00h00q", rng, **where)
    head = analyse(small, definition=definition)[0]
    assert head.q_R2_pos == 0
    assert head.q_beta_norm == 0
    assert head.q_mae_ratio == 1
    assert np.isfinite(head.ap_overall)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_a_bucket_with_one_query_is_nan(small, definition):
    bucket = np.array([1] * 120 + [2] * 119 + [3])
    where = {"bucket": pa.array(bucket), "position": pa.array(bucket * 100 + 7)}
    write_head(small, "l00h00q", np.random.default_rng(0), **where)
    head = analyse(small, definition=definition)[0]
    for cell in head.cells:
        assert (cell.plasticity is None) == (cell.q_bucket == 3)
        assert (cell.n_queries == 1) == (cell.q_bucket == 3)


def test_settings_are_checked(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model_dir: x\nnum_layer: 3\n")
    with pytest.raises(SettingsError, match=r"unknown key 'num_layer'[\s\S]*mean 'num_layers'"):
        load_settings(path)
    path.write_text("p_alpha: 2\n")
    with pytest.raises(SettingsError, match="p_alpha: Input should be less than 1"):
        load_settings(path)
    path.write_text("model_dir: x\nnum_layers: 2\n")
    with pytest.raises(SettingsError, match="no data is named"):
        measure_plasticity(path, out=tmp_path)
    with pytest.raises(ArtefactError, match="no such file"):
        load_settings(tmp_path / "none.yaml")


def test_a_cluster_that_is_not_there_is_told(tmp_path, small):
    with pytest.raises(SettingsError, match="the dask backend needs a scheduler"):
        measure_plasticity(small, out=tmp_path / "out", backend="dask")


def test_options_come_as_the_command_line_gives_them(tmp_path, small):
    result = measure_plasticity(small, out=tmp_path / "out", pairs="7", heads="L0H1", seed=None)
    assert [row.q_head for row in result.heads] == [1]
    assert {cell.n_pairs for cell in result.heads[0].cells} == {7}


def test_a_config_names_heads_that_must_exist(tmp_path, small):
    shutil.rmtree(small / "l00h01q")
    config = small.parent / "c.yaml"
    config.write_text(
        "dataset_local_root: data\nnum_layers: 1\nnum_q_heads: 2\nnum_k_heads: 1\n"
        "output_csv: m.csv\ndefinition: full\n"
    )
    result = measure_plasticity(config, out=tmp_path / "out")
    assert "no vectors for l00h01q" in result.failures[0].reason
    assert (tmp_path / "out" / "m.csv").exists()


def test_shipped_configs_load():
    import headwise

    folder = Path(headwise.__file__).parent / "data" / "plasticity_configs"
    loaded = {path.stem: load_settings(path) for path in folder.glob("*.yaml")}
    assert len(loaded) >= 6
    assert loaded["smollm2-135m"].num_k_heads == 3


def test_a_bundled_configuration_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_settings("smollm2-135m").num_k_heads == 3
    with pytest.raises(SettingsError, match=r"no bundled configuration[\s\S]*smollm2-135m"):
        load_settings("smollm3")


def test_csv_settings_take_a_path_below_out_and_no_other(tmp_path, small):
    measure_plasticity(small, out=tmp_path / "out", component_csv="tables/deep/weights.csv")
    assert (tmp_path / "out" / "tables" / "deep" / "weights.csv").exists()
    for wrong in ("../weights.csv", "/tmp/weights.csv", "a/../../b.csv", "", "a\x1b.csv"):
        with pytest.raises(SettingsError, match="below --out"):
            measure_plasticity(small, out=tmp_path / "out", component_csv=wrong)


def test_all_pairs_that_were_sampled_are_told(tmp_path, small):
    whole = measure_plasticity(small, out=tmp_path / "1")
    assert "is a sample" not in whole.caps
    cut = measure_plasticity(small, out=tmp_path / "2", max_pairs=5)
    assert "--pairs all is a sample in" in cut.caps
    assert "is a sample" not in measure_plasticity(small, out=tmp_path / "3", pairs=5).caps


# Figures


def test_figures_are_drawn(tmp_path, small):
    from headwise.plasticity.figures import plasticity_figures, plot_before_and_after

    result = measure_plasticity(small, out=tmp_path / "out")
    paths = plasticity_figures(result, tmp_path / "figures")
    assert len(paths) == 10
    assert all(path.stat().st_size > 1000 for path in paths)
    summary = tmp_path / "out" / "plasticity.json"
    figure = plot_before_and_after(summary, summary)
    assert len(figure.axes) == 6  # two maps and their difference, each with its bar


def test_plasticity_is_drawn_from_0_to_1_for_captured_heads_under_the_models_own_name(
    tmp_path, small
):
    from dataclasses import replace

    from headwise.plasticity.figures import plasticity_figures, plot_buckets, plot_heads
    from headwise.plasticity.tables import head_map

    result = measure_plasticity(small, out=tmp_path / "out")
    (image,) = plot_buckets(result.heads, "m").axes[0].images
    assert image.get_clim() == (0, 1)  # 0.6325 to 0.6538 is one colour
    some = [head for head in result.heads if head.q_head]
    assert len(some) < len(result.heads)
    axes = plot_heads(head_map(some, "ap_overall"), "m").axes[0]
    assert axes.images[0].get_array().shape[1] == len({head.q_head for head in some})
    assert axes.get_xticklabels()[0].get_text() == str(min(head.q_head for head in some))
    named = replace(result, model="/a/long/way/to/tiny-one")
    svg = [path for path in plasticity_figures(named, tmp_path / "f") if path.suffix == ".svg"]
    for path in svg:
        assert "tiny-one" in path.read_text()
        assert "/a/long" not in path.read_text()
