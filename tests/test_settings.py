"""One settings value per verb: its fields are the library's keywords and the command's options."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner
from typing_extensions import Doc

import headwise
from headwise.cli import app
from headwise.cli.app import STORY
from headwise.cli.verbs import verb
from headwise.handover.push import push
from headwise.keywords import ChangesOf
from headwise.models.settings import LoadSettings
from headwise.plasticity.settings import PlasticitySettings
from headwise.surgery.recipe import Recipe

VERBS_GROUP = typer.main.get_command(app)
COMMANDS = {name: VERBS_GROUP.get_command(None, name) for name in STORY}

# What only a person at a terminal needs: where to write, what to print, which files to read.
TERMINAL = {
    "model",
    "texts",
    "lines",
    "limit",
    "out",
    "quiet",
    "yes",
    "figures",
    "write_row",
    "help",
    "also",
}
TERMINAL |= {"also", "csv", "dry_run", "init", "report"}
# What only a program has: values in hand, and callbacks.
PROGRAM = {"text_sets", "prompts", "budget", "progress", "joint", "stock", "directions"}
PROGRAM |= {"measures", "rules", "checkpoints", "whole_layers", "excluded"}
LOADING = {field.name for field in fields(LoadSettings)}

VERBS = {
    "diagnose": headwise.diagnose,
    "survey": headwise.survey,
    "check": headwise.check,
    "checkup": headwise.checkup,
    "plan": headwise.make_plan,
    "apply": headwise.apply_patches,
    "triage": headwise.triage,
    "repair": headwise.repair,
    "evaluate": headwise.evaluate,
    "prune": headwise.prune,
    "stream": headwise.stream,
    "complete": headwise.complete,
    "capture": headwise.capture,
    "plasticity": headwise.measure_plasticity,
    "watch": headwise.watch_checkpoints,
    "study": headwise.run_study,
    "report": headwise.write_report,
    "compare": headwise.compare,
    "export": headwise.export_peft,
    "push": push,
}
# Arguments that have another name in the library, where they are values and not files.
OTHERWISE = {
    "plan": {"diagnosis": "source"},
    "watch": {"checkpoints": "folder"},
    "study": {"file": "study", "resume": None},
    "export": {"peft": "out", "gguf": None, "lora_gguf": None},  # export_gguf and its sibling
    "plasticity": {"folder": "source", "config": None},
}
CHANGES = {"repair": Recipe, "plasticity": PlasticitySettings}  # options that change a file's value


def record_of(kind):
    """The settings type that an annotation names, also if it may be None."""
    found = [one for one in (kind, *getattr(kind, "__args__", ())) if is_dataclass(one)]
    return found[0] if len(found) == 1 and found[0].__module__.endswith("settings") else None


def options(name):
    """Names and defaults of a verb's options, without those that change the value of a file."""
    changes = CHANGES[name].model_fields if name in CHANGES else {}
    documented = {key for key, info in changes.items() if any(map(is_doc, info.metadata))}
    found = {p.name: MISSING if p.required else p.default for p in COMMANDS[name].params}
    return {key: value for key, value in found.items() if key not in documented}


def is_doc(mark):
    return isinstance(mark, Doc)


def keywords(function):
    """Names and defaults, with settings values written out."""
    names = {name: getattr(headwise, name) for name in headwise.__all__}
    kinds, found = get_type_hints(inspect.unwrap(function), localns=names), {}
    for name, parameter in inspect.signature(function).parameters.items():
        record = record_of(kinds.get(name))
        found |= written_out(record) if record else {name: parameter.default}
    return found


def written_out(record):
    kinds, found = get_type_hints(record, include_extras=True), {}
    for field in fields(record):
        inner = record_of(kinds[field.name])
        if inner:
            found |= written_out(inner)
        elif any(map(is_doc, getattr(kinds[field.name], "__metadata__", ()))):
            found[field.name] = field.default
    return found


@pytest.mark.parametrize("name", VERBS)
def test_a_verbs_options_are_the_keywords_of_its_function_with_the_same_defaults(name):
    command, function = options(name), keywords(VERBS[name])
    command = {OTHERWISE.get(name, {}).get(key, key): value for key, value in command.items()}
    command.pop(None, None)
    asked = set(command) - TERMINAL - (LOADING - set(function))
    taken = set(function) - TERMINAL - PROGRAM - (LOADING - set(command))
    taken -= {next(iter(function)), "changes", "options"} - asked  # the model, or the source
    assert asked - set(function) == set()
    assert taken - set(command) == set()
    missing = (MISSING, inspect.Parameter.empty)
    for key in asked & taken:
        if function[key] not in missing and command[key] is not MISSING:
            assert (command[key] or None) == (function[key] or None), key  # no list is None


def test_how_a_model_is_loaded_is_written_once():
    taken = keywords(headwise.load_model)
    assert set(taken) - {"name", "tokenizer"} == LOADING
    for field in fields(LoadSettings):
        assert taken[field.name] == field.default


@dataclass(frozen=True)
class Inner:
    """Nested settings."""

    depth: Annotated[float, Doc("How deep.")] = 0.5


@dataclass(frozen=True)
class Asked:
    """Settings of every kind of field."""

    texts: Annotated[tuple[str, ...], Doc("Some.")] = ()
    inner: Inner = Inner()
    hidden: int = 3  # no Doc: not an option


def test_settings_are_put_together_from_options(monkeypatch):
    own = typer.Typer()
    monkeypatch.setattr("headwise.cli.verbs.app", own)
    seen = []

    @verb("ask", "Short.", example="ask")
    def ask(settings: Asked, on: Annotated[bool, Doc("A switch.")] = False) -> None:
        """Long."""
        seen.append((settings, on))

    run = CliRunner().invoke
    assert run(own, []).exit_code == 0
    assert run(own, ["--depth", "0.25", "--on"]).exit_code == 0
    assert seen == [(Asked(), False), (Asked(inner=Inner(0.25)), True)]
    assert run(own, ["--hidden", "4"]).exit_code == 2


class Filed(BaseModel):
    """Settings of a file, of which options change some."""

    steps: Annotated[int, Doc("How many.")] = 400
    fast: Annotated[bool, Doc("A switch.")] = False
    keep: int = 2  # no Doc: an option of this name is another thing


def test_changes_are_what_was_given_and_nothing_else(monkeypatch):
    own = typer.Typer()
    monkeypatch.setattr("headwise.cli.verbs.app", own)
    seen = []

    @verb("ask", "Short.", example="ask")
    def ask(
        changes: Annotated[dict[str, Any], ChangesOf(Filed)],
        keep: Annotated[str | None, Doc("Another.")] = None,
    ) -> None:
        """Long."""
        seen.append((changes, keep))

    run = CliRunner().invoke
    for words in ([], ["--steps", "0", "--keep", "a"], ["--fast"]):
        assert run(own, words).exit_code == 0
    assert seen == [({}, None), ({"steps": 0}, "a"), ({"fast": True}, None)]


def test_a_wrong_value_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("headwise.cli.options.announce", lambda *_: pytest.fail("it loads"))
    for words in (
        ["diagnose", "m", "--sink", "2"],
        ["diagnose", "m", "--dtype", "int3"],
        ["capture", "m", "--buckets", "round:3"],
        ["capture", "m", "--layout", "odd"],
        ["evaluate", "m", "--max-texts", "1"],
        ["plan", "d", "--init", "zero"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code in (1, 2), words
        assert "loading" not in done.output
