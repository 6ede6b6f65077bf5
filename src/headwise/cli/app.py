"""The command line application that all verbs register with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Verbs in the order in which one meets them, and the module in `cli` that registers each
STORY = {
    "demo": "study",
    "checkup": "checkup",
    "check": "heads",
    "diagnose": "heads",
    "survey": "heads",
    "triage": "triage",
    "plan": "heads",
    "repair": "repair",
    "evaluate": "proof",
    "complete": "proof",
    "compare": "proof",
    "report": "study",
    "prune": "prune",
    "stream": "prune",
    "apply": "heads",
    "export": "handover",
    "push": "handover",
    "capture": "proof",
    "plasticity": "proof",
    "watch": "watch",
    "study": "study",
    "cache": "cache",
}


class _Verbs(TyperGroup):
    """Verbs by name; only the module of the verb that is asked for is loaded.

    All of them are for `--help`, and for a mistyped verb, whose nearest ones are suggested.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(STORY)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            for module in {STORY[cmd_name]} if cmd_name in STORY else set(STORY.values()):
                import_module(f"headwise.cli.{module}")
            self.commands.update(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        return super().get_command(ctx, cmd_name)


quiet: ContextVar[bool] = ContextVar("quiet", default=False)  # --quiet of the verb that runs


app = typer.Typer(
    name="headwise",
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"headwise {version('headwise')}")
        raise typer.Exit
    return asked


@app.callback()
def headwise(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Diagnose, repair, prove and measure the attention heads of a causal language model."""


@contextmanager
def resumable(what: str) -> Iterator[None]:
    """Say how to go on after Ctrl-C; typer itself ends with exit code 130 and no word."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"\nheadwise: stopped; {what}\n")
        raise
