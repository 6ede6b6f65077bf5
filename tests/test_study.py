"""Studies: checked before they run, resumable, the same bytes however often they were killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from headwise.cli import app
from headwise.cli.show import cost_tables
from headwise.cli.study import without_missing_extras
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import diagnosis_from
from headwise.errors import ArtefactError, SettingsError, TrainingError
from headwise.models.patch import Patch
from headwise.proof.values import DocumentLosses, Evaluation, HeadCosts
from headwise.provenance import Provenance
from headwise.settings import changed
from headwise.studies import estimate
from headwise.studies.arms import _at_its_best_rate
from headwise.studies.estimate import estimate_study
from headwise.studies.run import run_study
from headwise.studies.study import STUDIES, Study, load_study
from headwise.studies.summary import arm_difference
from headwise.texts.text_sets import TextSet
from planned import made_model

RECIPE = {
    "steps": 4,
    "block": 32,
    "batch_size": 2,
    "accumulation": 1,
    "lr": 0.003,
    "validate_every": 2,
    "save_every": 1,
    "map_every": 1,
    "validation_blocks": 2,
}


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    sentence = "the old clock in the hall struck nine and nobody on the stair was there to hear"
    words = sentence.split()
    for number in range(60):
        order = random.Random(number).sample(words, len(words))
        (folder / f"{number:03d}.txt").write_text(" ".join(order * 2))
    return folder


def write_study(path, model_dir, corpus_dir, **changes):
    body = {
        "name": "tiny",
        "model": str(model_dir),
        "texts": [str(corpus_dir / "000.txt"), str(corpus_dir / "001.txt")],
        "corpora": {"train": [str(corpus_dir)]},
        "plan": {"heads": "L1H0-1"},
        "max_length": 32,
        "max_texts": 2,
        "changes": RECIPE,
        "arms": [{"name": "surgery"}, {"name": "sham", "mode": "sham"}],
        "completions": 1,
        **changes,
    }
    path.write_text(yaml.safe_dump(body))
    return path


def contents(folder):
    """Hash of every file; timings in trace.jsonl are the one thing that may differ."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        raw = path.read_bytes()
        if path.name == "trace.jsonl":
            rows = [json.loads(line) for line in raw.splitlines()]
            raw = json.dumps([{**row, "tokens_per_second": 0} for row in rows]).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(raw).hexdigest()
    return found


def test_bundled_studies_are_valid(tmp_path):
    names = sorted(path.stem for path in STUDIES.glob("*.yaml"))
    assert {"demo", "controls", "patient-paper", "bloom-1b7-paper"} <= set(names)
    for name in names:
        assert estimate_study(load_study(name), tmp_path).rows


