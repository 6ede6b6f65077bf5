"""Whose numbers: whatever is read beside something else is of the same model, patch and seed.

The matrix puts every artefact of one run beside every other that some verb reads together with it.
All of these are refused with both names, or (where a default only looked nearby) not taken.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from conftest import tiny_language_model
from filmed import film_in
from headwise.artefacts import save_artefact
from headwise.cli import app
from headwise.errors import ArtefactError
from headwise.handover.adapter import export_peft
from headwise.handover.merging import apply_patches
from headwise.handover.push import push
from headwise.models.loading import load_model
from headwise.proof.compare import compare, read_snapshot
from headwise.proof.completed_texts import Completions
from headwise.proof.values import Evaluation
from headwise.report.source import read_source
from headwise.studies.summary import StudySummary
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.values import RunSettings
from headwise.therapy.values import Therapy
from headwise.values import to_plain
from headwise.watch.film import resumed_film
from reportstudy import (
    build_study,
    diagnosis_of,
    plasticity_summary,
    pruned_of,
    stock_mass,
    triage_of,
)
from test_handover import folder_of, patch_of, released

APART = "do not belong together"
RUNS = ("surgery-s1", "sham-s0", "sham-s1", "gradient-only-s0")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return build_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def other_base(tmp_path_factory, study):
    """The study's stock evaluation and diagnosis, of other weights."""
    folder = tmp_path_factory.mktemp("other")
    found = Evaluation.load(study / "stock" / "evaluation.json")
    model = replace(found.model, id="other/model", fingerprint="0" * 64)
    diagnosis = replace(found.diagnosis, model=model)
    replace(found, model=model, diagnosis=diagnosis).save(folder / "evaluation.json")
    diagnosis.save(folder / "diagnosis.json")
    replace(triage_of({"L3H6": "asleep"}), diagnosis=diagnosis).save(folder / "triage.json")
    read = Completions.load(study / "completions.json")
    replace(read, provenance=replace(read.provenance, model=model)).save(
        folder / "completions.json"
    )
    return folder


def unjudged(study, name, folder):
    """A run as `repair` leaves it: no evaluation yet."""
    shutil.copytree(study / "runs" / name, folder)
    (folder / "evaluation.json").unlink()
    (folder / "comparison.json").unlink()
    return folder


PAIRS = [(run, other) for run in RUNS for other in RUNS if run != other]


@pytest.mark.parametrize(("run", "other"), PAIRS)
@pytest.mark.parametrize("artefact", ["evaluation.json", "comparison.json"])
def test_an_artefact_of_another_run_in_a_run_is_refused(study, tmp_path, run, other, artefact):
    folder = tmp_path / run
    shutil.copytree(study / "runs" / run, folder)
    read_source(folder)
    shutil.copy(study / "runs" / other / artefact, folder / artefact)
    with pytest.raises(ArtefactError, match=APART) as caught:
        read_source(folder)
    assert "run.json" in str(caught.value)
    assert artefact in str(caught.value)


@pytest.mark.parametrize(("run", "other"), PAIRS)
def test_a_run_is_reported_with_its_own_evaluation_or_with_none(study, tmp_path, run, other):
    """The sham's page showed the surgery's numbers, because `out/after` lay beside it."""
    folder = unjudged(study, run, tmp_path / run)
    shutil.copytree(study / "runs" / other, tmp_path / "after")
    shutil.copytree(study / "stock", tmp_path / "before")
    assert read_source(folder).runs[0].evaluation is None
    with pytest.raises(ArtefactError, match=APART):
        read_source(folder, after=tmp_path / "after")
    shutil.rmtree(tmp_path / "after")
    shutil.copytree(study / "runs" / run, tmp_path / "after")
    assert read_source(folder).against_stock(read_source(folder).arms()[0]) is not None


