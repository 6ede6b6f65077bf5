"""Editors and type checkers see the public names: README's Python under `mypy --strict`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import headwise
from test_docs import README, ROOT, STORY, blocks

# each line is wrong, and a type checker that knows the signatures says so
MISTAKES = """
from headwise import diagnose, evaluate, load_model, nonesuch

loaded = load_model(3)
diagnose(loaded, max_lenght=64)
diagnose(loaded.model, loaded.tokenizer, ["a text"], batch_size="4")
evaluate(loaded).perplexities
"""
RIGHT = """
from headwise import Diagnosis, diagnose, evaluate, load_model

loaded = load_model("patient", dtype="float32")
one: Diagnosis = diagnose(loaded, ["a text"], max_length=64)
two: Diagnosis = diagnose(loaded.model, loaded.tokenizer, ["a text"], max_length=64)
evaluate(loaded, heads="none").text_sets["a"].loss.value
"""


def errors(folder: Path, *names: str) -> dict[str, list[str]]:
    """What `mypy --strict` says of each file; the cache is the one that `make check` leaves."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *names]
    source = str(Path(headwise.__file__).parent.parent)
    done = subprocess.run(
        command,
        cwd=folder,
        env={"MYPYPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}:")] for name in names}


def test_the_readmes_python_is_typed_and_mistakes_are_caught(tmp_path):
    shown = [text for page in (README, STORY) for text in blocks(page, "python")]
    (tmp_path / "readme.py").write_text("\n".join(shown))
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(MISTAKES)
    found = errors(tmp_path, "readme.py", "right.py", "wrong.py")
    assert found["readme.py"] == []
    assert found["right.py"] == []
    told = {int(line.split(":")[1]) for line in found["wrong.py"] if ": error:" in line}
    assert told == {2, 4, 5, 6, 7}, "\n".join(found["wrong.py"])


def test_names_for_type_checkers_are_those_at_run_time():
    tree = ast.parse(Path(headwise.__file__).read_text())
    typed = {
        alias.asname: f"{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headwise.")
        for alias in node.names
    }
    public = {name: f"headwise.{module}" for name, module in headwise._PUBLIC.items()}
    assert typed == public
