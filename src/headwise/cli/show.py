"""What the terminal shows: tables and the coloured head grid."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.cli.app import quiet
from headwise.diagnosis.view import CLASS_COLOURS
from headwise.errors import visible
from headwise.tables import Table, table

if TYPE_CHECKING:
    from headwise.diagnosis.values import Diagnosis
    from headwise.forward.separability import HeadCheck
    from headwise.models.loaded_model import LoadedModel
    from headwise.plasticity.run import Plasticity

CLASS_LETTERS = {"healthy": "·", "low_entropy": "e", "sink": "s", "dead": "D"}


_NARROWEST = 20  # columns; rich cannot lay out a table in fewer than it has borders


class Screen(Console):
    """A console on which the names of models and files are text: no escape codes, no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.width = max(self.width, _NARROWEST)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as it will be shown."""
        return super().render_str(visible(text), **{**options, "markup": False})


def console() -> Console:
    """Standard output, if not --quiet. Lines break at words on a terminal, in a log not at all."""
    return Screen(quiet=quiet.get(), highlight=False, soft_wrap=not sys.stdout.isatty())


def head_grid(diagnosis: Diagnosis, name: str = "first_token_mass") -> Text:
    """Layer 0 at the bottom as in the figures: background by class, the digit is the mass."""
    mass = diagnosis.maps[name]
    cells = [
        [
            (f"{CLASS_LETTERS[label]}{min(int(mass[layer, head] * 10), 9)}", CLASS_COLOURS[label])
            for head, label in enumerate(row)
        ]
        for layer, row in enumerate(diagnosis.classes)
    ]
    text = grid_of(diagnosis.model.layer_numbers, cells)
    text.append("           ")
    for name_, colour in CLASS_COLOURS.items():
        text.append(f" {CLASS_LETTERS[name_]} {name_} ", style=f"black on {colour}")
        text.append(" ")
    text.append("\n           the digit is the first-token mass in tenths", style="dim")
    return text


def role_map(diagnosis: Diagnosis) -> Text:
    """What each head does most, a letter each; empty where roles were not measured."""
    from headwise.diagnosis.roles import ROLES

    if not diagnosis.roles:
        return Text()
    drawn = {role.name: (role.letter, role.colour) for role in ROLES}
    cells = [[drawn.get(name, ("·", "")) for name in row] for row in diagnosis.roles]
    text, counts = grid_of(diagnosis.model.layer_numbers, cells), Counter(sum(diagnosis.roles, ()))
    for role in (role for role in ROLES if counts[role.name]):
        text.append(f"           {role.letter}", style=f"black on {role.colour}")
        text.append(f" {role.label}: {role.counts} ({counts[role.name]})\n")
    text.append(
        f"           named above an excess of {diagnosis.thresholds.role:g} over chance",
        style="dim",
    )
    return text


def grid_of(layers: Sequence[int], cells: Sequence[Sequence[tuple[str, str]]]) -> Text:
    """A line per layer, layer 0 at the bottom; of wide models each cell keeps its last letter.

    A cell is what it says and its colour, or no colour for a cell that says nothing.
    """
    heads = len(cells[0]) if cells else 0
    wide = _MARGIN + 3 * heads <= _SCREEN
    text = Text("layer\\head ")
    numbers = (f"{h % 100:>3}" if wide else str(h % 10) for h in range(heads))
    text.append("".join(numbers) + "\n", style="dim")
    for layer, row in reversed(list(zip(layers, cells, strict=True))):
        text.append(f"{layer:>10} ", style="dim")
        for label, colour in row:
            style = f"black on {colour}" if colour else "dim"
            text.append(f"{label:>3}" if wide else label[-1], style=style)
        text.append("\n")
    return text


def rich_table(shown: Table) -> RichTable:
    """A table for the terminal; numbers are right-aligned, and what is too long goes on below."""
    title = max(map(len, shown.title.splitlines()), default=0)
    result = RichTable(
        title=shown.title,
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        show_header=any(column.name for column in shown.columns),
        min_width=min(title, _SCREEN),  # a narrow table would break its title
    )
    for index, column in enumerate(shown.columns):
        side: Literal["right", "left"] = "right" if shown.numeric(index) else "left"
        result.add_column(column.name, justify=side, overflow="fold")
    for row in shown.rows:
        result.add_row(*(c.text(entry) for c, entry in zip(shown.columns, row, strict=True)))
    return result


def print_tables(tables: Iterable[Table]) -> None:
    """Tables one below the other."""
    for one in tables:
        console().print(rich_table(one))


_SCREEN = 80  # columns of the narrowest terminal in use
_MARGIN = 11  # columns before the first head of a grid


def cost_tables(runs: Table) -> list[RichTable | str]:
    """What a study would run, and its totals; minutes and MB are the last two columns."""
    from headwise.cost import duration

    rows = runs.rows
    shown: list[RichTable | str] = [rich_table(runs)]
    if any(row[-2] is None for row in rows):
        shown.append("time and disk: unknown, the model's configuration is not at hand")
    else:
        minutes, megabytes = (sum(float(str(row[at])) for row in rows) for at in (-2, -1))
        shown.append(
            f"estimate: at most about {duration(minutes)} of CPU and {megabytes:.0f} MB on disk "
            "(less: steps, seeds, max_texts, ablate: operated)"
        )
    return shown


def plasticity_table(plasticity: Plasticity) -> RichTable:
    """Plasticity by layer: mean, smallest and largest head."""
    rows: dict[int, list[float]] = {}
    for head in plasticity.heads:
        if head.ap_overall is not None:
            rows.setdefault(head.layer, []).append(head.ap_overall)
    cells = [[layer, len(v), sum(v) / len(v), min(v), max(v)] for layer, v in sorted(rows.items())]
    columns = ("layer", "heads", "mean", "lowest", "highest")
    return rich_table(table("attention plasticity", columns, cells))


def check_summary(loaded: LoadedModel, result: HeadCheck) -> str:
    """What a passed check says of a model."""
    from headwise.models.architectures import geometry_of, positions_of
    from headwise.models.values import model_name

    geometry, difference = geometry_of(loaded.model), result.difference
    tried, heads = {p.head for p in result.probes}, geometry.num_layers * geometry.num_heads
    return (
        f"{model_name(loaded.id)}: {loaded.model.config.model_type}, "
        f"{geometry.num_layers} layers x {geometry.num_heads} heads "
        f"({geometry.num_kv_heads} key/value heads of {geometry.head_dim}), "
        f"{positions_of(loaded.model)} positions.\n"
        f"Heads are separable: {len(result.probes)} slices of {len(tried)} of {heads} heads moved "
        f"exactly their own heads; silencing equals ablation within {result.silencing_error:.0e}, "
        f"the tap changes logits by {result.logit_change:.0e} of their size at "
        f"{difference.positions} of {difference.length} tokens "
        f"({', '.join(difference.implementations)})."
    )
