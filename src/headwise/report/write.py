"""The report: `report.html`, ten tables and seven figures from artefacts alone, never a model.

    OUT/report.html           one self-contained page
    OUT/tables/*.md, *.csv    the paper's ten tables, this study beside the printed values
    OUT/figures/*.png, *.svg, *.pdf

The same artefacts give the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.artefacts import write_text
from headwise.report.page import Plate, plate, render_page
from headwise.report.paper import drift as drifttables, losses, tables as papertables
from headwise.report.paper.values import FIGURE_NOTES
from headwise.report.source import Source, read_source
from headwise.report.tables import Table, save_tables
from headwise.report.verdict import judge

__all__ = ["paper_tables", "published_figures", "write_report"]


def write_report(
    source: Path | str,
    out: Path | str,
    *,
    before: Path | None = None,
    after: Path | None = None,
    triage: Path | None = None,
    paper: bool | None = None,
) -> Path:
    """Report on a study, a run, or a folder with a diagnosis; returns the page's path.

    `before` and `after` are evaluations that belong to a run, `triage` one of its stock model. The
    paper's own rows and figures
    stand beside BLOOM models only, unless `paper` says otherwise.
    """
    out, found = Path(out), read_source(Path(source), before, after, triage)
    beside = (found.model is None or found.model.model_type == "bloom") if paper is None else paper
    tables = paper_tables(found) if beside else own_tables(found)
    save_tables(tables, out / "tables")
    draw = _write_figures if beside else _write_own_figures
    figures = draw(found, out / "figures")
    figures = figures if beside else [figure for figure in figures if figure.image]
    page = render_page(found, judge(found), tables, figures, paper=beside)
    return write_text(out / "report.html", page)


def own_tables(source: Source) -> list[Table]:
    """The tables without the paper's rows, columns and notes: what is of this source."""
    kept = [
        replace(table, rows=tuple(row for row in table.rows if table.is_ours(row)), notes=())
        for table in paper_tables(source)
    ]
    return [table.narrowed() for table in kept if table.rows]


def paper_tables(source: Source) -> list[Table]:
    """Tables 1 to 10, in order."""
    makers = (*papertables.TABLES, *losses.TABLES, *drifttables.TABLES)
    return sorted((make(source) for make in makers), key=lambda table: table.number)


def published_figures(out: Path) -> list[Path]:
    """The published figures again, from the digitised data alone."""
    from headwise.report.paper.figures import published_figures as draw

    return draw(out)


def _write_figures(source: Source, folder: Path) -> list[Plate]:
    """Draw and save every figure; one that has no data is an entry with words instead."""
    # matplotlib is slow to load: not before it is needed
    from headwise.report.paper.figures import PAPER_FIGURES

    entries = []
    for number, (slug, title, draw) in PAPER_FIGURES.items():
        key = f"figure{number}_{slug}"
        drawn = _save(key, draw(source), folder)
        notes = FIGURE_NOTES[number]
        entries.append(plate(key, f"Figure {number}", title, drawn, notes=notes, missing=""))
    return entries + _write_own_figures(source, folder)


def _write_own_figures(source: Source, folder: Path) -> list[Plate]:
    """The figures that have nothing of the paper's."""
    from headwise.report.figures import MORE_FIGURES

    entries = []
    for slug, (title, draw) in MORE_FIGURES.items():
        drawn = _save(slug, draw(source), folder)
        missing = "" if drawn else f"{title}: this folder has no data for it."
        entries.append(plate(slug, "More", title, drawn, notes=(), missing=missing))
    return entries


def _save(key: str, figure: Any, folder: Path) -> tuple[bytes, bytes] | None:
    """Write the figure's files; returns its picture for light and for dark pages."""
    if figure is None:
        return None
    from headwise.drawing import darken, figure_bytes
    from headwise.report.figures import save_all

    save_all({key: figure}, folder)
    light = (folder / f"{key}.png").read_bytes()
    darken(figure)
    return light, figure_bytes(figure, "png")
