"""The story of docs/story.md, word for word, on models that headwise has never seen."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from headwise.cli import app
from planned import small_texts
from reader import gpt2, saved
from test_docs import SMALLER, STORY, blocks, commands

EXTRA = {
    **SMALLER,
    "evaluate": ["--texts", "held.jsonl", "--heads", "L0H1"],
    "capture": ["--max-length", "64", "--buckets", "uniform:8"],
}
FIRST = ("diagnose", "triage", "repair", "evaluate", "complete", "capture")


def sick_gpt2():
    """A random GPT-2 with 256 positions, one head of which looks at the first token alone."""
    model = gpt2()
    block = model.transformer.h[0]
    with torch.no_grad():
        model.transformer.wpe.weight[0].mul_(100)
        first = block.ln_1(model.transformer.wpe.weight[0])
        width, head = model.config.n_embd, slice(12, 24)  # of L0H1
        block.attn.c_attn.bias[:width][head] = 3.0
        block.attn.c_attn.weight[:, width : 2 * width][:, head] = first[:, None] / 10
    return model


def story(model):
    [text] = blocks(STORY, "sh")
    for words in commands(text):
        words = [{"MODEL": str(model), "my_texts/": "train.jsonl"}.get(w, w) for w in words]
        if words[:2] in (["study", "controls"], ["report", "out/controls"]):
            continue  # the patient's
        extra = EXTRA.get(words[0], [])
        yield [*words, *(extra[2:] if "--texts" in words and "--texts" in extra else extra)]


def write_texts(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


def go_through(story, folder):
    """Run every command in a folder with texts; what each verb said first, by verb."""
    texts = small_texts(160).texts
    write_texts(folder / "train.jsonl", texts[:120])
    write_texts(folder / "held.jsonl", texts[120:])
    write_texts(folder / "few.jsonl", texts[150:])
    told = {}
    for words in story:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
        assert "Traceback" not in done.output
        assert ("first token: no BOS (" in done.output) == (words[0] in FIRST)
        told.setdefault(words[0], done.output)
    return told


def check_story(told, folder):
    """What a stranger must read: where texts are cut, stock's loss, a fitted recipe, no success."""
    assert "texts are cut at 256 tokens, not 512" in told["evaluate"]
    assert "estimate: at most about" in told["evaluate"]
    assert "in stock" in told["repair"]
    assert "recipe fitted" in told["repair"]
    assert json.loads((folder / "out/run/run.json").read_text())["recipe"]["block"] <= 256
    page = (folder / "out/run/report/report.html").read_text()
    assert "The operation made the model better, and better than" not in page
    assert "BLOOM-1b7" not in page


def test_a_strangers_gpt2_goes_from_check_to_report_without_a_false_success(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = saved(sick_gpt2(), tmp_path / "stranger" / "hf")
    words = [w for w in story(model) if "out/sham" not in w and "out/auto" not in w]
    through = [w[0] for w in words].index("report") + 1
    told = go_through(words[:through], tmp_path)
    verbs = ["check", "diagnose", "triage", "plan", "repair", "evaluate", "compare", "report"]
    assert list(told) == verbs
    check_story(told, tmp_path)
    assert "model <b>stranger</b>" in (tmp_path / "out/run/report/report.html").read_text()


@pytest.mark.slow  # minutes: make test-slow
def test_a_strangers_gpt2_goes_through_the_whole_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = saved(sick_gpt2(), tmp_path / "stranger" / "hf")
    check_story(go_through(story(model), tmp_path), tmp_path)


@pytest.mark.parametrize("selection", ["band & sick", "band"])
def test_a_band_is_refused_where_an_index_means_nothing(selection, tmp_path):
    model = saved(sick_gpt2(), tmp_path / "m")
    runner = CliRunner()
    words = ["--max-length", "32", "--no-figures", "--out", str(tmp_path / "d")]
    assert runner.invoke(app, ["diagnose", str(model), *words]).exit_code == 0
    done = runner.invoke(app, ["plan", str(tmp_path / "d"), "--heads", selection])
    assert done.exit_code == 1
    assert "learned positions" in str(done.exception)
