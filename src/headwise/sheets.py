"""Small tables of a value: the terminal and notebooks draw the same rows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwise.intervals import Interval


@dataclass(frozen=True)
class Sheet:
    """A title, headings and rows; numbers keep their type until they are drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def numeric(self, index: int) -> bool:
        """Whether a column holds numbers only."""
        return all(isinstance(row[index], (int, float)) for row in self.rows)


def sheet(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Sheet:
    """A table of a value."""
    return Sheet(title, tuple(columns), tuple(tuple(row) for row in rows))


def shown(value: object) -> str:
    """One entry: four significant digits for floats, two for the tiny ones."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    if isinstance(value, Interval):
        return f"{value.value:.4g} ({value.low:.4g} to {value.high:.4g})"
    return "" if value is None else str(value)


def sheets_html(sheets: Iterable[Sheet]) -> str:
    """The tables for a notebook."""
    return "<div>" + "".join(_html(one) for one in sheets) + "</div>"


def _html(one: Sheet) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in one.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(value))}</td>" for value in row) + "</tr>"
        for row in one.rows
    )
    return (
        f"<p><b>{html.escape(one.title)}</b></p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )
