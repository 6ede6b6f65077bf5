"""One request for every repair: contradictions, recipes, resuming, mode x treatment x keep."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from conftest import tiny_language_model, tiny_tokenizer
from headwise.artefacts import load_artefact
from headwise.cli import app
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.symptoms import Symptom
from headwise.errors import ArtefactError, SelectionError, SettingsError
from headwise.heads import Head
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patch import Patch
from headwise.models.patient import patient_texts
from headwise.proof.evaluate import evaluate
from headwise.studies.arms import open_setting
from headwise.studies.study import load_study
from headwise.surgery.fitting import fit_request
from headwise.surgery.plan import SurgeryPlan, make_plan, plans_of
from headwise.surgery.plan_settings import MODES, TREATED
from headwise.surgery.recipe import RECIPES, recipe_and_changes
from headwise.surgery.settings import TRAINED, RepairRequest
from headwise.surgery.values import RunSettings
from headwise.texts.corpus import build_corpus
from headwise.texts.text_sets import TextSet, document_hash
from headwise.therapy import auto, ill_heads
from headwise.therapy.ill_heads import find_ill_heads
from headwise.therapy.repair import repair
from headwise.therapy.values import Therapy
from planned import TINY_RECIPE, plan_for, random_corpus, small_texts, weight_bits

RECIPE = TINY_RECIPE.model_copy(update={"steps": 2, "validate_every": 2, "block": 48})
TEXTS = small_texts(60)
OTHER = TextSet("other", tuple(f"{i * 7} {i} {i * i} and so on" for i in range(20)))
HELD_OUT = OTHER.texts[:5]


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def plan(loaded):
    return plan_for(loaded.model)


def judged_corpus():
    """A random corpus whose validation blocks are documents of their own."""
    corpus = random_corpus(validation=8, length=24)
    rows = enumerate(corpus.validation)
    return replace(corpus, validation=tuple(replace(b, index=(n,)) for n, b in rows))


EVERY = list(itertools.product(MODES, [None, "release", "auto"], [None, OTHER]))


@pytest.mark.parametrize(("mode", "treatment", "keep"), EVERY)
def test_every_mode_treatment_and_keep_is_carried_out_or_refused(
    loaded, plan, tmp_path, mode, treatment, keep
):
    before = weight_bits(loaded.model)

    def run():
        return repair(
            loaded,
            plan,
            TEXTS,
            RECIPE,
            out=tmp_path / "run",
            mode=mode,
            treatment=treatment,
            keep=keep,
            excluded=HELD_OUT,
        )

    if (treatment == "auto" and mode != "surgery") or (treatment and mode not in TREATED):
        with pytest.raises(SelectionError, match="does not"):
            run()
        assert not (tmp_path / "run").exists()
        return
    done = run()
    assert weight_bits(loaded.model) == before
    asked = RunSettings.load(done.out).request
    assert (asked.mode, asked.treatment) == (mode, treatment)
    assert asked.kept == ("" if keep is None else keep.sha256)
    seen = set(done.patch.documents)
    trained = mode in TRAINED and not done.patch.is_empty
    kept = {document_hash(text) for text in OTHER.texts[5:]}
    assert bool(seen & kept) == (trained and keep is not None)
    assert not seen & {document_hash(text) for text in HELD_OUT}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"treatment": "auto", "mode": "sham"}, "the mode sham does not"),
        ({"treatment": "auto", "mode": "random-heads"}, "the mode random-heads does not"),
        ({"treatment": "auto", "dose": 0.5}, "auto looks for the dose"),
        ({"treatment": "release", "mode": "lora"}, "does not treat heads"),
        ({"dose": 0.5}, "needs a treatment"),
        ({"treatment": "release", "dose": float("nan")}, "must be finite"),
    ],
)
def test_a_contradictory_request_is_refused(options, told):
    with pytest.raises(SelectionError, match=told):
        RepairRequest(**options)


def test_a_contradictory_command_is_refused_before_a_model_is_loaded(tmp_path):
    words = ["repair", "patient", "--treatment", "auto", "--mode", "sham", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SelectionError)
    assert not list(tmp_path.iterdir())


def test_a_contradictory_arm_is_refused_when_the_study_is_read(tmp_path):
    path = tmp_path / "study.yaml"
    arms = [{"name": "a", "mode": "sham", "treatment": "auto"}]
    path.write_text(yaml.safe_dump({"model": "patient", "arms": arms}))
    with pytest.raises(SelectionError, match="the mode sham does not"):
        load_study(str(path))


def test_evaluation_on_kept_text_raises_the_alarm(loaded, plan, tmp_path):
    done = repair(loaded, plan, TEXTS, RECIPE, out=tmp_path, keep=OTHER)
    patch = Patch.load(done.out / "patch.safetensors")
    alarms = evaluate(loaded, [OTHER], patches=[patch], heads="none", max_length=24).alarms
    assert any("training" in str(alarm) for alarm in alarms)


def test_an_automatic_run_that_is_finished_is_only_read(loaded, tmp_path, monkeypatch):
    corpus = judged_corpus()
    done = repair(loaded, None, corpus, RECIPE, out=tmp_path, treatment="auto")

    def measuring(*args, **options):
        raise AssertionError("a finished run is not diagnosed again")

    monkeypatch.setattr("headwise.therapy.repair.find_ill_heads", measuring)
    monkeypatch.setattr("headwise.therapy.repair.write_plan", measuring)
    again = repair(loaded, None, corpus, RECIPE, out=tmp_path, treatment="auto", resume=True)
    assert again.settings == done.settings
    assert again.state == done.state


def test_ill_heads_are_looked_for_after_the_lock_and_the_budget(loaded, tmp_path, monkeypatch):
    def measuring(*args, **options):
        raise AssertionError("nothing is measured before the budget is heard")

    def refusing(model, work):
        assert (tmp_path / ".lock").exists()
        assert work.tokens > 0
        raise SelectionError("too much")

    monkeypatch.setattr("headwise.therapy.repair.find_ill_heads", measuring)
    with pytest.raises(SelectionError, match="too much"):
        repair(
            loaded,
            None,
            judged_corpus(),
            RECIPE,
            out=tmp_path,
            treatment="auto",
            budget=refusing,
        )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"treatment": "none"}, "none"),
        ({"mode": "gradient-only"}, "gradient-only"),
        ({}, "surgery"),
    ],
)
def test_progress_calls_a_run_by_what_it_does(loaded, plan, tmp_path, options, name):
    told = []
    repair(
        loaded,
        plan,
        TEXTS,
        RECIPE,
        out=tmp_path,
        progress=lambda title, done, total, note: told.append((title, total)),
        **options,
    )
    assert {title for title, total in told if total == RECIPE.steps} == {name}


def test_a_study_the_verb_and_the_library_choose_the_same_recipe(tmp_path, model_dir):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS.texts)
    )
    path = tmp_path / "study.yaml"
    study = {
        "model": str(model_dir),
        "corpora": {"train": [str(tmp_path / "corpus.jsonl")]},
        "changes": {"lr": 0.002},
        "arms": [{"name": "arm"}],
    }
    path.write_text(yaml.safe_dump(study))
    asked = load_study(str(path))
    setting = open_setting(asked, tmp_path / "out")
    request = asked.request(asked.arms[0], 0)
    in_study, _ = fit_request(setting.loaded, request, setting.corpus("train", request))
    plan_for(setting.loaded.model).save(tmp_path / "plan.yaml")
    words = ["repair", str(model_dir), "--plan", str(tmp_path / "plan.yaml"), "--lr", "0.002"]
    words += ["--corpus", str(tmp_path / "corpus.jsonl"), "--mode", "ablate", "--quiet"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "verb")])
    assert done.exit_code == 0, done.output
    verb = RunSettings.load(tmp_path / "verb").recipe
    loaded = load_model(str(model_dir))
    plan = plan_for(loaded.model)
    library = repair(
        loaded, plan, TEXTS, out=tmp_path / "lib", mode="ablate", changes={"lr": 0.002}
    )
    assert library.settings.recipe == verb == in_study.model_copy(update={"steps": 0})
    assert in_study.steps < 300  # fitted to the few texts


def test_the_command_and_the_library_write_the_same_bytes(tmp_path, model_dir):
    lines = [json.dumps({"text": text}) for text in TEXTS.texts]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "keep.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in OTHER.texts))
    whole = {"base": "patient", **RECIPE.model_dump(exclude={"name"})}  # nothing is left to fit
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    loaded = load_model(str(model_dir))
    plan = plan_for(loaded.model)
    plan.save(tmp_path / "plan.yaml")
    words = ["repair", str(model_dir), "--quiet", "--out", str(tmp_path / "verb")]
    for name, value in (("plan", "plan.yaml"), ("corpus", "corpus.jsonl"), ("keep", "keep.jsonl")):
        words += [f"--{name}", str(tmp_path / value)]
    words += ["--recipe", str(tmp_path / "recipe.yaml"), "--treatment", "release", "--dose", "0.5"]
    assert CliRunner().invoke(app, words).exit_code == 0
    repair(
        loaded,
        plan,
        TextSet(str(tmp_path / "corpus.jsonl"), TEXTS.texts),
        RECIPE.model_copy(update={"name": "recipe"}),
        out=tmp_path / "library",
        treatment="release",
        dose=0.5,
        keep=TextSet(str(tmp_path / "keep.jsonl"), OTHER.texts),
    )
    for name in ("patch.safetensors", "run.json", "maps.jsonl"):
        ours, theirs = ((tmp_path / side / name).read_bytes() for side in ("verb", "library"))
        assert ours == theirs, name


def test_auto_triages_each_head_once_and_measures_each_layer_once(tmp_path, monkeypatch):
    """On the patient, where staring counts as drowsy only."""
    loaded = load_model("patient")
    triaged, measured = [], []
    real_triage, real_measure = auto.triage_heads, ill_heads.measure_directions

    def triage(model, plan, *args, **options):
        triaged.extend(plan.target_heads)
        return real_triage(model, plan, *args, **options)

    def measure(model, blocks, layers, sinks=None):
        measured.extend(set(layers))
        return real_measure(model, blocks, layers, sinks)

    for module in (auto, ill_heads):
        monkeypatch.setattr(module, "triage_heads", triage)
    monkeypatch.setattr(ill_heads, "measure_directions", measure)
    monkeypatch.setattr("headwise.surgery.sink_directions.measure_directions", measure)
    monkeypatch.setattr(
        "headwise.therapy.repair.find_ill_heads",
        lambda *args, **options: find_ill_heads(
            *args,
            rows=[
                Symptom("sink", "L2H7 & sick", True, ""),
                Symptom("drowsy", "L4-5 & first_token_mass > 0.3", False, ""),
            ],
            **options,
        ),
    )
    texts = TextSet("some", tuple(patient_texts("train"))[:40])
    corpus = build_corpus(loaded, texts, block=256, validation_share=0.4)
    repair(
        loaded,
        corpus=corpus,
        out=tmp_path,
        treatment="auto",
        changes={"steps": 0},
    )
    assert triaged
    again = list(Therapy.load(tmp_path).revised)  # while the others were treated
    assert sorted([*set(triaged), *map(Head.parse, again)]) == sorted(triaged)
    assert len(set(measured)) == len(measured)


def test_run_json_keeps_the_request(loaded, plan, tmp_path):
    repair(loaded, plan, TEXTS, RECIPE, out=tmp_path, treatment="release", seed=3, keep=OTHER)
    asked = load_artefact(tmp_path / "run.json", "run")["request"]
    assert asked["treatment"] == "release"
    assert asked["seed"] == 3
    assert asked["keep"] == {"name": "other", "count": 20, "sha256": OTHER.sha256}
    assert asked["plan"]["targets"] == plan.targets
    assert RunSettings.load(tmp_path).request.plan == plan


def test_a_plan_for_a_larger_model_is_refused_by_its_shape(loaded, tmp_path):
    larger = tiny_language_model("llama", num_hidden_layers=6)
    foreign = plan_for(larger, "L5H0")
    with pytest.raises(ArtefactError, match=r"the plan is for .* = \(6, .* this model has \(2, "):
        repair(loaded, foreign, TEXTS, RECIPE, out=tmp_path / "run", force=True)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_which_heads_its_diagnosis_found_sick_and_on_which_texts(loaded, tmp_path):
    few = TextSet("my few texts", TEXTS.texts[:6])
    found = diagnose(loaded, few, max_length=24, thresholds=Thresholds(dead=0.9, sink=0.1))
    plan = make_plan(found, heads="L0H1")
    assert plan.heads_of(plan.sick) == found.head_sets()["sick"]
    assert plan.texts.sha256 == few.sha256
    assert plan.diagnosed.endswith("on my few texts (6 texts)")
    assert SurgeryPlan.load(plan.save(tmp_path / "plan.yaml")) == plan
    done = repair(loaded, plan, TEXTS, RECIPE, out=tmp_path / "run", mode="sham")
    assert RunSettings.load(done.out).plan.diagnosed == plan.diagnosed
    patch = Patch.load(done.out / "patch.safetensors")
    assert plans_of([patch.info])[0].sick == plan.sick


def fitted(changes=None, recipe=None, texts=None):
    """The recipe that a request means for a stranger's model, and its number of training blocks."""
    loaded = LoadedModel("stranger", tiny_language_model("llama"), tiny_tokenizer())
    request = RepairRequest(plan=plan_for(loaded.model), recipe=recipe, changes=changes or {})
    made, corpus = fit_request(loaded, request, texts or small_texts(400))
    return made, len(corpus.train)