def test_the_estimate_is_of_the_files_that_a_run_leaves(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    study = load_study(str(path))
    out = run_study(study, out=tmp_path / "out")
    *_, steps, tokens, minutes, megabytes = estimate_study(study, out).rows[1]  # behind stock
    weights = Patch.load(out / "runs" / "surgery-s0" / "patch.safetensors").num_weights
    kept = len(list((out / "runs" / "surgery-s0" / "checkpoints").glob("*.safetensors")))
    assert megabytes == pytest.approx(weights * (8 + 12 * kept) / 1e6, rel=0.05)
    assert minutes > 0
    assert (steps, tokens * 1e6) == (study.recipe_of(study.arms[0]).steps, steps * 2 * 32)


def test_the_estimate_of_a_rate_grid_counts_a_run_at_every_rate(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    one = load_study(str(path))
    tokens, counted = [], estimate.repair_work(one.recipe_of(one.arms[0]), 1, 1).tokens
    for study in (one, changed(one, rate=[1e-4, 3e-4, 1e-3])):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(estimate, "assumed_seconds_per_token", lambda parameters: 60.0)
            patched.setattr(estimate, "_judging", lambda *_: 0.0)
            tokens.append(estimate_study(study, tmp_path / "none").rows[1][-2])
    assert tokens[0] >= counted > 0
    assert tokens[1] == pytest.approx(4 * tokens[0])  # three rates, and the best one again


def test_an_estimate_without_the_model_says_so(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", tmp_path / "missing", corpus_dir)
    runs = estimate_study(load_study(str(path)), tmp_path)
    assert runs.rows[0][-2:] == (None, None)
    (_, words) = cost_tables(runs)
    assert "not at hand" in words


def test_an_unknown_key_names_the_nearest_one(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir, completion=3)
    with pytest.raises(SettingsError, match="did you mean 'completions'"):
        load_study(str(path))


@pytest.mark.parametrize("plan", [{"head": "sick"}, {"init": "zero"}, {"seed": -1}])
def test_a_plan_that_no_verb_would_take_is_refused(tmp_path, model_dir, corpus_dir, plan):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir, plan=plan)
    with pytest.raises(SettingsError, match=f"plan.{next(iter(plan))}"):
        load_study(str(path))


def test_an_unlisted_corpus_is_refused_before_anything_runs(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir, corpora={})
    with pytest.raises(SettingsError, match="not listed"):
        load_study(str(path))


def test_a_study_runs_is_not_redone_and_notices_changes(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    out = run_study(load_study(str(path)), out=tmp_path / "out")
    before = contents(out)
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("evaluation.json")}
    run_study(load_study(str(path)), out=out)
    assert contents(out) == before
    assert stamps == {p: p.stat().st_mtime_ns for p in out.rglob("evaluation.json")}
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["arms"]) == {"surgery", "sham"}
    assert "surgery - sham" in summary["between_arms"]
    changed = write_study(tmp_path / "t.yaml", model_dir, corpus_dir, max_texts=3)
    with pytest.raises(ArtefactError, match="other settings: max_texts"):
        run_study(load_study(str(changed)), out=out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_dir, corpus_dir):
    """A study of two arms, and what it left."""
    folder = tmp_path_factory.mktemp("finished")
    study = load_study(str(write_study(folder / "s.yaml", model_dir, corpus_dir)))
    return study, run_study(study, out=folder / "out")


FOREIGN = ["evaluation.json", "comparison.json", "patch.safetensors"]
OF_STOCK = ["stock/diagnosis.json", "stock/evaluation.json", "completions.json"]


@pytest.mark.parametrize("artefact", FOREIGN)
@pytest.mark.parametrize(("run", "other"), [("sham-s0", "surgery-s0"), ("surgery-s0", "sham-s0")])
def test_a_study_goes_on_with_no_artefact_of_another_run(tmp_path, finished, run, other, artefact):
    study, out = finished[0], tmp_path / "out"
    shutil.copytree(finished[1], out)
    shutil.copy(out / "runs" / other / artefact, out / "runs" / run / artefact)
    with pytest.raises(ArtefactError, match="do not belong together") as caught:
        run_study(study, out=out)
    assert artefact in str(caught.value)


@pytest.mark.parametrize("artefact", OF_STOCK)
def test_a_study_goes_on_with_no_artefact_of_other_weights(tmp_path, finished, artefact):
    study, out = finished[0], tmp_path / "out"
    shutil.copytree(finished[1], out)
    run_study(study, out=out)
    body = json.loads((out / artefact).read_text())
    model = body["provenance"]["model"] if artefact == "completions.json" else body["model"]
    model["fingerprint"] = "0" * 64
    body.pop("checksum")
    (out / artefact).write_text(json.dumps(body))
    with pytest.raises(ArtefactError, match="different base weights") as caught:
        run_study(study, out=out)
    assert artefact in str(caught.value)


def test_a_study_goes_on_with_no_evaluation_on_other_texts(tmp_path, finished):
    study, out = finished[0], tmp_path / "out"
    shutil.copytree(finished[1], out)
    path = out / "stock" / "evaluation.json"
    kept = Evaluation.load(path)
    texts = {
        name: replace(entry, texts=replace(entry.texts, sha256="0" * 64))
        for name, entry in kept.text_sets.items()
    }
    replace(kept, text_sets=texts).save(path)
    with pytest.raises(ArtefactError, match="do not belong together: different texts"):
        run_study(study, out=out)


def test_the_sham_is_not_sick_but_not_functional(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    out = run_study(load_study(str(path)), out=tmp_path / "out")
    summary = json.loads((out / "summary.json").read_text())
    assert [row["functional"] for row in summary["arms"]["sham"]["recovery"]] == [0]
    cost = summary["arms"]["sham"]["joint_ablation_cost"][0]
    assert abs(cost["value"]) < 1e-6  # silenced heads add nothing


def written(folder):
    """Every file with the time of its last writing: more entries differ as work goes on."""
    found = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path, path.stat().st_mtime_ns))
    return found


def killed_somewhere(command, folder, dice):
    """Start a study, kill it a moment after a few of its writes; False if it ended before."""
    before, wanted = written(folder), dice.randint(1, 5)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(written(folder) - before) < wanted:
        time.sleep(0.002)
    time.sleep(dice.random() * 0.3)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert running or process.wait() == 0
    process.wait()
    return running


