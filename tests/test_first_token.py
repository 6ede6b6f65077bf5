"""The first token: decided at loading, one setting of the whole chain, refused where it differs."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import tiny_language_model, tiny_tokenizer
from headwise import complete, diagnose, evaluate, load_model, make_plan, repair
from headwise.errors import HeadwiseError, ModelError
from headwise.models.first_token import FirstToken, decide_first_token
from headwise.models.loaded_model import LoadedModel
from headwise.proof.compare import compare
from headwise.proof.completed_texts import Prompt
from headwise.proof.settings import Sampling
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.recipe import Recipe
from headwise.surgery.values import RunSettings
from headwise.texts.batches import encode_for, encode_texts
from headwise.texts.corpus import build_corpus
from headwise.texts.text_sets import TextSet
from planned import small_texts
from reader import gpt2, reader, sample_texts, saved

RECIPE = Recipe(
    name="tiny", steps=2, block=32, batch_size=2, accumulation=1, validate_every=1, map_every=2
)
HELD = TextSet("held", tuple(sample_texts()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(reader(), tmp_path_factory.mktemp("models") / "reader")


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(str(folder))


def test_a_model_that_reads_only_behind_a_bos_gets_one_and_the_numbers_say_why(loaded):
    first = loaded.first_token
    assert first.bos
    assert first.needed
    assert first.origin == "measured"
    assert "with one" in first.reason
    assert "without" in first.reason
    assert str(first).startswith("first token: a BOS (measured: ")


def test_the_tokenizer_that_adds_a_bos_settles_it_and_the_patient_is_read_as_ever():
    patient = load_model("patient")
    assert patient.first_token == FirstToken(True, "the tokenizer adds one", "tokenizer", False)
    ids = encode_for(patient, ["In the beginning"], max_length=None)
    assert ids == encode_texts(patient.tokenizer, ["In the beginning"], max_length=None)


def test_metadata_that_asks_for_a_bos_is_believed(tmp_path):
    found = load_model(str(saved(gpt2(), tmp_path / "m", add_bos_token=True)))
    assert found.bos
    assert found.first_token.origin in ("metadata", "tokenizer")


def test_what_is_asked_for_wins_and_costs_no_measuring(folder):
    found = load_model(str(folder), bos=False)
    assert found.first_token == FirstToken(False, "asked for", "asked", False)


def test_a_model_that_reads_nothing_is_not_asked(tokenizer):
    found = decide_first_token(tiny_language_model("llama"), tokenizer)
    assert not found.bos
    assert "measuring cannot tell" in found.reason


def test_a_tokenizer_without_a_bos_cannot_be_asked_for_one():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert decide_first_token(gpt2(), tokenizer).reason == "the tokenizer has none"
    with pytest.raises(ModelError, match="no BOS token"):
        decide_first_token(gpt2(), tokenizer, True)


def test_no_bos_takes_away_what_the_tokenizer_added():
    patient = load_model("patient", bos=False)
    [ids] = encode_for(patient, ["In the beginning"])
    assert ids[0] != patient.tokenizer.bos_token_id


def test_every_piece_of_a_cut_document_starts_as_the_model_needs_it(loaded):
    texts = TextSet("long", tuple(text * 3 for text in sample_texts()))
    needed = build_corpus(loaded, texts, block=32, validation_share=0.0)
    assert all((block.ids[:, 0] == 1).all() for block in needed.train)
    assert max(block.ids.shape[1] for block in needed.train) <= 32
    plain = build_corpus(loaded.reading(False), texts, block=32, validation_share=0.0)
    assert not any((block.ids == 1).any() for block in plain.train)


def test_the_setting_goes_from_diagnosis_to_plan_run_patch_and_evaluation(loaded, tmp_path):
    found = diagnose(loaded, HELD, max_length=48)
    assert found.provenance.settings.bos is True
    plan = make_plan(found, heads="L1H0")
    assert plan.bos is True
    plan.save(tmp_path / "plan.yaml")
    assert SurgeryPlan.load(tmp_path / "plan.yaml").bos is True
    run = repair(loaded, plan, small_texts(), RECIPE, out=tmp_path / "run")
    assert RunSettings.load(tmp_path / "run").plan.bos is True
    assert run.patch.info.bos is True
    after = evaluate(loaded, [HELD], patches=[run.patch], heads="none", max_length=48)
    assert after.provenance.settings.bos is True
    said = complete(loaded, [Prompt("The harbour")], Sampling(2), patches={"run": [run.patch]})
    assert said.provenance.bos is True


def test_what_was_decided_here_gives_way_to_the_plan_and_what_was_asked_for_does_not(
    folder, tmp_path
):
    other = load_model(str(folder), bos=False)
    plan = make_plan(diagnose(other, HELD, max_length=48), heads="L1H0")
    assert plan.bos is False
    run = repair(load_model(str(folder)), plan, small_texts(), RECIPE, out=tmp_path / "run")
    assert run.patch.info.bos is False
    asked = load_model(str(folder), bos=True)
    refusal = "made with no BOS, this is a BOS"
    with pytest.raises(HeadwiseError, match=refusal):
        repair(asked, plan, small_texts(), RECIPE, out=tmp_path / "other")
    with pytest.raises(HeadwiseError, match=refusal):
        evaluate(asked, [HELD], patches=[run.patch], heads="none")
    with pytest.raises(HeadwiseError, match=refusal):
        complete(asked, [Prompt("A")], Sampling(1), patches={"run": [run.patch]})


def test_conditions_with_different_first_tokens_are_not_compared(loaded):
    with_one, without = (
        evaluate(loaded, [HELD], heads="none", max_length=48, bos=bos) for bos in (True, False)
    )
    with pytest.raises(HeadwiseError, match="bos: True and False"):
        compare(with_one, without)


def test_the_loss_is_that_of_a_plain_loop_behind_a_bos(loaded):
    found = evaluate(loaded, [HELD], heads="none", max_length=64).text_sets["held"]
    total, count = 0.0, 0
    for text in HELD.texts:
        ids = torch.tensor([[1, *loaded.tokenizer(text)["input_ids"]][:64]])
        with torch.inference_mode():
            total += float(loaded.model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert found.predicted_tokens == count
    assert found.loss.value == pytest.approx(total / count, rel=1e-5)


def test_a_missing_bos_is_alarmed_by_diagnosis_and_evaluation(loaded, tmp_path):
    diagnosis = diagnose(loaded, HELD, bos=False, max_length=64)
    found = evaluate(loaded, [HELD], heads="none", bos=False, max_length=64)
    for value in (diagnosis, found):
        assert [alarm.kind[:10] for alarm in value.alarms] == ["loss-above"]
    body = json.loads(found.save(tmp_path / "evaluation.json").read_text())
    assert body["alarms"][0]["message"].startswith("held: loss ")
    assert not evaluate(loaded, [HELD], heads="none", max_length=64).alarms


def test_a_bare_model_is_decided_on_too(loaded):
    found = diagnose(loaded.model, loaded.tokenizer, HELD, max_length=48)
    assert found.provenance.settings.bos is True
    assert LoadedModel("x", loaded.model, loaded.tokenizer).bos
