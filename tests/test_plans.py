"""Plans: what a selection means in a diagnosis, exact weight counts, and files people edit."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from conftest import tiny_model
from headwise.diagnosis.bloom_maps import STOCK_MAPS
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.survey import read_diagnoses
from headwise.diagnosis.values import diagnosis_from
from headwise.errors import ArtefactError, SelectionError, SettingsError
from headwise.heads import Head, format_heads
from headwise.models.description import describe_model
from headwise.surgery.operation import plan_spans
from headwise.surgery.plan import SurgeryPlan, make_plan, operated_groups
from headwise.values import to_plain
from planned import made_model, plan_for


def diagnosed(mass, num_kv_heads=None, entropy=None, positions="alibi"):
    mass = np.array(mass, dtype=float)
    kv_heads = num_kv_heads or mass.shape[1]
    model = made_model(*mass.shape, num_kv_heads=kv_heads, positions=positions)
    maps = {"first_token_mass": mass} | ({} if entropy is None else {"entropy": np.array(entropy)})
    return diagnosis_from(model=model, maps=maps, thresholds=Thresholds())


MASS = [  # H2 and H3 are the band; L0 is healthy, L1H0 a stray sink, L3H3 dead
    [0.1, 0.1, 0.2, 0.1],
    [0.6, 0.1, 0.7, 0.8],
    [0.1, 0.2, 0.3, 0.9],
    [0.1, 0.1, 0.7, 0.97],
]


@pytest.fixture(scope="module")
def diagnosis():
    return diagnosed(MASS)


@pytest.fixture(scope="module")
def bloom():
    return {d.model.id: d for d in read_diagnoses(STOCK_MAPS)}["1b7"]


@pytest.mark.parametrize(
    ("selection", "targets"),
    [
        ("sick", "L1H0,L1H2-3,L2H3,L3H2-3"),
        ("dead", "L3H3"),
        ("sink - L1", "L2H3,L3H2"),
        ("band", "L1-3H2-3"),
        ("band & sick", "L1H2-3,L2H3,L3H2-3"),
        ("band - sick", "L2H2"),
        ("all - dead", "L0-2H0-3,L3H0-2"),
        ("L1-2H1-3 & sick, L0H0", "L0H0,L1H2-3,L2H3"),
        ("healthy & H0", "L0H0,L2-3H0"),
        ("(sick, L0H1) - H3", "L0H1,L1H0,L1H2,L3H2"),
        ("first_token_mass > 0.75 & layer >= 2", "L2-3H3"),
        ("first_token_mass>=0.97, head < 1 & layer <= 0", "L0H0,L3H3"),
        ("sick - first_token_mass < 8e-1", "L1H3,L2H3,L3H3"),
    ],
)
def test_a_selection_means_what_its_words_say(diagnosis, selection, targets):
    plan = make_plan(diagnosis, heads=selection)
    expected = {
        Head(layer, index)
        for part in targets.split(",")
        for layer in _span(part[1:].split("H")[0])
        for index in _span(part.split("H")[1])
    }
    assert set(plan.target_heads) == expected
    assert plan.selection == selection


def _span(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_low_entropy_is_a_word_of_its_own_and_not_sick():
    entropy = np.full((4, 4), 2.0)
    entropy[0, 0] = 0.1
    diagnosis = diagnosed(MASS, entropy=entropy)
    assert make_plan(diagnosis, heads="low_entropy").targets == "L0H0"
    assert Head(0, 0) not in make_plan(diagnosis, heads="sick").target_heads
    assert Head(0, 0) not in make_plan(diagnosis, heads="sick").healthy_heads


def test_pass1_operates_on_the_sick_heads_of_the_band_and_watches_the_rest_of_it(diagnosis):
    plan = make_plan(diagnosis, preset="pass1")
    assert plan.target_heads == [Head(1, 2), Head(1, 3), Head(2, 3), Head(3, 2), Head(3, 3)]
    assert plan.watched_heads == [Head(2, 2)]
    assert set(plan.healthy_heads).isdisjoint(plan.target_heads)
    assert Head(1, 0) not in plan.healthy_heads  # sick, though not operated on


def test_pass2_operates_on_all_sick_heads_and_watches_none(diagnosis):
    plan = make_plan(diagnosis, preset="pass2")
    assert plan.target_heads == diagnosis.head_sets()["sick"]
    assert plan.watched_heads == []


def test_column_adds_a_whole_head_index_with_its_healthy_heads(diagnosis):
    plan = make_plan(diagnosis, preset="column", column=1)
    assert {Head(layer, 1) for layer in (1, 2, 3)} <= set(plan.target_heads)
    assert Head(0, 1) not in plan.target_heads  # above the first sick layer only
    assert set(make_plan(diagnosis, preset="pass1").target_heads) < set(plan.target_heads)
    with pytest.raises(SelectionError, match="--column 5"):
        make_plan(diagnosis, preset="column")


def test_the_published_1b7_map_gives_the_papers_plan(bloom):
    plan = make_plan(bloom, heads="L5-22H9-15 & sick")
    assert len(plan.target_heads) == 108
    assert len(plan.watched_heads) == 18
    per_layer = [sum(h.layer == layer for h in plan.target_heads) for layer in range(5, 23)]
    assert per_layer == [2, 7, 6, 5, 7, 7, 6, 7, 7, 6, 5, 6, 6, 7, 7, 7, 5, 5]
    assert plan.summary.trainable_weights == 113_287_680
    assert bloom.model.num_parameters == 1_722_408_960
    assert round(100 * plan.summary.trainable_share, 2) == 6.58
    assert plan.summary.lowest_layer == 5
    assert plan.summary.training_state_bytes == 113_287_680 * 16


def test_the_h5_experiment_is_126_heads(bloom):
    plan = make_plan(bloom, heads="(L5-22H9-15 & sick), L5-22H5")
    assert len(plan.target_heads) == 126
    assert sum(bloom.classes[h.layer][h.index] == "healthy" for h in plan.target_heads) == 14


@pytest.mark.parametrize(
    ("heads", "policy", "groups"),
    [
        ("L0H0-1", "whole-group", [(0, 0)]),
        ("L0H0", "whole-group", []),
        ("L0H0-3", "whole-group", [(0, 0), (0, 1)]),
        ("L0H1-2", "whole-group", []),
        ("L0H0-1,L1H1-3", "whole-group", [(0, 0), (1, 1)]),
        ("L0H0-3", "queries-only", []),
    ],
)
def test_keys_and_values_belong_to_the_plan_only_with_their_whole_group(heads, policy, groups):
    diagnosis = diagnosed(MASS, num_kv_heads=2)
    plan = make_plan(diagnosis, heads=heads, kv_policy=policy)
    assert plan.kv_groups() == groups
    touched, targets = 2 * len(groups), len(plan.target_heads)
    assert plan.summary.kv_note.startswith(f"{touched} of {targets} targets")
    row = 8 * 32
    assert plan.summary.trainable_weights == targets * 2 * row + len(groups) * 2 * row


def test_without_groups_every_head_owns_its_keys(diagnosis):
    plan = make_plan(diagnosis, heads="L0H1")
    assert plan.kv_groups() == [(0, 1)]
    assert plan.summary.kv_note is None
    assert "kv_note" not in to_plain(plan.summary)
    assert operated_groups([Head(0, 1)], 1, "queries-only") == []


@pytest.mark.parametrize("name", ["bloom", "llama", "gpt2", "qwen2", "falcon-mqa", "qwen3"])
@pytest.mark.parametrize("policy", ["whole-group", "queries-only"])
def test_the_stated_weights_are_the_weights_of_the_slices(name, policy):
    model = tiny_model(name)
    described = describe_model(model)
    mass = np.zeros(described.shape)
    mass[0, :3], mass[1, :] = 0.8, 0.8
    diagnosis = diagnosis_from(
        model=described, maps={"first_token_mass": mass}, thresholds=Thresholds()
    )
    plan = make_plan(diagnosis, heads="sick", kv_policy=policy)
    spans = plan_spans(model, plan)
    counted = sum(span.of(model).numel() for span in spans.values())
    assert plan.summary.trainable_weights == counted


def test_a_plan_survives_its_file(bloom, tmp_path):
    plan = make_plan(bloom, heads="L5-22H9-15 & sick", init="match-healthy", seed=3)
    path = plan.save(tmp_path / "plan.yaml")
    assert SurgeryPlan.load(path) == plan
    body = yaml.safe_load(path.read_text())
    assert next(iter(body)) == "schema"
    assert body["schema"] == "headwise.plan/1"
    before = path.read_bytes()
    assert SurgeryPlan.load(path).save(path).read_bytes() == before


def edited(tmp_path, plan, **changes):
    path = plan.save(tmp_path / "plan.yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    return path


def test_an_edited_plan_is_read_as_edited(diagnosis, tmp_path):
    plan = make_plan(diagnosis, heads="L1H2")
    assert SurgeryPlan.load(edited(tmp_path, plan, targets="L1-2H3")).target_heads == [
        Head(1, 3),
        Head(2, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compensat": "mean"}, "unknown key 'compensat', did you mean 'compensate'"),
        ({"init": "xavier"}, "init: Input should be 'xavier_normal'"),
        ({"seed": "many"}, "seed: Input should be a valid integer"),
    ],
)
def test_a_wrong_key_or_value_in_a_plan_is_named(diagnosis, tmp_path, changes, message):
    path = edited(tmp_path, make_plan(diagnosis, heads="sick"), **changes)
    with pytest.raises(SettingsError, match=message):
        SurgeryPlan.load(path)


@pytest.mark.parametrize("targets", ["L9H0", "L0H7", "sick", "L1Hx"])
def test_a_wrong_selection_in_a_plan_file_is_told_when_it_is_read(diagnosis, tmp_path, targets):
    path = edited(tmp_path, make_plan(diagnosis, heads="sick"), targets=targets)
    with pytest.raises(SelectionError, match=targets[:3]):
        SurgeryPlan.load(path)


def test_a_plan_without_targets_has_none_to_operate_on(diagnosis, tmp_path):
    path = edited(tmp_path, make_plan(diagnosis, heads="sick"), targets="")
    assert SurgeryPlan.load(path).target_heads == []


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("schema: headwise.plan/9\n", ArtefactError, "expected schema headwise.plan/1"),
        ("- a\n- list\n", SettingsError, "not a YAML mapping"),
        ("schema: [unclosed\n", SettingsError, "not readable as YAML"),
    ],
)
def test_other_files_are_not_plans(tmp_path, content, error, message):
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(error, match=message):
        SurgeryPlan.load(path)
    with pytest.raises(ArtefactError, match="no such file"):
        SurgeryPlan.load(tmp_path / "missing.yaml")


def test_a_selection_without_heads_is_an_error_with_the_counts(diagnosis):
    with pytest.raises(SelectionError, match="no head matches 'dead & L0'") as caught:
        make_plan(diagnosis, heads="dead & L0")
    assert "6 sick heads" in str(caught.value)
    with pytest.raises(SelectionError, match="--preset pass1"):
        make_plan(diagnosis)
    with pytest.raises(SelectionError, match="'unwell' is not known"):
        make_plan(diagnosis, heads="unwell")


def test_a_healthy_model_has_nothing_for_the_presets():
    diagnosis = diagnosed(np.full((2, 4), 0.1))
    for preset in ("pass1", "pass2"):
        with pytest.raises(SelectionError, match="no head matches"):
            make_plan(diagnosis, preset=preset)
    with pytest.raises(SelectionError, match="no sick layer"):
        make_plan(diagnosis, preset="column", column=1)


def test_plans_name_heads_in_the_shortest_way(diagnosis):
    plan = make_plan(diagnosis, heads="L1-3H2-3")
    assert plan.targets == "L1-3H2-3" == format_heads(plan.target_heads)
    assert plan_for(tiny_model("bloom"), "L0H0").healthy == "L0H1-3,L1H0-3"


@pytest.mark.parametrize("selection", ["band & sick", "band"])
def test_a_band_is_refused_where_an_index_has_no_slope(selection):
    with pytest.raises(SelectionError, match="rope positions"):
        make_plan(diagnosed(MASS, positions="rope"), heads=selection)


def test_without_alibi_the_first_pass_takes_what_is_sick_and_watches_nothing():
    plan = make_plan(diagnosed(MASS, positions="rope"), preset="pass1")
    assert (plan.targets, plan.watched) == ("L1H0,L1H2-3,L2H3,L3H2-3", "")


def test_an_ablation_cost_selects_and_an_unmeasured_head_is_not_chosen(diagnosis):
    costs = np.full((4, 4), np.nan)
    costs[1] = [0.0, 0.5, 0.0005, 0.002]
    plan = make_plan(diagnosis, heads="ablation_cost < 0.001", measures={"ablation_cost": costs})
    assert plan.targets == "L1H0,L1H2"
    with pytest.raises(SelectionError, match="no measure that is known here"):
        make_plan(diagnosis, heads="ablation_cost < 0.001")


def test_a_selection_has_limits(diagnosis):
    with pytest.raises(SelectionError, match="parentheses within each other"):
        make_plan(diagnosis, heads="(" * 60 + "sick" + ")" * 60)
    with pytest.raises(SelectionError, match="more than 100,000 characters"):
        make_plan(diagnosis, heads="sick," * 30_000 + "sick")


def test_nobody_is_advised_to_operate_on_every_head():
    with pytest.raises(SelectionError, match="leave a healthy model alone"):
        make_plan(diagnosed(np.zeros((2, 4))), heads="sick")
