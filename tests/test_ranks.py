"""Several processes that work as one: the same bytes, and a clear end when one is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import tiny_language_model, tiny_tokenizer
from two_processes import work

HERE = Path(__file__).parent
CHANGING = {"tokens_per_second"}  # a clock's


@pytest.fixture(scope="module", params=["llama", "bloom"])
def tiny(request, tmp_path_factory):
    """A saved model of each tap route."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_language_model(request.param).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra):
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(arguments, world=2):
    """The processes of one run, as a launcher would start them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def ended(processes, seconds=1200):
    return [(*process.communicate(timeout=seconds), process.returncode) for process in processes]


def content(path):
    """The bytes of a file, without the clock's part of a trace."""
    if path.suffix != ".jsonl":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in CHANGING} for row in rows]


def tree(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): content(path) for path in files}


def test_two_processes_write_the_bytes_of_one(tiny, tmp_path):
    """Diagnosis, triage, both evaluations, captured vectors, and a whole repair with its patch."""
    started = start([HERE / "two_processes.py", tiny, tmp_path / "two"])
    work(str(tiny), tmp_path / "one")
    for _, errors, code in ended(started):
        assert code == 0, errors
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert set(two) == set(one)
    assert [name for name in one if two[name] != one[name]] == []
    assert "run/patch.safetensors" in one


def verb(*words):
    return ["-m", "headwise", *map(str, words)]


@pytest.fixture
def planned(tiny, tmp_path):
    """A plan and a corpus on disk, as the command line takes them."""
    from headwise.diagnosis.diagnose import diagnose
    from headwise.models.loading import load_model
    from headwise.surgery.plan import make_plan
    from planned import TINY_RECIPE, small_texts

    found = diagnose(load_model(str(tiny), bos=False), small_texts(4))
    make_plan(found, heads="L0H1,L1H0-1").save(tmp_path / "plan.yaml")
    lines = [json.dumps({"text": text}) for text in small_texts().texts]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    recipe = TINY_RECIPE.with_changes(steps=60, save_every=5, validate_every=30, map_every=30)
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe.model_dump()))
    words = [
        "repair",
        tiny,
        "--plan",
        tmp_path / "plan.yaml",
        "--corpus",
        tmp_path / "corpus.jsonl",
    ]
    return [*words, "--recipe", tmp_path / "tiny.yaml"]


@pytest.mark.faults
def test_a_killed_process_ends_the_run_with_a_message_and_it_resumes(planned, tmp_path):
    run = tmp_path / "run"
    first, second = start(verb(*planned, "--out", run))
    while not list(run.glob("checkpoints/step-*")):
        assert first.poll() is None
        time.sleep(0.2)
    second.kill()
    (_, errors, code), _ = ended([first, second])
    assert code == 1
    assert "another process of this run has ended" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    for words in ((*planned, "--out", run, "--resume"), (*planned, "--out", tmp_path / "whole")):
        subprocess.run([sys.executable, *verb(*words)], env=environment(), check=True)
    whole, resumed = tree(tmp_path / "whole"), tree(run)
    assert resumed["patch.safetensors"] == whole["patch.safetensors"]


@pytest.mark.slow
def test_accelerate_launches_a_verb_on_two_processes(tiny, tmp_path):
    """The words of docs/scale.md; one process prints and writes."""
    words = ["diagnose", tiny, "--no-bos", "--no-figures", "--max-length", "32", "--out"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launcher += ["--num_processes", "2", "--main_process_port", str(free_port())]
    done = subprocess.run(
        [*map(str, [*launcher, *verb(*words, tmp_path / "two")])],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote diagnosis.json") == 1
    alone = [sys.executable, *verb(*words, tmp_path / "one")]
    subprocess.run(alone, env=environment(), check=True)
    names = [tmp_path / name / "diagnosis.json" for name in ("one", "two")]
    assert names[0].read_bytes() == names[1].read_bytes()
