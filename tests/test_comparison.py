"""Comparison against hand-made cases and the published BLOOM maps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from headwise.artefacts import read_json
from headwise.diagnosis.bloom_maps import BLOOM, STOCK_MAPS, published_diagnosis
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.survey import read_diagnoses
from headwise.diagnosis.values import Diagnosis, diagnosis_from
from headwise.errors import ArtefactError
from headwise.heads import Head
from headwise.intervals import Interval, paired_interval
from headwise.models.values import ModelInfo, PatchInfo
from headwise.plasticity.settings import PlasticitySettings
from headwise.proof.compare import Snapshot, compare, paired_losses, read_snapshot
from headwise.proof.trajectories import (
    column_trends,
    run_maps,
    step_deltas,
    trajectory_shape,
    trend,
    two_phenomena,
)
from headwise.proof.values import (
    Comparison,
    DocumentLosses,
    Evaluation,
    HeadCosts,
    Recovery,
)
from headwise.proof.zones import drift_by_zone, transitions, zones_of
from headwise.provenance import MeasureSettings, Provenance, TextInfo
from headwise.surgery.plan import make_plan
from headwise.values import from_plain, to_plain
from reportstudy import plasticity_summary

# Targets of the paper's second pass (surgery/train_1b7_pass2.py, lines 80-95)
PASS2 = {
    7: [6],
    8: [4, 7, 8, 10],
    9: [3, 6, 7, 8],
    10: [3, 8],
    11: [3, 5, 9],
    12: [2, 4, 5, 8],
    13: [2],
    14: [4, 8, 12],
    15: [2, 3, 13],
    16: [3, 5, 6, 8],
    17: [4, 6, 15],
    18: [2, 4, 5, 6],
    19: [6],
    23: [12, 14],
}
PASS2_HEADS = {str(Head(layer, index)) for layer, found in PASS2.items() for index in found}


@pytest.fixture(scope="module")
def stock():
    return {d.model.id: d for d in read_diagnoses(STOCK_MAPS)}["1b7"]


@pytest.fixture(scope="module")
def plan(stock):
    return make_plan(stock, heads="L5-22H9-15 & sick")


@pytest.fixture(scope="module")
def after(stock):
    """Maps after epoch 3: stock plus the digitised change; operated heads by their annotation."""
    deltas = read_json(BLOOM / "bloom_1b7_delta_e3.json")
    return {
        name: published_diagnosis("1b7", stock.maps["first_token_mass"] + np.array(deltas[name]))
        for name in ("cur", "c4")
    }


@pytest.fixture(scope="module")
def compared(stock, plan, after):
    return {
        name: compare(Snapshot(stock), Snapshot(found), plan=plan).to_json()
        for name, found in after.items()
    }


def test_zones_of_the_paper_and_the_heads_in_them_that_can_move(compared):
    drift = compared["cur"]["drift"]
    assert {zone: drift[zone]["heads"] for zone in ("outside", "watched", "operated")} == {
        "outside": 258,
        "watched": 18,
        "operated": 108,
    }
    # L0-4 and the frozen heads of L5 lie below or in the lowest operated layer
    assert {zone: drift[zone]["movable"] for zone in ("outside", "watched", "operated")} == {
        "outside": 169,
        "watched": 13,
        "operated": 108,
    }


@pytest.mark.parametrize(
    ("corpus", "drifters", "mean", "watched"), [("cur", 76, 0.0426, 9), ("c4", 56, 0.0310, 5)]
)
def test_drift_outside_the_zone_is_the_papers(compared, corpus, drifters, mean, watched):
    """The maps were read back from colours: 0.003 a step, zero stored as 0.002."""
    drift = compared[corpus]["drift"]
    assert abs(drift["outside"]["drifting"] - drifters) <= 3
    assert drift["outside"]["mean_abs_delta"] == pytest.approx(mean, abs=0.0015)
    assert abs(drift["watched"]["drifting"] - watched) <= 1


def test_the_worst_head_of_c4_is_not_the_one_the_paper_prints(compared):
    worst = compared["c4"]["drift"]["outside"]["worst"]
    assert worst["head"] == "L20H7"
    assert worst["delta"] == pytest.approx(-0.32, abs=0.01)


def test_19_of_the_second_pass_targets_were_healthy_before_the_first(stock, plan, after):
    found = to_plain(transitions(stock, after["cur"], zones_of(stock.model, plan).operated))
    assert len(found["iatrogenic_untreated"]) == 19
    assert set(found["iatrogenic_untreated"]) <= PASS2_HEADS
    assert set(found["sick_untreated_after"]) == PASS2_HEADS - {"L18H5"}  # exactly 0.500 here
    lower = diagnosis_from(
        model=after["cur"].model,
        maps=after["cur"].maps,
        thresholds=Thresholds(sink=0.5 - 0.002),  # the resolution of the maps
    )
    outside = ~zones_of(stock.model, plan).operated
    sick = {str(Head(*map(int, at))) for at in np.argwhere(lower.sick & outside)}
    assert sick == PASS2_HEADS
    assert len(PASS2_HEADS) == 39


def test_31_untreated_sick_heads_and_11_healed_by_themselves(stock, plan, after):
    found = to_plain(transitions(stock, after["cur"], zones_of(stock.model, plan).operated))
    outside = ~zones_of(stock.model, plan).operated
    assert int((stock.sick & outside).sum()) == 31
    assert abs(len(found["self_healed"]) - 11) <= 1


def made(mass, *, texts="a", settings=None, **model):
    mass = np.array(mass, dtype=float)
    described = {
        "id": "made",
        "model_type": "llama",
        "fingerprint": "0",
        "num_layers": mass.shape[0],
        "num_heads": mass.shape[1],
        "num_kv_heads": mass.shape[1],
        "head_dim": 8,
        "hidden_size": 32,
        "qkv_bias": False,
        "output_bias": False,
        "positions": "rope",
        "num_parameters": 1000,
        **model,
    }
    info = TextInfo("made", 4, texts)
    provenance = Provenance(info, MeasureSettings(**(settings or {"max_length": 512})))
    return diagnosis_from(
        model=from_plain(ModelInfo, described, "test"),
        maps={"first_token_mass": mass},
        thresholds=Thresholds(),
        provenance=provenance,
    )


BEFORE = [[0.1, 0.7, 0.1], [0.1, 0.8, 0.6], [0.2, 0.96, 0.6]]
AFTER = [[0.1, 0.7, 0.1], [0.55, 0.1, 0.3], [0.2, 0.2, 0.99]]


@pytest.fixture(scope="module")
def small():
    before = made(BEFORE)
    plan = make_plan(before, heads="L1-2H1")
    return before, made(AFTER), plan


def test_transitions_tell_who_fell_ill_and_who_healed_untreated(small):
    before, after, plan = small
    found = compare(Snapshot(before), Snapshot(after), plan=plan).to_json()["transitions"]
    assert found["iatrogenic"] == found["iatrogenic_untreated"] == ["L1H0"]
    assert found["self_healed"] == ["L1H2"]
    assert found["treated_no_longer_sick"] == ["L1H1", "L2H1"]
    assert found["still_sick"] == ["L0H1", "L2H2"]
    assert found["sick_untreated_after"] == ["L0H1", "L1H0", "L2H2"]
    table = {(row["before"], row["after"]): row["heads"] for row in found["table"]}
    assert table == {
        ("dead", "healthy"): 1,
        ("healthy", "healthy"): 3,
        ("healthy", "sink"): 1,
        ("sink", "dead"): 1,
        ("sink", "healthy"): 2,
        ("sink", "sink"): 1,
    }
    assert sum(table.values()) == 9


def test_drift_counts_movable_heads_apart(small):
    before = small[0]
    plan = make_plan(before, heads="L1-2H1-2 & (L1H1, L2H1)")
    zones = zones_of(before.model, plan)
    assert zones.watched.sum() == 2  # L1H2 and L2H2: spelled out, not operated on
    assert zones.movable.tolist() == [[False] * 3, [False, True, False], [True] * 3]
    delta = np.array(AFTER) - np.array(BEFORE)
    drift = to_plain(drift_by_zone(delta, zones))
    assert drift["watched"] == {
        "heads": 2,
        "movable": 1,
        "drifting": 2,
        "mean_abs_delta": pytest.approx(0.345),
        "mean_abs_delta_movable": pytest.approx(0.39),
        "worst": {"head": "L2H2", "delta": pytest.approx(0.39)},
    }
    assert drift["outside"]["heads"] == 5
    assert drift["outside"]["movable"] == 1  # L2H0
    assert drift["outside"]["drifting"] == 1  # L1H0 (in the lowest layer: noise, and told so)


def test_a_drift_of_exactly_the_threshold_is_none():
    model = ModelInfo("m", "llama", "", 1, 2, 1, 5, 10, False, False, "rope", 100)
    zones = zones_of(model, None)
    drift = to_plain(drift_by_zone(np.array([[0.05, -0.050001]]), zones))
    assert drift["outside"]["drifting"] == 1
    assert drift["operated"]["mean_abs_delta"] is None
    assert drift["operated"]["worst"] is None


COLUMNS = {  # the paper's Fig. 7 and Table 7: mean |delta| at epochs 3, 6, 9, 12, 15
    "H15": ([0.083, 0.122, 0.136, 0.152, 0.154], "spreading"),
    "H13": ([0.046, 0.039, 0.073, 0.072, 0.070], "spreading"),
    "H9": ([0.034, 0.040, 0.045, 0.051, 0.051], "stable"),
    "H10": ([0.046, 0.055, 0.051, 0.043, 0.046], "stable"),
    "H12": ([0.007, 0.021, 0.023, 0.019, 0.019], "stable"),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_column_trends_are_table_7s(column):
    values, expected = COLUMNS[column]
    assert trend(values) == expected


def test_a_column_can_recover():
    assert trend([0.1, 0.05]) == "recovering"
    assert trend([0.1, 0.085]) == "stable"


def test_columns_average_the_watched_heads_of_an_index():
    watched = np.array([[True, False], [True, True], [False, False]])
    deltas = [
        (3, np.array([[0.1, 9], [-0.3, 0.0], [9, 9]])),
        (6, np.array([[0.2, 9], [-0.4, 0.01], [9, 9]])),
    ]
    found = to_plain(column_trends(deltas, watched))
    assert found["H0"]["mean_abs_delta"] == pytest.approx([0.2, 0.3])
    assert (found["H0"]["heads"], found["H0"]["trend"]) == (2, "spreading")
    assert (found["H1"]["steps"], found["H1"]["trend"]) == ([3, 6], "stable")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ([0.1, 0.2], "insufficient"),
        ([0.01, -0.02, 0.029], "stable"),
        ([0.0, 0.01, 0.04], "increasing"),
        ([0.0, -0.01, -0.05], "decreasing"),
        ([0.10, 0.11, 0.109, 0.12], "plateau"),
        ([0.0, 0.1, 0.0, 0.1], "oscillating"),
        ([0.0, 0.1, 0.05], "mixed"),
        ([0.0, 0.05, 0.05, 0.1], "mixed"),  # a step that stands still is no increase
    ],
)
def test_trajectory_shapes_follow_the_papers_rules(path, shape):
    assert trajectory_shape(path) == shape


def test_the_two_phenomena_are_read_at_matched_steps(small):
    before, _, plan = small
    zones = zones_of(before.model, plan)
    deltas = [(step, np.full((3, 3), 0.01 * step)) for step in range(10)]
    found = to_plain(two_phenomena(deltas, zones))
    assert (found["early"]["step"], found["late"]["step"]) == (2, 9)
    assert found["late_minus_early"]["outside"] == pytest.approx(0.07)
    assert found["late_minus_early"]["watched"] is None  # nothing is watched in this plan
    assert two_phenomena(deltas[:1], zones) is None


def test_checkpoints_of_a_run_become_columns_and_trajectories(small, tmp_path):
    before, after, _ = small
    plan = make_plan(before, heads="L1-2H1-2 & (L1H1, L2H1)")
    rows = [
        {"step": s, "first_token_mass": (np.array(BEFORE) + 0.02 * s).tolist()} for s in (0, 5, 9)
    ]
    (tmp_path / "maps.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = compare(
        Snapshot(before), Snapshot(after), plan=plan, checkpoints=run_maps(tmp_path)
    ).to_json()
    assert found["columns"]["H2"]["steps"] == [0, 5, 9]
    assert found["columns"]["H2"]["mean_abs_delta"] == pytest.approx([0, 0.1, 0.18])
    assert found["trajectories"] == {"L1H2": "increasing", "L2H2": "increasing"}


def test_a_comparison_survives_its_file(small, tmp_path):
    before, after, plan = small
    found = compare(Snapshot(before), Snapshot(after), plan=plan)
    path = found.save(tmp_path / "comparison.json")
    assert Comparison.load(path).to_json()["transitions"] == found.to_json()["transitions"]
    first = path.read_bytes()
    assert compare(Snapshot(before), Snapshot(after), plan=plan).save(path).read_bytes() == first
    assert Comparison.load(path).save(path).read_bytes() == first


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (made(np.zeros((3, 4))), "different models: num_heads is 3 and 4"),
        (made(np.zeros((2, 3))), "different models: num_layers is 3 and 2"),
        (made(AFTER, model_type="bloom"), "different models: model_type"),
        (made(AFTER, texts="b"), "measured on different text sets"),
        (made(AFTER, settings={"max_length": 64}), "measured with different settings"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(other, message):
    with pytest.raises(ArtefactError, match=message):
        compare(Snapshot(made(BEFORE)), Snapshot(other))


def test_a_plan_or_a_run_of_another_model_is_refused(small, stock, plan):
    before, after, _ = small
    with pytest.raises(ArtefactError, match="the plan do not belong together"):
        compare(Snapshot(before), Snapshot(after), plan=plan)
    with pytest.raises(ArtefactError, match=r"the run is for .* \(24, 16\)"):
        compare(
            Snapshot(before),
            Snapshot(after),
            checkpoints=[(0, stock.maps["first_token_mass"])],
        )


def evaluated(diagnosis, losses, *, sha="a", fingerprint="base", tokens=None, plan=None):
    tokens = tokens or tuple(10 * (place + 1) for place in range(len(losses)))
    loss = Interval(sum(losses) / sum(tokens), 0.0, 1.0)
    found = DocumentLosses(
        TextInfo("prose", len(losses), sha),
        loss,
        loss.exp(),
        sum(tokens),
        len(losses),
        tuple(losses),
        tuple(tokens),
    )
    evaluation = Evaluation(
        model=replace(diagnosis.model, fingerprint=fingerprint),
        patches=() if plan is None else (PatchInfo("made", plan.model_dump(mode="json")),),
        text_sets={"prose": found},
        diagnosis=diagnosis,
        heads=HeadCosts(4, {}, {}),
        recovery=Recovery({}, 1, 1, 1, 1, (), "a rule"),
        mlp_dormancy=None,
        provenance=Provenance(versions={}),
    )
    return Snapshot(diagnosis, evaluation)


def test_losses_are_paired_by_document(small):
    before, after, _ = small
    sums = np.arange(10.0, 90.0, 10.0)
    left = evaluated(before, sums.tolist())
    right = evaluated(after, (0.9 * sums).tolist())
    found = compare(left, right).to_json()
    assert found["losses"]["prose"]["difference"]["value"] == pytest.approx(-0.1)
    assert found["losses"]["prose"]["difference"]["high"] == pytest.approx(-0.1)
    assert found["losses"]["prose"]["verdict"] == "lower with 95% confidence"
    assert found["recovery"]["functional"] == 1
    moved = np.array([2.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -7.0])
    mixed = evaluated(after, (sums + moved).tolist())
    paired = paired_losses(left.evaluation, mixed.evaluation)["prose"]
    assert paired.difference == paired_interval(moved, sums)
    assert paired.verdict == "no difference shown"


def test_seven_documents_that_all_gain_are_no_verdict(small):
    before, after, _ = small
    sides = evaluated(before, [10.0] * 7), evaluated(after, [9.0] * 7)
    paired = compare(*sides).losses["prose"]
    assert paired.difference.value < 0 <= paired.difference.high
    assert "7" in paired.verdict
    assert "confidence" not in paired.verdict


def test_the_seed_moves_the_interval_and_nothing_else(small):
    before, after, _ = small
    draws = np.random.default_rng(0).exponential(5, (2, 30)).tolist()
    sides = evaluated(before, draws[0]), evaluated(after, draws[1])
    first, other = (compare(*sides, seed=seed).to_json() for seed in (0, 1))
    assert first == compare(*sides).to_json()
    left, right = (body["losses"]["prose"]["difference"] for body in (first, other))
    assert left["value"] == right["value"]
    assert (left["low"], left["high"]) != (right["low"], right["high"])
    assert other["provenance"]["settings"] == {"seed": 1}


def test_evaluations_of_other_bases_or_texts_are_refused(small):
    before, after, _ = small
    left = evaluated(before, [10.0, 20.0, 30.0, 40.0])
    with pytest.raises(ArtefactError, match="different base weights"):
        compare(left, evaluated(after, [1.0] * 4, fingerprint="other"))
    with pytest.raises(ArtefactError, match="text set 'prose' differs"):
        compare(left, evaluated(after, [1.0] * 4, sha="b"))


def test_snapshots_are_read_from_files_and_folders(small, tmp_path):
    before, _, _ = small
    before.save(tmp_path / "diagnosis.json")
    for path in (tmp_path, tmp_path / "diagnosis.json"):
        assert read_snapshot(path).diagnosis.counts == before.counts
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtefactError, match=r"no evaluation\.json or diagnosis\.json"):
        read_snapshot(tmp_path / "empty")
    other = tmp_path / "other.json"
    other.write_text('{"schema": "headwise.survey/1"}')
    with pytest.raises(ArtefactError, match="expected headwise"):
        read_snapshot(other)
    assert isinstance(Diagnosis.load(tmp_path / "diagnosis.json"), Diagnosis)


def plasticity(values, **settings):
    return plasticity_summary(values, PlasticitySettings(**settings))


def test_plasticity_change_is_by_head_and_zone_where_both_were_captured(small):
    before, after, plan = small
    left = plasticity([[0.5, 0.5, 0.5], [0.5, 0.4, 0.5], [0.5, None, 0.5]])
    right = plasticity([[0.5, 0.5, 0.5], [0.6, 0.7, 0.5], [0.5, 0.9, 0.5]])
    body = compare(Snapshot(before, None, left), Snapshot(after, None, right), plan=plan).to_json()
    found = body["plasticity"]
    assert found["delta"][1] == pytest.approx([0.1, 0.3, 0.0])
    assert found["delta"][2][1] is None  # not measured before
    assert found["mean_delta"]["operated"] == pytest.approx(0.3)
    outside = sum(found["mean_delta"][z] * n for z, n in zone_sizes(before, plan).items())
    assert outside == pytest.approx(0.1)
    alone = compare(Snapshot(before, None, left), Snapshot(after), plan=plan).to_json()
    assert alone["plasticity"] is None


def zone_sizes(diagnosis, plan):
    masks = zones_of(diagnosis.model, plan).named()
    return {z: int(masks[z].sum()) for z in ("watched", "outside") if masks[z].any()}


def test_plasticity_measured_otherwise_or_of_other_heads_is_refused(small):
    before, after, _ = small
    grid = [[0.5] * 3] * 3
    left = Snapshot(before, None, plasticity(grid, definition="seed"))
    with pytest.raises(ArtefactError, match="different settings"):
        compare(left, Snapshot(after, None, plasticity(grid, definition="full")))
    with pytest.raises(ArtefactError, match="plasticity maps of"):
        compare(left, Snapshot(after, None, plasticity(grid[:2], definition="seed")))


def test_a_folder_brings_its_plasticity_along(small, tmp_path):
    small[0].save(tmp_path / "diagnosis.json")
    assert read_snapshot(tmp_path).plasticity is None
    summary = plasticity([[0.5] * 3] * 3)
    summary.save(tmp_path / "plasticity" / "plasticity.json")
    assert read_snapshot(tmp_path).plasticity.maps == summary.maps
    assert read_snapshot(tmp_path / "diagnosis.json").plasticity is None  # a file is a file


def test_lora_can_move_every_head_of_its_lowest_layer(small):
    before, after, plan = small
    slices = zones_of(before.model, plan).movable
    assert slices.tolist() == [[False] * 3, [False, True, False], [True] * 3]
    found = compare(Snapshot(before), Snapshot(after), plan=plan, whole_layers=True).to_json()[
        "drift"
    ]
    assert found["outside"]["movable"] == 4  # not 2


def test_a_second_pass_is_told_from_the_untouched_model(tmp_path):
    folders = [tmp_path, tmp_path / "pass2"]
    folders[1].mkdir()
    for folder, base in zip(folders, (0.0, 0.3), strict=True):
        rows = [
            {"step": s, "first_token_mass": np.full((3, 3), base + 0.1 * (s + 1)).tolist()}
            for s in (-1, 0, 1)
        ]
        (folder / "maps.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    alone = step_deltas(run_maps(folders[1]), np.zeros((3, 3)))
    whole = step_deltas(run_maps(folders[1], tmp_path), np.zeros((3, 3)))
    assert [(step, float(delta[0, 0])) for step, delta in alone] == [
        (0, pytest.approx(0.1)),
        (1, pytest.approx(0.2)),
    ]
    assert [float(delta[0, 0]) for _, delta in whole] == pytest.approx([0.4, 0.5])


def test_one_document_decides_nothing(small):
    before, after, _ = small
    left, right = (evaluated(d, [9.0], tokens=(10,)) for d in (before, after))
    found = paired_losses(left.evaluation, right.evaluation)["prose"]
    assert "1 of at least 8" in found.verdict


def test_without_a_plan_the_patches_say_what_was_operated_on(small):
    before, after, plan = small
    left, right = evaluated(before, [10.0] * 4), evaluated(after, [9.0] * 4)
    assert compare(left, right).to_json()["plan"] is None
    right = evaluated(after, [9.0] * 4, plan=plan)
    found = compare(left, right).to_json()
    assert found["drift"]["operated"]["heads"] == 2
    assert found["transitions"]["treated_no_longer_sick"] == ["L1H1", "L2H1"]