@pytest.mark.faults
def test_a_study_killed_at_random_moments_ends_with_the_same_bytes(tmp_path, model_dir, corpus_dir):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    whole = run_study(load_study(str(path)), out=tmp_path / "whole")
    command = [
        sys.executable,
        "-m",
        "headwise.cli",
        "study",
        str(path),
        "--out",
        str(tmp_path / "cut"),
        "--no-report",
        "--quiet",
    ]
    dice, kills = random.Random(5), 0
    while kills < 20 and killed_somewhere(command, tmp_path / "cut", dice):
        kills += 1
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    sys.stderr.write(f"\n{kills} kills\n")
    assert kills >= 3
    assert contents(tmp_path / "cut") == contents(whole)


TWO_SEEDS = {
    "seeds": [0, 1],
    "arms": [{"name": "surgery"}, {"name": "release", "treatment": "release"}],
}


@pytest.fixture(scope="module")
def serial(tmp_path_factory, model_dir, corpus_dir):
    """A study of four runs, and its folder after one process ran them one after the other."""
    folder = tmp_path_factory.mktemp("serial")
    path = write_study(folder / "s.yaml", model_dir, corpus_dir, **TWO_SEEDS)
    run_study(load_study(str(path)), out=folder / "out")
    return load_study(str(path)), contents(folder / "out")


def test_two_workers_write_the_bytes_of_one_process(tmp_path, serial):
    study, expected = serial
    seen = []
    run_study(study, out=tmp_path, workers=2, progress=lambda *told: seen.append(told))
    assert contents(tmp_path) == expected
    assert [told[1] for told in seen if told[0] == "runs"] == [0, 1, 2, 3, 4]
    assert any(told[0].startswith("release s1: ") for told in seen)
    seen.clear()
    run_study(study, out=tmp_path, workers=2, progress=lambda *told: seen.append(told))
    assert "runs" not in {told[0] for told in seen}  # nothing left for a worker


def killed_once(action, folder, name):
    """Run `action` here while a thread kills the worker that saves the first checkpoint."""
    victims = []

    def kill():
        pattern = f"runs/{name}/checkpoints/step-*"
        while not list(folder.glob(pattern)):
            time.sleep(0.002)
        holder = json.loads((folder / "runs" / name / ".lock").read_text())["pid"]
        os.kill(holder, signal.SIGKILL)
        victims.append(holder)

    thread = threading.Thread(target=kill)
    thread.start()
    action()
    thread.join()
    assert os.getpid() not in victims
    return victims


def test_a_killed_worker_costs_its_own_run_the_unsaved_steps_alone(tmp_path, serial):
    study, expected = serial
    seen = []

    def run():
        run_study(study, out=tmp_path, workers=2, progress=lambda *told: seen.append(told[0]))

    assert len(killed_once(run, tmp_path, "surgery-s1")) == 1
    lost = [line for line in seen if "its worker was lost" in line]
    assert lost == ["surgery s1: its worker was lost; another one goes on from its last checkpoint"]
    assert contents(tmp_path) == expected


@pytest.mark.slow  # a cluster of two processes starts, and one is killed
def test_a_dask_cluster_that_loses_a_worker_writes_the_bytes_of_one_process(tmp_path, serial):
    distributed = pytest.importorskip("distributed")
    study, expected = serial
    seen = []
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:

        def run():
            run_study(
                study,
                out=tmp_path,
                backend="dask",
                scheduler=cluster.scheduler_address,
                progress=lambda *told: seen.append(told[0]),
            )

        killed_once(run, tmp_path, "surgery-s1")
    assert any(line.startswith("surgery s1: its worker was lost") for line in seen)
    assert contents(tmp_path) == expected


def test_a_cluster_without_an_address_is_refused_before_anything_runs(
    tmp_path, model_dir, corpus_dir
):
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    with pytest.raises(SettingsError, match="needs a scheduler"):
        run_study(load_study(str(path)), out=tmp_path / "out", backend="dask")
    assert not (tmp_path / "out").exists()


def study_command(path, out, *options):
    command = [sys.executable, "-m", "headwise.cli", "study", str(path), "--out", str(out)]
    return [*command, "--no-report", "--quiet", *options]


