"""The command line application that all verbs register with."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="headwise",
    help="Diagnose, repair, prove and measure the attention heads of a causal language model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
