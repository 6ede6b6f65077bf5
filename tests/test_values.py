"""Values and JSON: what does not fit is told by field, what fits comes back to the last bit."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest

from headwise.diagnosis.bloom_maps import STOCK_MAPS
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import Diagnosis, Pooled, Profile, SinkRate, diagnosis_from
from headwise.errors import ArtefactError
from headwise.intervals import Interval
from headwise.proof.compare import Snapshot, compare
from headwise.proof.values import Comparison, HeadRecovery
from headwise.surgery.plan import make_plan
from headwise.values import from_plain, to_plain
from planned import made_model

MASS = [[0.1, 0.7, 0.1, 0.6], [0.2, 0.96, 0.6, 0.3]]


def diagnosed(**changes):
    return diagnosis_from(
        model=made_model(2, 4),
        maps={"first_token_mass": np.array(MASS), "entropy": np.full((2, 4), 2.0)},
        thresholds=Thresholds(),
        **changes,
    )


@pytest.fixture(scope="module")
def whole():
    """A diagnosis with every section."""
    edges = ((0, 1), (1, 2))
    return diagnosed(
        spread={"entropy": np.zeros((2, 4))},
        profile=Profile(*edges, (5, 5), np.full((2, 4, 2), 0.5)),
        pooled=Pooled(*edges, np.full((2, 4, 2, 2), 0.25)),
        sink_rate=SinkRate(0.3, 0.5),
    )


def damaged(body, place, value):
    """The body with another value at a dotted place, or without it if the value is `...`."""
    body = copy.deepcopy(body)
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    inner = body
    for part in path:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return body


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("model", ..., r"^model: Field required"),
        ("model.num_heads", ..., r"^model\.num_heads: Field required"),
        ("maps.first_token_mass", ..., "maps: first_token_mass is missing"),
        ("profile.bucket_start", ..., r"^profile\.bucket_start: Field required"),
        ("model.num_layers", "2", r"^model\.num_layers: Input should be a valid integer"),
        ("model.num_layers", 2.5, r"^model\.num_layers: Input should be a valid integer"),
        ("model.id", 7, r"^model\.id: Input should be a valid string"),
        ("thresholds", [0.5], r"^thresholds: Input should be an object"),
        ("thresholds.sink", "0.5", r"^thresholds\.sink: Input should be a valid number"),
        ("thresholds.sink", float("nan"), r"^thresholds\.sink: Input should be a finite number"),
        ("sink_rate.value", float("inf"), r"^sink_rate\.value: Input should be a finite number"),
        ("maps.entropy.0.1", float("nan"), r"^maps\.entropy: .* finite numbers with 2 axes"),
        ("maps.entropy.0.1", -float("inf"), r"^maps\.entropy: .* finite numbers with 2 axes"),
        ("maps.entropy.0.1", None, r"^maps\.entropy: .* finite numbers"),
        ("maps.entropy.0.1", "0.5", r"^maps\.entropy: .* finite numbers"),
        ("maps.entropy.1", [0.5], r"^maps\.entropy: .* finite numbers"),
        ("maps.entropy", [0.5, 0.5], r"^maps\.entropy: .* with 2 axes"),
        ("maps.entropy", [[0.5] * 4] * 3, r"maps: \(3, 4\) heads, the model has \(2, 4\)"),
        ("spread.entropy", [[0.5] * 3] * 2, r"spread: \(2, 3\) heads, the model has \(2, 4\)"),
        ("profile.first_token_mass", [[[1.0]] * 3] * 2, r"profile: \(2, 3\) heads"),
        ("pooled.maps", [[[[1.0]]] * 4], r"pooled: \(1, 4\) heads"),
        ("pooled.maps", [[1.0]], r"^pooled\.maps: .* with 4 axes"),
        ("classes.0.2", "zombie", r"^classes\.0\.2: Input should be 'healthy'"),
        ("classes.1", ["dead"], r"classes: \(2, 1\) heads"),
        ("classes", [], r"classes: \(0, 0\) heads"),
        ("model.num_kv_heads", 0, r"^model\.num_kv_heads: .* greater than or equal to 1"),
        ("model.num_kv_heads", 3, r"^model: .* 4 heads cannot share 3"),
        ("model.num_heads", 10**9, r"^model\.num_heads: .* less than or equal to 100000"),
        ("model.num_layers", -1, r"^model\.num_layers: .* greater than or equal to 1"),
    ],
)
def test_a_damaged_diagnosis_is_told_by_field(whole, tmp_path, place, value, message):
    path = tmp_path / "diagnosis.json"
    body = {"schema": "headwise.diagnosis/1", **damaged(whole.to_json(), place, value)}
    path.write_text(json.dumps(body))  # json writes NaN and Infinity, as other programs do
    with pytest.raises(ArtefactError, match=message) as caught:
        Diagnosis.load(path)
    what, where, fix = str(caught.value).splitlines()
    assert place.split(".")[0] in what
    assert where == f"  where  {path}"
    assert fix.startswith("  fix    write it again")


def test_a_value_that_its_own_check_refuses_names_the_file(whole, tmp_path):
    path = tmp_path / "diagnosis.json"
    body = {"schema": "headwise.diagnosis/1", **damaged(whole.to_json(), "thresholds.sink", 2.0)}
    path.write_text(json.dumps(body))
    with pytest.raises(ArtefactError, match=r"where  .*diagnosis\.json"):
        Diagnosis.load(path)


def test_further_faults_are_counted(whole):
    body = damaged(damaged(whole.to_json(), "model.id", 7), "classes.0.2", "zombie")
    with pytest.raises(ArtefactError, match=r"and 1 more faults?\)"):
        Diagnosis.from_json(body)


@pytest.mark.parametrize("wrong", [None, [], "text", 3])
def test_what_is_no_object_is_refused(wrong):
    with pytest.raises(ArtefactError, match="the file: Input should be an object"):
        from_plain(Diagnosis, wrong, "test")


@pytest.fixture(scope="module")
def comparison():
    before = diagnosed()
    return compare(Snapshot(before), Snapshot(before), plan=make_plan(before, heads="L1H1"))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("delta.entropy", [[0.0] * 4] * 3, r"delta: maps must have the model's shape \(2, 4\)"),
        ("delta.entropy.0.0", float("nan"), r"^delta\.entropy: .* finite"),
        (
            "drift.outside.mean_abs_delta",
            float("nan"),
            r"^drift\.outside\.mean_abs_delta: .*finite",
        ),
        ("drift.watched", ..., r"^drift\.watched: Field required"),
        ("transitions.table.0.after", "zombie", r"^transitions\.table\.0\.after: .* 'healthy'"),
        ("plan.seed", "many", r"^plan\.seed: Input should be a valid integer"),
        ("plan.targts", "L0H0", r"^plan\.targts: Extra inputs are not permitted"),
        ("provenance.before", None, r"^provenance\.before: Input should be an object"),
    ],
)
def test_a_damaged_comparison_is_told_by_field(comparison, tmp_path, place, value, message):
    body = {"schema": "headwise.comparison/1", **damaged(comparison.to_json(), place, value)}
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(body))
    with pytest.raises(ArtefactError, match=message):
        Comparison.load(path)


def test_an_interval_that_is_not_finite_is_refused():
    with pytest.raises(ArtefactError, match=r"^high: Input should be a finite number"):
        from_plain(Interval, {"value": 0.0, "low": 0.0, "high": float("inf")}, "test")


def test_saved_loaded_and_saved_again_gives_the_same_bytes(whole, comparison, tmp_path):
    for number, found in enumerate((whole, diagnosed(), comparison)):
        first = found.save(tmp_path / f"{number}.json")
        again = type(found).load(first).save(tmp_path / f"{number}-again.json")
        assert again.read_bytes() == first.read_bytes()


def test_sections_that_a_published_map_lacks_are_empty_objects():
    body = diagnosed().to_json()
    assert body["profile"] == body["pooled"] == body["sink_rate"] == {}
    found = Diagnosis.from_json(body)
    assert found.profile is found.pooled is found.sink_rate is None


def test_every_float_comes_back_to_the_last_bit(tmp_path):
    generator = np.random.default_rng(0)
    values = generator.random((100, 40)) * 10.0 ** generator.integers(-300, 300, (100, 40))
    found = Diagnosis(
        made_model(100, 40),
        {"first_token_mass": np.zeros((100, 40)), "entropy": values},
        classes=(("healthy",) * 40,) * 100,
    )
    again = Diagnosis.load(found.save(tmp_path / "diagnosis.json"))
    assert np.array_equal(again.maps["entropy"], values)


def test_a_word_of_python_is_written_without_its_underscore():
    body = to_plain(HeadRecovery("sink", True, None, False))
    assert body == {"class": "sink", "sick": True, "useful": None, "functional": False}
    assert from_plain(HeadRecovery, body, "test").class_ == "sink"


VALUES = [
    "diagnosis.values",
    "diagnosis.survey",
    "diagnosis.bloom_maps",
    "surgery.plan",
    "surgery.recipe",
    "surgery.settings",
    "surgery.values",
    "therapy.values",
    "proof.values",
    "proof.compare",
    "proof.zones",
    "proof.trajectories",
    "studies.study",
    "studies.summary",
]


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"headwise.{name}")
    assert "torch" not in sys.modules, f"{name} imports torch"
"""


