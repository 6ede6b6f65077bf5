"""What a terminal of 80 columns shows: nothing wider, and a word before every long wait."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headwise.cli import app, show
from headwise.cli.options import wrote
from headwise.cli.progress_bar import progress_bars
from headwise.cli.repair import run_lines
from headwise.cli.show import console, grid_of, head_grid, rich_table
from headwise.diagnosis.view import diagnosis_table
from headwise.errors import HeadwiseError
from headwise.intervals import Interval
from headwise.surgery.plan import make_plan
from headwise.tables import table
from headwise.triaging.view import triage_table
from reportstudy import diagnosis_of, stock_mass


def widths(item):
    """The lengths of what a terminal of 80 columns shows, and its text."""
    screen = io.StringIO()
    Console(file=screen, width=200, highlight=False).print(item)
    text = "\n".join(line.rstrip() for line in screen.getvalue().splitlines())
    return [len(line) for line in text.splitlines()], text


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_a_grid_of_many_heads_keeps_to_80_columns(heads):
    rows = [[("s7", "#E69F00")] * heads for _ in range(3)]
    lengths, text = widths(grid_of(range(3), rows))
    assert max(lengths) <= 80
    assert text.count("7") == 3 * heads + heads // 10 + (heads % 10 > 7)  # and those of the heading


def test_the_summary_of_a_diagnosis_keeps_to_80_columns():
    found = diagnosis_of(stock_mass())
    assert max(widths(head_grid(found))[0]) <= 80
    assert max(widths(rich_table(diagnosis_table(found)))[0]) <= 80


def test_a_band_is_told_only_where_an_index_means_something():
    found = diagnosis_of(stock_mass())
    assert found.model.positions == "alibi"
    assert "band" in widths(rich_table(diagnosis_table(found)))[1]
    rope = replace(found, model=replace(found.model, positions="rope"))
    assert "band" not in widths(rich_table(diagnosis_table(rope)))[1]


def judged(value, low, high):
    cost = Interval(value, low, high)
    return SimpleNamespace(
        class_="undecided",
        zero=cost,
        mean=cost,
        unsink=cost,
        release=None,
        release_kind="release",
        documents=64,
    )


def test_a_triage_marks_the_costs_that_are_not_0_and_keeps_to_80_columns():
    heads = {"L10H10": judged(-1.23456, -2.0, -0.5), "L11H11": judged(0.01, -0.01, 0.03)}
    diagnosis = diagnosis_of(stock_mass())
    found = SimpleNamespace(
        heads=heads, model=SimpleNamespace(short_name="a" * 32), diagnosis=diagnosis
    )
    lengths, text = widths(rich_table(triage_table(found)))
    assert max(lengths) <= 80
    assert "-1.2346*" in text
    assert "+0.0100 " in text


def test_the_title_of_a_narrow_table_stays_in_one_line():
    title = "loss without the head (nats per token)"
    assert title in widths(rich_table(table(title, ("head", "change"), [("L0H1", 0.5)])))[1]


def test_a_plan_of_many_heads_is_shown_whole_in_words():
    found = diagnosis_of(np.random.default_rng(0).random(stock_mass().shape))
    plan = make_plan(found, heads="sick")
    screen = io.StringIO()
    Console(file=screen, width=50, highlight=False).print(rich_table(plan.table()))
    lines = [line.split("│")[-1].strip() for line in screen.getvalue().splitlines()]
    assert plan.targets.replace(",", ", ") in " ".join(lines)
    assert f"{plan.summary.trainable_weights:,} weights" in screen.getvalue()


def test_lines_break_at_words_on_a_terminal_and_nowhere_in_a_log(monkeypatch, capsys):
    line = "word " * 30
    console().print(line)
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(show.sys.stdout, "isatty", lambda: True, raising=False)
    console().print(line)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    assert told[0].rstrip().endswith("word")


def test_figures_are_counted_not_listed(capsys, tmp_path):
    names = ["diagnosis.json", "a_map.png", "a_map.svg", "b_map.png", "b_map.svg"]
    wrote([tmp_path / name for name in names])
    assert capsys.readouterr().out == f"wrote diagnosis.json, 2 figures (PNG, SVG) in {tmp_path}\n"


@pytest.mark.parametrize(("stock", "worse"), [(4.0, True), (4.5, False), (5.0, False)])
def test_a_repair_that_left_the_model_worse_says_so(stock, worse, tmp_path):
    state = SimpleNamespace(
        validations={0: 5.0},
        best_loss=4.5,
        best_step=2,
        stopped="",
    )
    done = SimpleNamespace(
        out=tmp_path,
        state=state,
        mode="surgery",
        settings=SimpleNamespace(name="surgery", request=SimpleNamespace(auto=False)),
        outcome="trained",
        stock_loss=stock,
        patch=SimpleNamespace(num_weights=7),
    )
    told = " ".join(run_lines(done, None))
    assert ("0.5000 worse than stock" in told) == worse


@pytest.mark.parametrize("verb", ["check", "diagnose", "evaluate", "complete", "capture"])
def test_a_verb_says_that_it_loads_before_torch_is_imported(verb):
    code = "import sys; sys.modules['torch'] = None; from headwise.cli import app; app()"
    command = [sys.executable, "-c", code, *verb.split(), "some/model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "loading some/model" in done.stdout
    assert "torch" in done.stderr


def test_a_triage_without_its_diagnosis_is_refused_before_anything_is_loaded(tmp_path):
    done = CliRunner().invoke(app, ["triage", "some/model", "--diagnosis", str(tmp_path / "d")])
    assert isinstance(done.exception, HeadwiseError)
    assert "loading" not in done.output


def test_a_verb_ends_with_what_was_found_and_a_command_that_can_be_typed(capsys, tmp_path):
    wrote([tmp_path / "a.json"], "3 of 48 heads", ["triage", "my model", "--diagnosis", tmp_path])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "3 of 48 heads",
        f"next: headwise triage 'my model' --diagnosis {tmp_path}",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "pateint"],
        ["diagnose", "/gone/model"],
        ["evaluate", "patient", "--patch", "gone.safetensors"],
        ["capture", "patient", "--patch", "gone.safetensors"],
        ["complete", "patient", "--prompts", "gone.txt"],
        ["apply", "patient", "gone.safetensors"],
        ["repair", "patient", "--treatment", "gone"],
    ],
)
def test_a_mistyped_name_is_refused_before_torch_is_loaded(words):
    code = (
        "import sys\nfrom headwise.cli import app\nfrom headwise.errors import HeadwiseError\n"
        "try: app(sys.argv[1:])\nexcept HeadwiseError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert "fix" in done.stdout


@pytest.mark.parametrize("name", ["diagnose", "check", "triage", "evaluate", "complete"])
def test_a_second_writer_is_refused_before_the_model_is_loaded(name, tmp_path, monkeypatch):
    from headwise.integrity.locks import one_writer

    diagnosis_of(stock_mass()).save(tmp_path / "diagnosis.json")
    more = ["--diagnosis", str(tmp_path)] if name == "triage" else []
    with one_writer(tmp_path):
        done = CliRunner().invoke(app, [name, "patient", *more, "--out", str(tmp_path)])
    assert "another process writes here" in str(done.exception)


def test_a_line_that_arms_of_a_study_share_is_printed_once(capsys, monkeypatch):
    with progress_bars() as progress:
        for line in ("arm a", "reading", "arm b", "reading"):
            progress(line, 0, 0, "")
    assert capsys.readouterr().out.splitlines() == ["arm a", "reading", "arm b"]
