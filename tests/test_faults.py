"""Kill -9 at random moments: a resumed run ends with the bits of one that was never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from headwise.models.loading import load_model
from planned import TINY_RECIPE, plan_for, small_texts

pytestmark = pytest.mark.faults

KILLS = 5  # a run; four runs make 20
STEPS = 60


@pytest.fixture(scope="module")
def command(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    plan_for(load_model(str(model_dir)).model, "L0H1,L1H0-1").save(folder / "plan.yaml")
    lines = [json.dumps({"text": text}) for text in small_texts().texts]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    recipe = TINY_RECIPE.model_copy(
        update={"steps": STEPS, "save_every": 1, "validate_every": 4, "patience": 1000}
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(exclude={"name"})))
    return [
        sys.executable,
        "-m",
        "headwise.cli",
        "repair",
        str(model_dir),
        "--plan",
        str(folder / "plan.yaml"),
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--recipe",
        str(folder / "recipe.yaml"),
        "--quiet",
    ]


def start(command, out, *flags):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--out", str(out), *flags], env=environment, stderr=subprocess.PIPE, text=True
    )


def finish(command, out, *flags):
    process = start(command, out, *flags)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return (out / "patch.safetensors").read_bytes()


def newest(out):
    """The newest checkpoint's step, -1 before the first."""
    names = [path.name for path in (out / "checkpoints").glob("step-*.safetensors")]
    return max((int(name[5:12]) for name in names), default=-1)


def kill_somewhere(process, out, generator):
    """Wait until training moves, then a random moment more; True if it was still running."""
    before, target = newest(out), generator.randint(1, STEPS // KILLS)
    while process.poll() is None and newest(out) < before + target:
        time.sleep(0.001)
    time.sleep(generator.random() * 0.05)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL) if running else None
    process.communicate()
    return running


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """Patch bytes of uninterrupted runs by mode."""
    folder = tmp_path_factory.mktemp("whole")
    return {mode: finish(command, folder / mode, "--mode", mode) for mode in ("surgery", "lora")}


@pytest.mark.parametrize(
    ("seed", "mode"), [(0, "surgery"), (1, "surgery"), (2, "surgery"), (3, "lora")]
)
def test_a_run_killed_at_random_moments_ends_with_the_same_patch(
    command, whole, tmp_path, seed, mode
):
    generator = random.Random(seed)
    kills, half_written = 0, 0
    while kills < KILLS:
        flags = ["--mode", mode] + (["--resume"] if kills else [])
        assert kill_somewhere(start(command, tmp_path, *flags), tmp_path, generator), (
            f"the run ended before kill {kills + 1}"
        )
        kills += 1
        half_written += bool(list(tmp_path.rglob(".*.tmp")))
    assert finish(command, tmp_path, "--mode", mode, "--resume") == whole[mode]
    assert not list(tmp_path.rglob(".*.tmp"))
    sys.stderr.write(f"\n{kills} kills, {half_written} of them during a write\n")
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(STEPS))


@pytest.mark.parametrize(
    "name", ["run.json", "step-0000002.safetensors", "best.safetensors", "patch.safetensors"]
)
def test_a_kill_while_one_file_is_being_written_leaves_the_old_one_or_none(
    command, whole, tmp_path, name
):
    """The process dies between writing and renaming exactly this file."""
    program = f"""
import os, signal, sys
real = os.replace
def replace(source, target):
    if str(target).endswith({name!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
from headwise.cli import main
sys.argv = ["headwise", *{command[3:]!r}, "--out", {str(tmp_path)!r}]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert finish(command, tmp_path, "--resume") == whole["surgery"]
