"""One table for the terminal, a notebook, the page, Markdown and CSV. No torch.

An entry keeps its number and a column says how to print it, so a CSV holds full precision and an
interval becomes three CSV columns. Rows that others published stand apart from a table's own: an
arm that happens to be called `paper` is still an arm.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from headwise.errors import visible
from headwise.intervals import Interval

Entry = object  # str, int, float, Interval or None; anything else is printed by str()
OURS = "this study"


@dataclass(frozen=True)
class Column:
    """A heading and the format of its numbers (as in an f-string)."""

    name: str
    form: str = ""

    def text(self, entry: Entry) -> str:
        """One entry for people; without a format, floats get four significant digits."""
        if entry is None:
            return ""
        if isinstance(entry, Interval):
            low, high = self.text(entry.low), self.text(entry.high)
            return f"{self.text(entry.value)} ({low} to {high})"
        if not isinstance(entry, (int, float)) or isinstance(entry, bool):
            return str(entry)
        if self.form:
            return format(entry, self.form).rstrip(".")  # `#.4g` of 1097 is "1097."
        if isinstance(entry, int):
            return f"{entry:,}"
        return f"{entry:.4g}" if abs(entry) >= 1e-3 or entry == 0 else f"{entry:.1e}"


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of ours, and below them rows that were published elsewhere."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    key: str = ""  # the name of its files, and its anchor on a page
    notes: tuple[str, ...] = ()
    missing: str = ""  # why there is no row of ours; shown only then
    published: tuple[tuple[Entry, ...], ...] = ()

    @property
    def all_rows(self) -> tuple[tuple[Entry, ...], ...]:
        """Ours, then the published ones."""
        return self.rows + self.published

    def numeric(self, index: int) -> bool:
        """Whether a column holds numbers only."""
        entries = [row[index] for row in self.all_rows if row[index] is not None]
        return bool(entries) and all(isinstance(e, (int, float, Interval)) for e in entries)

    def narrowed(self) -> Table:
        """Without the columns that are empty in every row."""
        every = range(len(self.columns))
        kept = [i for i in every if any(row[i] not in (None, "") for row in self.all_rows)]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            published=tuple(tuple(row[i] for i in kept) for row in self.published),
        )

    def beside(self, published: Iterable[Sequence[Entry]], notes: Sequence[str] = ()) -> Table:
        """With published rows below; each tells its source in its second place, as ours do then."""
        named = (self.columns[0], Column("source"), *self.columns[1:])
        return replace(
            self,
            columns=named,
            rows=tuple((row[0], OURS, *row[1:]) for row in self.rows),
            published=tuple(tuple(row) for row in published),
            notes=(*self.notes, *notes),
        )

    def to_markdown(self) -> str:
        """The table under its title, with its notes."""
        lines = [f"## {self.title}", ""]
        if not self.rows and self.missing:
            lines += [self.missing, ""]
        if self.all_rows:
            lines.append("| " + " | ".join(_plain(c.name) for c in self.columns) + " |")
            rule = ("--:" if self.numeric(i) else "---" for i in range(len(self.columns)))
            lines.append("| " + " | ".join(rule) + " |")
            for row in self.all_rows:
                pairs = zip(self.columns, row, strict=True)
                lines.append("| " + " | ".join(_plain(c.text(entry)) for c, entry in pairs) + " |")
            lines.append("")
        lines += [f"{i}. {note}" for i, note in enumerate(self.notes, 1)]
        return "\n".join(lines).rstrip() + "\n"

    def to_csv(self) -> str:
        """Full precision; a column with intervals is followed by its _low and _high."""
        wide = [
            any(isinstance(row[i], Interval) for row in self.all_rows)
            for i in range(len(self.columns))
        ]
        header: list[str] = []
        for column, three in zip(self.columns, wide, strict=True):
            more = [f"{column.name}_low", f"{column.name}_high"] if three else []
            header += [column.name, *more]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(header)
        for row in self.all_rows:
            entries: list[object] = []
            for entry, three in zip(row, wide, strict=True):
                if isinstance(entry, Interval):
                    entries += [repr(entry.value), repr(entry.low), repr(entry.high)]
                else:
                    entries += [_safe(entry)] + (["", ""] if three else [])
            writer.writerow(entries)
        return buffer.getvalue()

    def to_html(self) -> str:
        """For a notebook; the report's page has its own template."""
        heads = "".join(f"<th>{html.escape(column.name)}</th>" for column in self.columns)
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{html.escape(column.text(entry))}</td>"
                for column, entry in zip(self.columns, row, strict=True)
            )
            + "</tr>"
            for row in self.all_rows
        )
        return (
            f"<p><b>{html.escape(self.title)}</b></p>"
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        )


def table(
    title: str,
    columns: str | Sequence[str],
    rows: Iterable[Sequence[Entry]],
    *,
    key: str = "",
    notes: Sequence[str] = (),
    missing: str = "",
) -> Table:
    """A table; `columns` may be one line of `name; name [format]; ...`."""
    if isinstance(columns, str):
        parts = [part.strip().removesuffix("]").partition(" [") for part in columns.split(";")]
        named = tuple(Column(name, form) for name, _, form in parts)
    else:
        named = tuple(Column(name) for name in columns)
    return Table(title, named, tuple(tuple(row) for row in rows), key, tuple(notes), missing)


def tables_html(tables: Iterable[Table]) -> str:
    """Tables below each other, for a notebook."""
    return "<div>" + "".join(one.to_html() for one in tables) + "</div>"


def _plain(text: str) -> str:
    """A cell of Markdown: a model's name makes neither a column nor a tag."""
    text = visible(text).replace("|", "\\|").replace("\n", " ")
    return re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)


def _safe(entry: Entry) -> object:
    """A text that a spreadsheet would run as a formula gets a quote in front."""
    if isinstance(entry, float):
        return repr(entry)
    if isinstance(entry, str) and entry[:1] in ("=", "+", "-", "@"):
        return "'" + entry
    return "" if entry is None else entry
