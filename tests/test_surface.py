"""The front window: public names, verbs and their options, and a help that answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import headwise
from headwise.cli import app
from headwise.cli.app import STORY

VERBS_GROUP = typer.main.get_command(app)
COMMANDS = {name: VERBS_GROUP.get_command(None, name) for name in STORY}
PINNED = Path(__file__).parent / "data" / "surface.json"


def surface():
    """Public names, and every verb with its options."""
    verbs = {
        verb: sorted(name for parameter in command.params for name in parameter.opts)
        for verb, command in COMMANDS.items()
    }
    return {"names": sorted(headwise.__all__), "verbs": verbs}


def test_names_and_options_are_what_was_promised():
    """A change is welcome if it is meant: `HEADWISE_PIN=1 pytest tests/test_surface.py` pins it."""
    if os.environ.get("HEADWISE_PIN"):
        PINNED.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
    assert surface() == json.loads(PINNED.read_text())


def test_public_names_exist_and_none_hides_a_module():
    assert sorted(headwise.__all__) == dir(headwise)
    for name in headwise.__all__:
        assert getattr(headwise, name).__doc__, name
        path = headwise.__path__[0]
        assert not (Path(path) / f"{name}.py").exists(), name
        assert not (Path(path) / name).exists(), name
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        headwise.nonesuch  # noqa: B018


# Other programs rely on these; see the contract
OPTIONS = {
    "diagnose": "out texts lines max-length batch-size skip-queries bos device-map dtype "
    "quiet allow-pickle trust-remote-code",
    "survey": "out texts lines max-length batch-size quiet",
    "check": "seed quiet",
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_verbs_have_the_options_that_others_rely_on(verb):
    options = {name for parameter in COMMANDS[verb].params for name in parameter.opts}
    assert {f"--{name}" for name in OPTIONS[verb].split()} <= options


DRAWING = {"check", "checkup", "triage", "plan", "repair", "evaluate", "complete", "compare"}
DRAWING |= {"capture", "plasticity", "prune", "stream"}


def test_a_verb_takes_a_seed_if_it_draws_and_only_then():
    seeded = {v for v, c in COMMANDS.items() if any("--seed" in p.opts for p in c.params)}
    assert seeded == DRAWING


def test_the_command_tells_its_version():
    for module in ("headwise", "headwise.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"headwise {version('headwise')}\n"


def test_every_verb_says_what_it_does():
    for name, command in COMMANDS.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


PROBE = """
import sys
sys.argv = ["headwise", *{arguments!r}]
from headwise.cli import main
try:
    main()
except SystemExit as done:
    assert done.code == 0, done.code
heavy = sorted({{"torch", "transformers", "numpy", "matplotlib", "datasets"}} & set(sys.modules))
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def helped(*arguments):
    code = PROBE.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_does_not_load_torch():
    assert helped("--help").returncode == 0


def test_help_of_every_verb_does_not_load_torch():
    """In one process: a verb's help must not import what the next one would hide."""
    code = """
import sys
from typer.testing import CliRunner
from headwise.cli import app
for verb in {verbs!r}:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0, verb
    assert "Usage" in result.output, verb
    assert "Example: headwise " + verb in result.output, verb
    assert "torch" not in sys.modules and "numpy" not in sys.modules, verb
"""
    done = subprocess.run(
        [sys.executable, "-c", code.format(verbs=sorted(COMMANDS))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_verbs_are_listed_as_the_story_goes_each_in_a_whole_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["--help"]).output.split("Commands:")[1].split("\n")[1:]
    assert [line.split()[0] for line in shown if line] == list(STORY)
    assert set(STORY) == set(COMMANDS)
    assert not [line for line in shown if line.endswith("...")]


def test_no_verb_shows_the_help():
    done = subprocess.run(
        [sys.executable, "-m", "headwise.cli"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "diagnose" in done.stdout + done.stderr


def test_the_page_of_families_is_what_the_tests_prove():
    from families_page import PAGE, page
    from headwise.models.families.known_families import ARCHITECTURES

    assert PAGE.read_text() == page(), "run: python tests/families_page.py"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    section = readme.split("## Families")[1].split("\n## ")[0]
    assert "(docs/families.md)" in section
    assert f"{len(ARCHITECTURES)} families" in section