@pytest.mark.parametrize("names", [VALUES, ["report.write"]], ids=["values", "report"])
def test_values_are_read_without_torch(names):
    done = run(IMPORTS, *names)
    assert done.returncode == 0, done.stderr


VERB = """
import sys
from headwise.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize("verb", ["plan", "compare", "survey", "report"])
def test_verbs_on_files_alone_do_not_load_torch(whole, tmp_path, verb):
    path = whole.save(tmp_path / "diagnosis.json")
    arguments = {
        "plan": [path, "--heads", "sick"],
        "compare": [path, path],
        "survey": [path, STOCK_MAPS],
        "report": [tmp_path],
    }[verb]
    done = run(VERB, verb, *arguments, "--out", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").iterdir())


def test_a_new_study_is_written_without_torch(tmp_path):
    done = run(VERB, "study", "--init", "some/model", tmp_path / "s.yaml")
    assert done.returncode == 0, done.stderr


def test_a_plan_whose_summary_is_empty_is_read(tmp_path):
    from headwise.surgery.plan import SurgeryPlan

    path = make_plan(diagnosed(), heads="sick").save(tmp_path / "plan.yaml")
    head, _, _ = path.read_text().partition("summary:")
    path.write_text(head + "summary: {}\n")
    assert SurgeryPlan.load(path).summary is None
