"""The command line application that all verbs register with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

STORY = (  # the order in which one meets the verbs
    *("demo", "check", "diagnose", "survey", "triage", "plan", "repair", "evaluate", "complete"),
    *("compare", "report", "apply", "export", "push", "capture", "plasticity", "watch", "study"),
)


class _Verbs(TyperGroup):
    """`--help` lists the verbs as the story goes, not as modules happen to be imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=STORY.index)


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
