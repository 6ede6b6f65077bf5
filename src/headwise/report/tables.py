"""One table, three renderings: Markdown for people, CSV for programs, cells for the page.

A cell keeps its number and a column says how to print it, so a CSV holds full precision and an
interval becomes three CSV columns. A table without rows says why; it never vanishes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.artefacts import write_text

OURS, PAPER = "this study", "paper"


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(body: Mapping[str, Any] | None) -> Estimate | None:
        """From the {value, low, high} of an artefact."""
        if body is None:
            return None
        return Estimate(float(body["value"]), float(body["low"]), float(body["high"]))


Cell = str | int | float | Estimate | None


@dataclass(frozen=True)
class Column:
    """A heading and the format of its numbers (as in an f-string)."""

    name: str
    form: str = ""

    def text(self, cell: Cell) -> str:
        """One cell for people."""
        if cell is None:
            return ""
        if isinstance(cell, Estimate):
            low, high = self.text(cell.low), self.text(cell.high)
            return f"{self.text(cell.value)} ({low} to {high})"
        if isinstance(cell, str):
            return cell
        return format(cell, self.form) if self.form else f"{cell:,}"


@dataclass(frozen=True)
class Table:
    """A numbered table of the report; paper rows have `paper` in the column `source`."""

    number: int
    slug: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    missing: str = ""  # in words, why this study has no row

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"table{self.number:02d}_{self.slug}"

    def is_paper(self, row: Sequence[Cell]) -> bool:
        """Whether a row was printed in the paper."""
        return PAPER in row

    def numeric(self, index: int) -> bool:
        """Whether a column holds numbers only."""
        found = [row[index] for row in self.rows if row[index] is not None]
        return bool(found) and all(not isinstance(cell, str) for cell in found)


def make_table(
    number: int,
    slug: str,
    title: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Cell]],
    *,
    notes: Sequence[str] = (),
    missing: str = "",
) -> Table:
    """A table; `missing` is shown only if no row is ours."""
    named = tuple(Column(c) if isinstance(c, str) else c for c in columns)
    fixed = tuple(tuple(row) for row in rows)
    ours = any(PAPER not in row for row in fixed)
    return Table(number, slug, title, named, fixed, tuple(notes), "" if ours else missing)


def to_markdown(table: Table) -> str:
    """The table with its notes."""
    lines = [f"## Table {table.number}: {table.title}", ""]
    if table.missing:
        lines += [table.missing, ""]
    if table.rows:
        lines.append("| " + " | ".join(_plain(c.name) for c in table.columns) + " |")
        rule = ("--:" if table.numeric(i) else "---" for i in range(len(table.columns)))
        lines.append("| " + " | ".join(rule) + " |")
        for row in table.rows:
            pairs = zip(table.columns, row, strict=True)
            lines.append("| " + " | ".join(_plain(c.text(cell)) for c, cell in pairs) + " |")
        lines.append("")
    lines += [f"{i}. {note}" for i, note in enumerate(table.notes, 1)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_csv(table: Table) -> str:
    """Full precision; a column with intervals is followed by its _low and _high."""
    wide = [
        any(isinstance(row[i], Estimate) for row in table.rows) for i in range(len(table.columns))
    ]
    header: list[str] = []
    for column, three in zip(table.columns, wide, strict=True):
        header += [column.name] + ([f"{column.name}_low", f"{column.name}_high"] if three else [])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        cells: list[object] = []
        for cell, three in zip(row, wide, strict=True):
            if isinstance(cell, Estimate):
                cells += [repr(cell.value), repr(cell.low), repr(cell.high)]
            else:
                cells += [_safe(cell)] + (["", ""] if three else [])
        writer.writerow(cells)
    return buffer.getvalue()


def _safe(cell: Cell) -> object:
    """A text that a spreadsheet would run as a formula gets a quote in front."""
    if isinstance(cell, float):
        return repr(cell)
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@"):
        return "'" + cell
    return "" if cell is None else cell


def save_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write every table as .md and .csv."""
    written = []
    for table in tables:
        written.append(write_text(folder / f"{table.key}.md", to_markdown(table)))
        written.append(write_text(folder / f"{table.key}.csv", to_csv(table)))
    return written


PPL, LOSS, SHARE = ".4g", "+.4f", ".1%"