def test_swapped_sides_are_refused(study, tmp_path):
    run = unjudged(study, "sham-s0", tmp_path / "run")
    stock, after = study / "stock", study / "runs" / "sham-s0"
    read_source(run, before=stock, after=after)
    for swapped in ({"before": after}, {"after": stock}, {"before": after, "after": stock}):
        with pytest.raises(ArtefactError, match=APART):
            read_source(run, **swapped)
    with pytest.raises(ArtefactError, match="swapped"):
        compare(read_snapshot(after), read_snapshot(stock))


def test_evaluations_of_other_weights_are_refused(study, other_base, tmp_path):
    run = unjudged(study, "sham-s0", tmp_path / "run")
    with pytest.raises(ArtefactError, match=APART):
        read_source(run, before=other_base)
    with pytest.raises(ArtefactError, match=APART):
        compare(read_snapshot(other_base), read_snapshot(study / "runs" / "sham-s0"))
    shutil.copytree(other_base, tmp_path / "before")
    shutil.copytree(study / "runs" / "sham-s0", tmp_path / "after")
    assert read_source(run).stock is None


@pytest.mark.parametrize("artefact", ["evaluation.json", "diagnosis.json", "completions.json"])
def test_an_artefact_of_other_weights_in_a_study_is_refused(study, other_base, tmp_path, artefact):
    part = tmp_path / "study"
    shutil.copytree(study, part)
    where = part if artefact == "completions.json" else part / "stock"
    shutil.copy(other_base / artefact, where / artefact)
    with pytest.raises(ArtefactError, match=APART):
        read_source(part)


@pytest.mark.parametrize("artefact", ["evaluation.json", "comparison.json", "run.json"])
def test_an_artefact_of_another_seed_in_a_study_is_refused(study, tmp_path, artefact):
    part = tmp_path / "study"
    shutil.copytree(study, part)
    shutil.copy(part / "runs" / "sham-s1" / artefact, part / "runs" / "sham-s0" / artefact)
    with pytest.raises(ArtefactError, match=APART):
        read_source(part)


def test_a_triage_of_other_weights_is_refused_or_not_taken(study, other_base, tmp_path):
    diagnosis_of(stock_mass()).save(tmp_path / "d" / "diagnosis.json")
    with pytest.raises(ArtefactError, match=APART):
        read_source(tmp_path / "d", triage=other_base)
    shutil.copy(other_base / "triage.json", tmp_path / "d" / "triage.json")
    assert read_source(tmp_path / "d").triage is None


@pytest.mark.parametrize("other", [name for name in RUNS if name != "sham-s0"])
def test_compare_with_another_run_or_plan_is_refused(study, other_base, tmp_path, other):
    before, after = study / "stock", study / "runs" / "sham-s0"
    words = ["compare", str(before), str(after), "--out", str(tmp_path), "--quiet"]
    assert CliRunner().invoke(app, [*words, "--run", str(after)]).exit_code == 0
    done = CliRunner().invoke(app, [*words, "--run", str(study / "runs" / other)])
    assert done.exit_code == 1
    assert APART in str(done.exception)
    plan = SurgeryPlan.load(after / "plan.yaml")
    foreign = plan.model_copy(
        update={"model": plan.model.model_copy(update={"fingerprint": "0" * 64})}
    )
    with pytest.raises(ArtefactError, match=APART):
        compare(read_snapshot(before), read_snapshot(after), plan=foreign)


def run_with(patch, folder):
    patch.save(folder / "patch.safetensors")
    return folder


def test_push_takes_only_the_run_whose_patch_the_folder_holds(tokenizer, study, tmp_path):
    base = folder_of(tiny_language_model("llama"), tokenizer, tmp_path / "base")
    loaded = load_model(str(base), bos=False)
    ours = patch_of(loaded.model, released)
    sham = patch_of(loaded.model, lambda part: part * 0)
    merged = apply_patches(load_model(str(base), bos=False), [ours], tmp_path / "merged")
    export_peft(loaded, ours, tmp_path / "adapter")
    for name, patch in (("own", ours), ("sham", sham)):
        shutil.copytree(study / "runs" / "surgery-s1", tmp_path / name)
        patch.save(tmp_path / name / "patch.safetensors")
    for folder in (merged, tmp_path / "adapter"):
        with pytest.raises(ArtefactError, match=APART) as caught:
            push(folder, str(tmp_path / "hub"), run=tmp_path / "sham")
        assert str(folder) in str(caught.value)
        assert not (folder / "README.md").exists()
        assert not (folder / "patch.safetensors").exists()
        push(folder, str(tmp_path / "hub"), run=tmp_path / "own")
        assert (folder / "patch.safetensors").exists()