def workers_of(process):
    """The numbers of a process's children that are loky's workers."""
    listed = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(word) for path in listed for word in path.read_text().split()]
    return [n for n in children if "popen_loky" in Path(f"/proc/{n}/cmdline").read_text()]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_and_the_study_goes_on(tmp_path, serial, corpus_dir, number):
    study, expected = serial
    path = write_study(tmp_path / "s.yaml", study.model, corpus_dir, **TWO_SEEDS)
    command = study_command(path, tmp_path / "out", "--workers", "2")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "out").glob("runs/*/checkpoints/step-*")):
        time.sleep(0.005)
        assert process.poll() is None
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert "stopped; the same command goes on" in told
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    run_study(study, out=tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == expected


def test_a_run_that_fails_does_not_keep_the_others_from_their_end(
    tmp_path, model_dir, corpus_dir, monkeypatch
):
    taken = []

    def ends(items, workers, progress):
        for item in items:
            taken.append(str(item))
            failure = TrainingError("no step", where=item) if len(taken) == 1 else None
            yield replace(item, failure=failure)

    monkeypatch.setattr("headwise.studies.spread_runs._ends", ends)
    path = write_study(tmp_path / "s.yaml", model_dir, corpus_dir)
    with pytest.raises(TrainingError, match=r"no step\n.*surgery s0"):
        run_study(load_study(str(path)), out=tmp_path / "out", workers=2)
    assert taken == ["surgery s0", "sham s0"]
    assert not (tmp_path / "out" / "summary.json").exists()


def losses_of(*sums):
    """An evaluation with these document losses, ten tokens each."""
    texts = TextSet("t", tuple(map(str, sums)))
    losses = DocumentLosses.of(texts.describe(), np.array(sums), np.full(len(sums), 10))
    diagnosis = diagnosis_from(
        model=made_model(1, 2),
        maps={"first_token_mass": np.zeros((1, 2))},
        thresholds=Thresholds(),
    )
    return Evaluation(
        model=diagnosis.model,
        patches=(),
        text_sets={"t": losses},
        diagnosis=diagnosis,
        heads=HeadCosts(len(sums), {}, {}),
        recovery=None,
        mlp_dormancy=None,
        provenance=Provenance(versions={}),
    )


def test_arms_with_the_same_seeds_are_paired_seed_by_seed():
    left = [losses_of(10.0, 12.0), losses_of(20.0, 24.0)]
    right = [losses_of(9.0, 10.0), losses_of(21.0, 26.0)]
    found, back = arm_difference(left, right, "t"), arm_difference(right, left, "t")
    assert found.by_seed == pytest.approx([0.15, -0.15])
    assert back.by_seed == pytest.approx([-0.15, 0.15])
    assert found.value == pytest.approx(0.0)
    alone = arm_difference(left, right[:1], "t")
    assert alone.by_seed == pytest.approx([0.15, 1.25])


def test_a_new_study_file_is_a_valid_study_and_replaces_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["study", "--init", "some/model"])
    assert done.exit_code == 0, done.output
    assert load_study("study.yaml").model == "some/model"
    again = CliRunner().invoke(app, ["study", "--init", "some/model"])
    assert again.exit_code == 1
    assert "such a file already" in str(again.exception)


def test_the_demo_runs_without_the_lora_extra(monkeypatch, capsys):
    demo = load_study("demo")
    assert without_missing_extras(demo) == demo
    monkeypatch.setattr("headwise.cli.study.find_spec", lambda name: None)
    assert [arm.mode for arm in without_missing_extras(demo).arms].count("lora") == 0
    assert "headwise[lora]" in capsys.readouterr().out


def test_arms_are_compared_at_one_rate_or_at_their_best_of_a_grid(tmp_path):
    body = {"name": "s", "arms": [{"name": "a"}, {"name": "b", "recipe": {"lr": 0.5}}]}
    own, one, grid = (Study(**body, rate=rate) for rate in (None, 0.01, [0.1, 0.01, 1.0]))
    assert [own.request(arm, 0).changes.get("lr") for arm in own.arms] == [None, 0.5]
    assert [one.request(arm, 0).changes["lr"] for arm in one.arms] == [0.01, 0.01]
    assert len({study.rate_rule for study in (own, one, grid)}) == 3
    losses = {0.1: 3.0, 0.01: 2.0, 1.0: 9.0}

    def carried_out(request, out):
        assert out.parent == tmp_path / "rates"
        return SimpleNamespace(state=SimpleNamespace(best_loss=losses[request.changes["lr"]]))

    request = grid.request(grid.arms[1], 0)
    assert _at_its_best_rate(request, grid.rate, carried_out, tmp_path).changes["lr"] == 0.01