def test_a_batch_and_a_block_mean_what_they_say():
    recipe, _ = fitted({"batch_size": 4, "block": 64})
    assert recipe.batch_tokens == 4 * 64
    recipe, _ = fitted({"batch_size": 4, "block": 64, "tokens_per_step": 1024})
    assert (recipe.batch_size, recipe.accumulation, recipe.batch_tokens) == (4, 4, 1024)
    assert fitted({"tokens_per_step": 512})[0].batch_tokens == 512


def test_epochs_are_counted_in_steps_of_this_corpus():
    recipe, blocks = fitted(
        {"epochs": 2, "batch_size": 4, "block": 64, "checkpoint_every": "epoch"}
    )
    assert recipe.steps == round(2 * blocks / 4)
    assert recipe.checkpoint_every == round(blocks / 4)
    assert fitted({"epochs": None, "steps": 5})[0].steps == 5  # as a study hands them on
    with pytest.raises(SettingsError, match="both steps and epochs"):
        fitted({"epochs": 2, "steps": 5})


def test_a_recipe_file_keeps_the_fitted_values_that_it_does_not_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("steps: 7\ncheckpoint_layers: true\n")
    recipe, changes = recipe_and_changes(str(tmp_path / "mine.yaml"))
    plain, _ = fitted()
    mine, _ = fitted(changes, recipe)
    assert (mine.name, mine.steps, mine.checkpoint_layers) == ("mine", 7, True)
    for name in ("lr", "block", "batch_size", "accumulation", "clip", "map_every"):
        assert getattr(mine, name) == getattr(plain, name)
    (tmp_path / "based.yaml").write_text("base: patient\nsteps: 7\n")
    recipe, changes = recipe_and_changes(str(tmp_path / "based.yaml"))
    assert recipe == RECIPES["patient"].with_changes(name="based", steps=7)
    assert changes == {}


def test_every_checkpoint_that_was_asked_for_is_kept_and_the_patch_is_the_same(tmp_path):
    loaded = LoadedModel("stranger", tiny_language_model("llama"), tiny_tokenizer())
    options = {"plan": plan_for(loaded.model), "corpus": small_texts(), "recipe": TINY_RECIPE}
    plain = repair(loaded, **options, out=tmp_path / "plain")
    kept = repair(loaded, **options, out=tmp_path / "kept", changes={"checkpoint_every": 1})
    names = sorted(path.stem for path in (kept.out / "checkpoints").glob("step-*"))
    assert names == [f"step-{step:07d}" for step in range(1, 7)]
    assert len(list((plain.out / "checkpoints").glob("step-*"))) == TINY_RECIPE.keep
    for name, part in plain.patch.slices.items():
        assert torch.equal(kept.patch.slices[name].after, part.after)