@pytest.mark.parametrize(
    "change",
    [{"model_type": "llama"}, {"dtype": "bfloat16"}, {"num_kv_heads": 1}, {"head_dim": 4}],
)
def test_a_film_does_not_go_on_with_another_model_or_precision(tmp_path, change):
    film = film_in(tmp_path)
    assert resumed_film(tmp_path, film, until=10**6).steps == film.steps
    other = replace(film, model=replace(film.model, **change))
    with pytest.raises(ArtefactError, match=APART):
        resumed_film(tmp_path, other, until=10**6)


def summary_of(study, path, **changes):
    """The study's own summary, as of other evaluations."""
    replace(StudySummary.load(study / "summary.json"), **changes).save(path)


def test_a_summary_of_other_evaluations_is_refused(study, tmp_path):
    part = tmp_path / "study"
    shutil.copytree(study, part)
    assert StudySummary.load(part / "summary.json").identity
    read_source(part)
    summary_of(study, part / "summary.json", identity="0" * 64)
    with pytest.raises(ArtefactError, match=f"{APART}: different evaluations") as caught:
        read_source(part)
    assert "summary.json" in str(caught.value)


def test_completions_of_another_seeds_patch_are_refused(study, tmp_path):
    """Same base, same arm, other seed: only the patch tells them apart."""
    part = tmp_path / "study"
    shutil.copytree(study, part)
    read = Completions.load(part / "completions.json")
    for seed, refused in ((0, False), (1, True)):
        patches = {"sham": RunSettings.load(part / "runs" / f"sham-s{seed}").patch}
        told = replace(read.provenance, patches=patches)
        replace(read, provenance=told).save(part / "completions.json")
        if refused:
            with pytest.raises(ArtefactError, match=f"sham of .*completions.json {APART}"):
                read_source(part)
        else:
            read_source(part)


@pytest.mark.parametrize("run", RUNS)
def test_a_therapy_of_another_run_is_refused(study, tmp_path, run):
    folder = tmp_path / run
    shutil.copytree(study / "runs" / run, folder)
    settings = RunSettings.load(folder)
    Therapy("", settings.plan, (), {}, (), run=settings.identity).save(folder)
    read_source(folder)
    other = RunSettings.load(study / "runs" / ("sham-s1" if run == "sham-s0" else "sham-s0"))
    Therapy("", settings.plan, (), {}, (), run=other.identity).save(folder)
    with pytest.raises(ArtefactError, match=f"{APART}: different runs") as caught:
        read_source(folder)
    assert "therapy.json" in str(caught.value)
    assert "run.json" in str(caught.value)


