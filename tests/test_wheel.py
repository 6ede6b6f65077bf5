"""What is released: a wheel and an sdist, installed into an empty environment and run there."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel made from it, as an installer would."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_both_hold_the_package_with_its_data_and_nothing_of_the_tests(built):
    sdist, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    tracked = run("git", "ls-files", "src/headwise", cwd=ROOT).split()
    missing = {name.removeprefix("src/") for name in tracked} - set(names)
    assert not missing
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "patients"))]
    with tarfile.open(sdist) as file:
        assert any(name.endswith("pyproject.toml") for name in file.getnames())


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    _, wheel = built
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run(*pip, "torch", cwd=tmp_path)
    run(*pip, wheel, cwd=tmp_path)
    command = tmp_path / "venv" / "bin" / "headwise"
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert run(command, "--version", cwd=tmp_path) == f"headwise {version[1]}\n"
    options = ("--max-length", "64", "--no-figures", "--out", "d")
    run(command, "diagnose", "patient", *options, cwd=tmp_path)
    assert (tmp_path / "d" / "diagnosis.json").exists()
