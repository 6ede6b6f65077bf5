"""The check-up: within its budget, resumable, the same from the command and from the library."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from headwise import checkup, load_model, read_texts
from headwise.artefacts import read_json
from headwise.checkups import checkup as checking
from headwise.checkups.settings import CheckupSettings
from headwise.checkups.values import MOST_LINES, WIDTH, Checkup, Opportunity
from headwise.cli import app
from headwise.diagnosis.values import Diagnosis
from headwise.errors import SettingsError
from headwise.intervals import Interval
from headwise.models.first_token import FirstToken
from headwise.models.loaded_model import LoadedModel
from headwise.pruning.prune import prune
from headwise.triaging.values import TRIAGE_CLASSES
from reportstudy import triage_of

# eight: heads that can go are not looked for on so few
TEXTS = [f"{a} {b} {a}" for a in SENTENCES for b in SENTENCES][:8]


def small_model():
    return LoadedModel(
        "tiny", tiny_language_model("llama"), tiny_tokenizer(), FirstToken(True, "t")
    )


@pytest.mark.parametrize("budget", ["0m", "0", "soon", "-3m", ""])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(SettingsError, match="budget"):
        CheckupSettings(budget=budget)


def test_a_limit_below_nothing_is_refused():
    with pytest.raises(SettingsError, match=r"at most -1 nats"):
        CheckupSettings(max_loss=-1)


def test_the_command_writes_the_bytes_of_the_library(model_dir, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(t.replace("\n", " ") for t in TEXTS))
    out, again = tmp_path / "command" / "out", tmp_path / "library" / "out"
    arguments = ["checkup", str(model_dir), "--texts", str(texts), "--lines", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--budget", "9m"])
    assert result.exit_code == 0, result.output
    settings = CheckupSettings(budget="9m")
    answer = checkup(
        load_model(str(model_dir)), read_texts([texts], lines=True), out=again, settings=settings
    )
    for name in ("checkup.json", "diagnosis.json", "report.html"):
        assert (out / name).read_bytes() == (again / name).read_bytes(), name
    assert read_json(out / "checkup.json")["schema"] == "headwise.checkup/1"
    assert Checkup.load(out / "checkup.json") == answer
    lines = answer.lines()
    assert all(line in result.output for line in lines)


def test_finished_stages_are_used_again_and_another_text_is_measured_anew(tmp_path):
    loaded = small_model()
    first = checkup(loaded, TEXTS, out=tmp_path)
    path = tmp_path / "diagnosis.json"
    before = path.stat().st_mtime_ns
    assert checkup(loaded, TEXTS, out=tmp_path) == first
    assert path.stat().st_mtime_ns == before
    other = checkup(loaded, TEXTS[:5], out=tmp_path)
    assert path.stat().st_mtime_ns != before
    assert other.identity != first.identity


def test_it_ends_within_its_budget_and_says_what_was_not_looked_at(tmp_path, monkeypatch):
    """Heads with half their attention on the first token are sick: triage would have to look."""
    loaded = small_model()
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    short = [text[:6] for text in TEXTS]  # few tokens: even uniform attention is a sink

    def endless(*_: object, **__: object) -> None:
        while True:
            loaded.model(torch.tensor([[1, 2, 3]]))

    monkeypatch.setattr(checking, "triage", endless)
    drawn = []
    monkeypatch.setattr(checking, "write_report", lambda *_: drawn.append(time.monotonic()))
    start = time.monotonic()
    answer = checkup(loaded, short, out=tmp_path, settings=CheckupSettings(budget="12s"))
    assert drawn[0] - start < 0.75 * 12 + 1  # the rest is for the page
    assert answer.counts["sick"] > 0
    assert any("triage" in line for line in answer.not_looked_at)
    assert answer.stages == ("diagnose",)
    assert "was not looked at" in replace(answer, alarms=()).headline


def test_a_check_that_takes_too_long_is_left_out_and_named(tmp_path, monkeypatch):
    loaded, before = small_model(), small_model().model.state_dict()

    def endless(model: torch.nn.Module, **_: object) -> None:
        while True:
            model(torch.tensor([[1, 2, 3]]))

    monkeypatch.setattr(checking, "check", endless)
    answer = checkup(loaded, TEXTS, out=tmp_path, settings=CheckupSettings(budget="8s"))
    assert answer.stages[0] == "diagnose"
    assert any("separable" in line for line in answer.not_looked_at)
    again = checkup(loaded, TEXTS, out=tmp_path, settings=CheckupSettings(budget="8s"))
    assert any("separable" in line for line in again.not_looked_at)
    assert all(torch.equal(before[name], p) for name, p in loaded.model.state_dict().items())


def test_a_budget_that_is_too_short_for_a_diagnosis_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"a budget of 0\.001s is too short"):
        checkup(small_model(), TEXTS, out=tmp_path, settings=CheckupSettings(budget="0.001s"))
    assert not list(tmp_path.glob("*.json"))


def test_a_longer_budget_looks_deeper(tmp_path, monkeypatch):
    """What did not fit is searched for again; a search that was finished is not."""
    loaded, texts = small_model(), [f"{text} {n}" for n in range(5) for text in TEXTS]
    calls = []

    def searched(*given: object, **asked: object) -> object:
        calls.append(asked["settings"].search)
        return prune(*given, **asked)

    monkeypatch.setattr(checking, "prune", searched)
    slow = checking.seconds_per_token
    monkeypatch.setattr(checking, "seconds_per_token", lambda model: 1.0)
    short = checkup(loaded, texts, out=tmp_path, settings=CheckupSettings(budget="50s"))
    assert any("prune" in line for line in short.not_looked_at)
    assert len(calls) == 4  # every search is too much work
    monkeypatch.setattr(checking, "seconds_per_token", slow)
    deep = checkup(loaded, texts, out=tmp_path, settings=CheckupSettings(budget="5m"))
    assert "prune" in deep.stages
    assert len(calls) == 5
    assert checkup(loaded, texts, out=tmp_path, settings=CheckupSettings(budget="5m")) == deep
    assert len(calls) == 5


def test_one_text_gets_an_answer(tmp_path):
    answer = checkup(small_model(), TEXTS[:1], out=tmp_path)
    assert "1 text of given" in answer.lines()[0]
    assert any(
        "1 of 16 tokens or more, 21 are needed (--texts)" in one for one in answer.not_looked_at
    )


def test_the_answer_fits_a_terminal_whatever_it_says(tmp_path):
    answer = checkup(small_model(), TEXTS, out=tmp_path)
    gain = Interval(-0.1, -0.2, -0.05)
    many = tuple(
        Opportunity(f"way {n}", "gain " * 40, "headwise repair MODEL --out out/run", gain)
        for n in range(3)
    )
    long = replace(answer, opportunities=many, not_looked_at=("something else " * 20,) * 4)
    for one in (answer, long):
        lines = one.lines("out/checkup/report.html")
        assert len(lines) <= MOST_LINES
        assert max(map(len, lines)) <= WIDTH
        assert lines[-1] == "page: out/checkup/report.html"


def test_heads_that_sleep_and_could_go_are_named_as_one_choice(tmp_path, monkeypatch):
    loaded, texts = small_model(), [f"{text} {n}" for n in range(5) for text in TEXTS]
    monkeypatch.setattr(checking, "_SEARCHES", checking._SEARCHES[-1:])
    limit = CheckupSettings(budget="5m", max_loss=5.0)  # three heads may go
    every = [f"L{layer}H{index}" for layer in (0, 1) for index in range(4)]
    answer = checkup(loaded, texts, out=tmp_path, settings=limit)
    triage_of(dict.fromkeys(every, "asleep")).save(tmp_path / "triage.json")
    why = {"asleep": 3}
    monkeypatch.setattr(checking._Work, "_triage", lambda _, one, *__: replace(one, why=why))
    again = checkup(loaded, texts, out=tmp_path, settings=limit)
    told = {one.name: one.finding for one in again.opportunities}["prune"]
    heads = read_json(tmp_path / "prune" / "prune.json")["heads"]
    asleep = len(set(every) & set(heads))
    assert asleep
    assert f"; {asleep} of them sleep: repair or prune, not both" in told
    assert "sleep" not in {one.name: one.finding for one in answer.opportunities}["prune"]


def test_every_class_is_said_in_words(tmp_path):
    answer = checkup(small_model(), TEXTS, out=tmp_path)
    lines = replace(answer, why=dict.fromkeys(TRIAGE_CLASSES, 2), alarms=()).lines()
    told = " ".join(" ".join(lines).split())
    assert all(f"2 {name} (" in told for name in TRIAGE_CLASSES)


def test_a_model_without_sick_heads_is_called_healthy(tmp_path):
    answer = checkup(small_model(), TEXTS, out=tmp_path)
    assert answer.counts["sick"] == 0
    assert not answer.opportunities
    assert "healthy" in answer.headline or answer.alarms


def test_a_model_with_one_head_gets_an_answer(tmp_path):
    one = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1)
    model = tiny_language_model("llama", **one)
    loaded = LoadedModel("one", model, tiny_tokenizer(), FirstToken(True, "a test"))
    answer = checkup(loaded, TEXTS, out=tmp_path)
    assert answer.counts["total"] == 1
    assert "1 head in 1 layer" in answer.lines()[0]


def test_the_page_shows_the_answer(tmp_path):
    answer = checkup(small_model(), TEXTS, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert answer.headline in page
    assert Diagnosis.load(tmp_path / "diagnosis.json").roles