def plasticity_for(model, patch, folder, mass):
    identity = {"id": model.id, "fingerprint": model.fingerprint, "patch": patch}
    replace(plasticity_summary((1 - mass).tolist()), model=identity).save(
        folder / "plasticity.json"
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_plasticity_of_another_run_or_of_stock_is_refused(study, tmp_path, run):
    part = tmp_path / "study"
    shutil.copytree(study, part)
    model, mass = Evaluation.load(part / "stock" / "evaluation.json").model, stock_mass()
    patches = {name: RunSettings.load(part / "runs" / name).patch for name in RUNS} | {"stock": ""}
    for name, patch in patches.items():
        plasticity_for(model, patch, part / "runs" / run, mass)
        plasticity_for(model, patch, part / "stock", mass)
        plasticity_for(model, patch, tmp_path, mass)
        if name != run:
            with pytest.raises(ArtefactError, match=f"{APART}: different patches"):
                read_source(part / "runs" / run)
        if name != "stock":
            with pytest.raises(ArtefactError, match=f"{APART}: different patches"):
                compare(part / "stock", part / "runs" / run)
    plasticity_for(model, patches[run], part / "runs" / run, mass)
    plasticity_for(model, "", part / "stock", mass)
    read_source(part)
    assert compare(part / "stock", part / "runs" / run).plasticity is not None
    other = replace(model, fingerprint="0" * 64)
    plasticity_for(other, patches[run], part / "runs" / run, mass)
    with pytest.raises(ArtefactError, match=f"{APART}: different base weights"):
        read_source(part)


@pytest.mark.parametrize("run", RUNS)
def test_pruned_heads_are_reported_with_evaluations_of_their_own_patch_or_none(
    study, tmp_path, run
):
    """The folder of `prune` beside `before` and `after`, as the evaluations of a run lie there."""
    model = Evaluation.load(study / "stock" / "evaluation.json").model
    folder = tmp_path / "prune"
    pruned_of(model, RunSettings.load(study / "runs" / run).patch).save(folder / "prune.json")
    shutil.copytree(study / "stock", tmp_path / "before")
    for other in RUNS:
        shutil.copytree(study / "runs" / other, tmp_path / "after", dirs_exist_ok=True)
        source = read_source(folder)
        if other == run:
            assert source.runs[0].comparison is not None
            continue
        assert not source.runs
        with pytest.raises(ArtefactError, match=f"{APART}: different patches"):
            read_source(folder, after=tmp_path / "after")
    with pytest.raises(ArtefactError, match=f"{APART}: different patches"):
        read_source(folder, before=study / "runs" / run, after=study / "runs" / run)


@pytest.mark.parametrize("place", ["prune", "stream"])
def test_a_search_of_other_weights_in_a_checkups_folder_is_refused(
    study, other_base, tmp_path, place
):
    stock = Evaluation.load(study / "stock" / "evaluation.json")
    stock.diagnosis.save(tmp_path / "diagnosis.json")
    path = tmp_path / place / "prune.json"
    pruned_of(stock.model).save(path)
    assert len(read_source(tmp_path).searches) == 1
    pruned_of(Evaluation.load(other_base / "evaluation.json").model).save(path)
    with pytest.raises(ArtefactError, match=f"{APART}: different base weights"):
        read_source(tmp_path)


@pytest.mark.parametrize("other", [name for name in RUNS if name != "sham-s0"])
def test_completions_of_another_patch_in_a_run_are_refused(study, tmp_path, other):
    """The page of a run showed what another run's patch had written."""
    folder = tmp_path / "run"
    shutil.copytree(study / "runs" / "sham-s0", folder)
    read = Completions.load(study / "completions.json")

    def said_by(run):
        patches = {"stock": "", "mine": RunSettings.load(study / "runs" / run).patch}
        conditions = {"stock": read.conditions["stock"], "mine": read.conditions["sham"]}
        of = replace(read.provenance, patches=patches)
        replace(read, conditions=conditions, provenance=of).save(folder / "completions.json")

    said_by("sham-s0")
    assert read_source(folder).completions is not None
    said_by(other)
    with pytest.raises(ArtefactError, match=f"{APART}: different patches") as caught:
        read_source(folder)
    assert "mine of" in str(caught.value)


def test_a_checkup_of_other_weights_is_refused_with_both_names(study, other_base, tmp_path):
    stock = Evaluation.load(study / "stock" / "evaluation.json")
    stock.diagnosis.save(tmp_path / "diagnosis.json")
    path = tmp_path / "checkup.json"
    for folder, fits in ((study / "stock", True), (other_base, False)):
        model = Evaluation.load(folder / "evaluation.json").model
        save_artefact(path, "checkup", {"model": to_plain(model), "lines": ["healthy"]})
        if fits:
            assert read_source(tmp_path).checkup == ("healthy",)
            continue
        with pytest.raises(ArtefactError, match=f"{APART}: different base weights") as caught:
            read_source(tmp_path)
        assert "checkup.json" in str(caught.value)
        assert "diagnosis.json" in str(caught.value) or str(tmp_path) in str(caught.value)
