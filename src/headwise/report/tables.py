"""One table, three renderings: Markdown for people, CSV for programs, entries for the page.

A entry keeps its number and a column says how to print it, so a CSV holds full precision and an
interval becomes three CSV columns. A table without rows says why; it never vanishes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwise.artefacts import write_text
from headwise.intervals import Interval
from headwise.tables import Column

OURS, PAPER, RECOUNTED = "this study", "paper", "published map, recounted"
PPL, LOSS, SHARE = ".4g", "+.4f", ".1%"  # formats of numbers


Entry = str | int | float | Interval | None  # of a table


@dataclass(frozen=True)
class Table:
    """A numbered table of the report; paper rows have `paper` in the column `source`."""

    number: int
    slug: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()
    missing: str = ""  # in words, why this study has no row

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"table{self.number:02d}_{self.slug}"

    def is_paper(self, row: Sequence[Entry]) -> bool:
        """Whether a row was printed in the paper."""
        return PAPER in row

    def is_ours(self, row: Sequence[Entry]) -> bool:
        """Whether a row is of this source: neither printed nor counted in a published map."""
        return PAPER not in row and RECOUNTED not in row

    def narrowed(self) -> Table:
        """Without the columns where every row is empty or only names this source."""
        every = range(len(self.columns))
        kept = [i for i in every if any(row[i] not in (None, "", OURS) for row in self.rows)]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[index] for index in kept), rows=rows)

    def numeric(self, index: int) -> bool:
        """Whether a column holds numbers only."""
        found = [row[index] for row in self.rows if row[index] is not None]
        return bool(found) and all(not isinstance(entry, str) for entry in found)


def columns_of(spec: str) -> tuple[Column, ...]:
    """Columns from `name; name [format]; ...`, with the formats of f-strings."""
    parts = [part.strip().removesuffix("]").partition(" [") for part in spec.split(";")]
    return tuple(Column(name, form) for name, _, form in parts)


def make_table(
    number: int,
    slug: str,
    title: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Entry]],
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
            lines.append("| " + " | ".join(_plain(c.text(entry)) for c, entry in pairs) + " |")
        lines.append("")
    lines += [f"{i}. {note}" for i, note in enumerate(table.notes, 1)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_csv(table: Table) -> str:
    """Full precision; a column with intervals is followed by its _low and _high."""
    wide = [
        any(isinstance(row[i], Interval) for row in table.rows) for i in range(len(table.columns))
    ]
    header: list[str] = []
    for column, three in zip(table.columns, wide, strict=True):
        header += [column.name] + ([f"{column.name}_low", f"{column.name}_high"] if three else [])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        entries: list[object] = []
        for entry, three in zip(row, wide, strict=True):
            if isinstance(entry, Interval):
                entries += [repr(entry.value), repr(entry.low), repr(entry.high)]
            else:
                entries += [_safe(entry)] + (["", ""] if three else [])
        writer.writerow(entries)
    return buffer.getvalue()


def _safe(entry: Entry) -> object:
    """A text that a spreadsheet would run as a formula gets a quote in front."""
    if isinstance(entry, float):
        return repr(entry)
    if isinstance(entry, str) and entry[:1] in ("=", "+", "-", "@"):
        return "'" + entry
    return "" if entry is None else entry


def save_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write every table as .md and .csv."""
    written = []
    for table in tables:
        written.append(write_text(folder / f"{table.key}.md", to_markdown(table)))
        written.append(write_text(folder / f"{table.key}.csv", to_csv(table)))
    return written
