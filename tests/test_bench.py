"""The benchmarks: what can be asked for, what is run, tables whole in 80 columns."""

from __future__ import annotations

import importlib
import io
import json
import random
import subprocess
import sys
import typing

import numpy as np
import pytest
from rich.console import Console

import benchmarks.__main__ as command
from benchmarks import ablation, decisions, diagnose, harness, plasticity, repair, scale
from headwise.heads import Head
from headwise.values import to_plain


def made(kind, dice, **given):
    """A row with numbers of every length."""
    values = {}
    for name, annotation in typing.get_type_hints(kind).items():
        number = dice.random() * 10 ** dice.randint(*SIZES[dice.sizes])
        whole = "int" in str(annotation) and "float" not in str(annotation)
        values[name] = "words of it" if annotation is str else round(number) if whole else number
    return kind(**{**values, **given})


SIZES = {"like": (3, 3), "mixed": (-9, 5)}  # powers of ten


class Dice(random.Random):
    sizes = "like"


def rows_of(name, sizes):
    dice = Dice(3)
    dice.sizes = sizes
    ways = repair.WAYS if name == "repair" else diagnose.WAYS
    cases = [(length, way) for length in (512, 2048) for way in ways]
    grown = {"case": "ablation", "grows": "heads a layer", "sizes": "256 512 1024 2048"}
    return {
        "repair": [made(repair.RepairRow, dice, length=n, way=w) for n, w in cases],
        "diagnose": [made(diagnose.DiagnoseRow, dice, length=n, way=w) for n, w in cases],
        "a long path": [made(diagnose.DiagnoseRow, dice, model="/a" * 40)],
        "ablation": [made(ablation.AblationRow, dice)],
        "plasticity": [made(plasticity.PlasticityRow, dice, dim=n) for n in (64, 128)],
        "scale": [
            made(scale.StreamedRow, dice),
            *(made(scale.GrowthRow, dice, cpu_s=f"{n}.12 20.24 40.31", **grown) for n in (1, 2)),
        ],
    }[name]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "name", ["repair", "diagnose", "ablation", "plasticity", "scale", "a long path"]
)
def test_tables_are_whole_in_80_columns(name, sizes):
    rows = to_plain(rows_of(name, sizes))
    screen = Console(width=80, file=io.StringIO(), highlight=False, soft_wrap=True)
    for item in harness.tables(name, rows):
        screen.print(item)
    text = screen.file.getvalue()
    told = [line for line in text.splitlines() if "┃" in line or "│" in line]
    assert max(map(len, told)) <= 80
    assert "…" not in text
    for row in rows:
        assert all(word in text for key in row if key != "note" for word in key.split("_"))
        assert str(row.get("way", "")) in text


def test_without_a_name_the_benchmarks_are_listed_and_none_is_run_nor_torch_loaded(tmp_path):
    code = "import sys, benchmarks.__main__ as b; b.main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=harness.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in command.BENCHMARKS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_every_benchmark_that_is_listed_can_be_run(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").run)


def test_quick_ones_are_all_but_the_gpu_and_say_so_in_their_files(tmp_path, monkeypatch):
    asked = []

    def pretend(what):
        asked.append(what)
        return [ablation.AblationRow(1, 1, 1, 1.0, 1.0, 1.0, 0.0)]

    for name in command.BENCHMARKS:
        monkeypatch.setattr(f"benchmarks.{name}.run", pretend)
    command.main(["--quick", "--out", str(tmp_path)])
    names = {path.stem.removeprefix("bench_") for path in tmp_path.glob("*.json")}
    assert names == set(command.BENCHMARKS) - {"gpu"}
    assert all(one.quick for one in asked)
    assert json.loads((tmp_path / "bench_repair.json").read_text())["quick"] is True


def test_an_unknown_benchmark_is_refused_with_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["speed", "--out", str(tmp_path)])
    refusal = capsys.readouterr().err
    assert all(name in refusal for name in ("speed", "all", "diagnose", "repair"))


def test_both_sides_are_timed_in_turn_on_one_thread_and_ratios_are_within_a_round():
    order = []
    pairs = harness.compare(lambda: order.append("ours"), lambda: order.append("peer"), 2)
    assert order == ["ours", "peer"] * 2
    assert len(pairs.seconds) == 2
    fixed = harness.Pairs(((1.0, 2.0), (4.0, 4.0), (1.0, 10.0)))
    assert (fixed.ours, fixed.peer, fixed.ratio) == (1.0, 4.0, 0.5)


def test_the_peak_is_at_least_what_is_resident_and_starts_anew():
    held = np.ones(80_000_000, dtype=np.uint8)
    assert harness.peak_mb() >= 80
    del held
    harness.reset_peak()
    assert harness.peak_mb() >= 0.9 * harness.resident_mb()


def test_a_side_runs_this_checkout_in_a_process_of_its_own():
    code = (
        "import headwise, benchmarks, os; print(headwise.__file__, os.environ['OMP_NUM_THREADS'])"
    )
    done = harness.run_side([sys.executable, "-c", code])
    assert done.stdout.split() == [str(harness.ROOT / "src/headwise/__init__.py"), "1"]


def test_decisions_are_replayed_from_costs_that_were_measured_once(monkeypatch):
    noise = np.random.default_rng(0)
    heads, tokens = tuple(Head(0, i) for i in range(4)), np.full(40, 100)
    effects = np.array([5.0, 1.0, 0.0, 0.0])[:, None]  # summed nats a text
    costs = effects + noise.normal(size=(4, 40)) * np.array([0.5, 0.5, 0.01, 3.0])[:, None]
    monkeypatch.setattr(decisions, "_measured", lambda *asked: (heads, costs, tokens))
    [row] = decisions.bench_decisions(draws=200)
    assert (row.heads, row.texts) == (4, 40)
    assert 0.1 < row.work_to_fixed <= row.largest_work < 0.6
    assert row.most_decisions_turned == 0
    assert row.draws_with_a_false_discovery <= 0.05
    still = effects + np.zeros((4, 40))
    monkeypatch.setattr(decisions, "_measured", lambda *asked: (heads, still, tokens))
    [sure] = decisions.bench_decisions(draws=5)
    assert sure.most_decisions_lost == 0
    assert sure.work_to_fixed < row.work_to_fixed  # the first look decides
