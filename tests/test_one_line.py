"""Printing a value in a script gives one line that a person can read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conftest import tiny_language_model, tiny_tokenizer
from filmed import film_in
from headwise.diagnosis.survey import survey
from headwise.diagnosis.values import Diagnosis
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.proof.completed_texts import Completions
from headwise.proof.values import Comparison, Evaluation
from headwise.studies.summary import StudySummary
from headwise.surgery.operation import operate
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.values import RunSettings
from headwise.therapy.values import Therapy
from planned import plan_for
from reportstudy import build_study, triage_of


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """One value of each kind that a verb returns."""
    out = build_study(tmp_path_factory.mktemp("study"))
    run = out / "runs" / "surgery-s0"
    model = tiny_language_model("bloom")
    plan = SurgeryPlan.load(run / "plan.yaml")
    diagnosis = Diagnosis.load(out / "stock" / "diagnosis.json")
    found = [
        LoadedModel("/some/where/my-model", model, tiny_tokenizer()),
        operate(model, plan_for(model)),
        Patch({}),
        diagnosis,
        survey([diagnosis, diagnosis]),
        triage_of({"L3H6": "asleep"}),
        plan,
        Evaluation.load(out / "stock" / "evaluation.json"),
        Evaluation.load(run / "evaluation.json"),
        Comparison.load(run / "comparison.json"),
        Completions.load(out / "completions.json"),
        StudySummary.load(out / "summary.json"),
        RunSettings.load(run),
        Therapy("", plan, (), {}, ()),
        film_in(tmp_path_factory.mktemp("film")),
    ]
    return {f"{type(value).__name__} {place}": value for place, value in enumerate(found)}


def test_every_value_is_one_readable_line(values):
    for value in values.values():
        line = str(value)
        assert line.startswith(f"{type(value).__name__}(")
        assert "\n" not in line
        assert len(line) < 200, line
        assert "Mapping" not in line
        assert "=(" not in line  # no nested record
        assert "object at" not in line


def test_a_model_is_called_by_its_directory(values):
    loaded = values["LoadedModel 0"]
    assert repr(loaded) == "LoadedModel(my-model, bloom)"
    diagnosis = values["Diagnosis 3"]
    elsewhere = replace(diagnosis, model=replace(diagnosis.model, id="/a/long/way/to/tiny-one"))
    assert "/a/long" not in repr(elsewhere)
    assert "tiny-one" in repr(elsewhere)


def test_the_line_says_the_numbers_one_asks_for_first(values):
    diagnosis = values["Diagnosis 3"]
    assert f"{diagnosis.counts['sick']} of {diagnosis.counts['total']} heads sick" in str(diagnosis)
    comparison = values["Comparison 9"]
    change = next(iter(comparison.losses.values())).difference.value
    assert f"{change:+.4f}" in str(comparison)
