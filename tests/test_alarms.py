"""Alarms: what makes numbers not worth believing stands in terminal, artefact and verdict."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headwise import complete, evaluate, load_model, repair
from headwise.alarms import Alarm, cure_alarms, loss_alarms, merge_alarms
from headwise.cli import app
from headwise.errors import ModelError
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.proof.compare import compare
from headwise.proof.completed_texts import Prompt
from headwise.proof.settings import Sampling
from headwise.report.write import write_report
from headwise.surgery.recipe import Recipe
from headwise.surgery.values import RunSettings
from headwise.texts.text_sets import TextSet, document_hash
from headwise.texts.unigram import unigram_loss
from planned import plan_for, small_texts
from reader import gpt2, reader, sample_texts, saved

RECIPE = Recipe(
    name="tiny", steps=2, block=32, batch_size=2, accumulation=1, validate_every=1, map_every=2
)
HELD = TextSet("held", tuple(sample_texts()))


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A model that is sure of the wrong tokens: worse than guessing."""
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(40)
    return saved(model, tmp_path_factory.mktemp("models") / "loud")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in HELD.texts))
    return path


def test_a_loss_above_guessing_is_alarmed_in_terminal_json_and_page(loud, texts, tmp_path):
    words = ("--texts", texts, "--heads", "none", "--out", tmp_path / "e")
    done = run("evaluate", loud, *words)
    assert done.exit_code == 0, done.output
    assert "ALARM loss-above-uniform" in done.output
    body = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert {alarm["kind"] for alarm in body["alarms"]} == {"loss-above-uniform"}
    page = write_report(tmp_path / "e", tmp_path / "r").read_text()
    assert page.index("ALARM loss-above-uniform") < page.index('verdict-h" class')
    assert "do not believe these numbers" in page


def test_diagnosis_alarms_a_model_that_cannot_read(loud, texts, tmp_path):
    done = run("diagnose", loud, "--texts", texts, "--no-figures", "--out", tmp_path)
    assert "ALARM loss-above-uniform" in done.output
    assert json.loads((tmp_path / "diagnosis.json").read_text())["alarms"]


def test_text_that_was_trained_on_is_alarmed_in_terminal_json_and_page(tmp_path):
    folder = saved(reader(), tmp_path / "model")
    loaded = load_model(str(folder))
    done = repair(
        loaded, plan_for(loaded.model, "L1H0"), small_texts(), RECIPE, out=tmp_path / "run"
    )
    assert (
        document_hash(small_texts().texts[0])
        in Patch.load(tmp_path / "run/patch.safetensors").documents
    )
    leaked = tmp_path / "leaked.jsonl"
    rows = [*HELD.texts, "  " + small_texts().texts[7].replace(" ", "  ")]
    leaked.write_text("\n".join(json.dumps({"text": text}) for text in rows))
    words = ("--patch", tmp_path / "run/patch.safetensors", "--texts", leaked, "--heads", "none")
    told = run("evaluate", folder, *words, "--out", tmp_path / "after")
    assert told.exit_code == 0, told.output
    assert "ALARM evaluated-on-training-text" in told.output
    body = json.loads((tmp_path / "after" / "evaluation.json").read_text())
    assert "1 of 5 texts" in body["alarms"][0]["message"]
    assert (
        "ALARM evaluated-on-training-text"
        in write_report(tmp_path / "run", tmp_path / "r").read_text()
    )
    clean = evaluate(loaded, [HELD], patches=[done.patch], heads="none", max_length=64)
    assert not [a for a in clean.alarms if a.kind == "evaluated-on-training-text"]


def test_a_cure_of_a_model_that_was_unusable_as_loaded_is_no_success(loud):
    loaded = load_model(str(loud))
    before = evaluate(loaded, [HELD], heads="none", max_length=64)
    with torch.no_grad():
        loaded.model.transformer.ln_f.weight.div_(4000)  # as even as guessing
    after = evaluate(loaded, [HELD], heads="none", max_length=64)
    after = type(after)(**{**after.__dict__, "model": before.model, "alarms": ()})
    found = compare(before, after)
    assert [alarm.kind for alarm in found.alarms] == [
        "loss-above-uniform",
        "cured-an-unusable-model",
    ]


def test_repair_tells_the_stock_loss_and_alarms_a_stock_that_cannot_read(loud, tmp_path):
    loaded = load_model(str(loud))
    plan = plan_for(loaded.model, "L1H0")
    done = repair(loaded, plan, small_texts(), RECIPE, out=tmp_path / "run")
    told = RunSettings.load(tmp_path / "run")
    assert done.stock_loss is not None
    assert told.stock_loss == done.stock_loss
    assert told.alarms[0].kind == "loss-above-uniform"


def test_empty_completions_are_alarmed(tmp_path):
    model = gpt2()
    with torch.no_grad():  # every state means the end of the text
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[2] * 1e3)
    loaded = load_model(str(saved(model, tmp_path / "m")))
    found = complete(loaded, [Prompt("The lake"), Prompt("A ship")], Sampling(3, temperature=0.0))
    assert found.alarms == (Alarm("empty-completions", "2 of 2 completions of stock are empty"),)
    assert json.loads(found.save(tmp_path / "c.json").read_text())["alarms"]


def test_a_tokenizer_larger_than_the_embedding_is_alarmed_and_its_tokens_are_refused(tokenizer):
    model = gpt2()
    model.resize_token_embeddings(300)
    loaded = LoadedModel("small", model, tokenizer)
    assert loaded.alarms[0].kind == "tokenizer-larger-than-embedding"
    with pytest.raises(ModelError, match="larger than the embedding"):
        evaluate(loaded, [HELD], heads="none")


def test_the_unigram_reference_predicts_each_document_from_the_others():
    encoded = [[9, 1, 1, 2], [9, 1, 3]]
    smooth = lambda count, others, types: (count + types / 10) / (others + types)  # noqa: E731
    first = 2 * np.log(smooth(1, 2, 2)) + np.log(smooth(0, 2, 2))
    second = np.log(smooth(2, 3, 2)) + np.log(smooth(0, 3, 2))
    assert unigram_loss(encoded, 10) == pytest.approx(-(first + second) / 5)
    assert unigram_loss([[0, 1, 2, 3]], 10) == pytest.approx(np.log(10))


def test_loss_alarms_have_an_order_and_are_told_once():
    assert loss_alarms("t", 3.0, 400, 4.0) == ()
    assert [a.kind for a in loss_alarms("t", 5.0, 400, 4.0)] == ["loss-above-unigram"]
    assert [a.kind for a in loss_alarms("t", 7.0, 400, 4.0)] == ["loss-above-uniform"]
    assert len(merge_alarms(cure_alarms(9.0, 2.0), cure_alarms(9.0, 2.0))) == 1
