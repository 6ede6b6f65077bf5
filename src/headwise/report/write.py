"""The report: `report.html`, tables and figures from artefacts alone, never a model.

    OUT/report.html           one self-contained page
    OUT/tables/*.md, *.csv    our tables; of a BLOOM, the paper's rows below them
    OUT/figures/*.png, *.svg, *.pdf

The same artefacts give the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.artefacts import write_text
from headwise.pruning.values import PART_NAMES, Part
from headwise.report.page import Picture, render_page
from headwise.report.paper.reference import with_published
from headwise.report.paper.values import FIGURE_NOTES
from headwise.report.source import Source, read_source
from headwise.report.tables import TABLES
from headwise.report.verdict import judge
from headwise.tables import Table

__all__ = ["report_tables", "write_report"]


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
    paper's rows and figures stand beside BLOOM models only, unless `paper` says otherwise.
    """
    out, read = Path(out), read_source(Path(source), before, after, triage)
    if paper is None:
        bloom = read.model is not None and read.model.model_type == "bloom"
        paper = bloom and bool(read.conditions)  # the paper prunes nothing
    tables = report_tables(read, paper=paper)
    for one in tables:
        write_text(out / "tables" / f"{one.key}.md", one.to_markdown())
        write_text(out / "tables" / f"{one.key}.csv", one.to_csv())
    pictures = _draw(read, out / "figures", paper)
    page = render_page(read, judge(read), tables, pictures, paper=paper)
    return write_text(out / "report.html", page)


def report_tables(source: Source, *, paper: bool) -> list[Table]:
    """Our tables that have rows, numbered; with `paper` all ten, the published rows below."""
    ours = [make(source) for make in TABLES]
    found = [
        replace(t, key=f"{search.kind}_{t.key}", title=f"{search.kind}: {t.title}")
        for search in source.searches
        for t in search.tables()
    ]
    kept = [with_published(t) if paper else t.narrowed() for t in ours if paper or t.rows] + found
    return [
        replace(t, key=f"table{n:02d}_{t.key}", title=f"Table {n}: {t.title}")
        for n, t in enumerate(kept, 1)
    ]


def _draw(source: Source, folder: Path, paper: bool) -> list[Picture]:
    """Draw and save every figure that this source has data for."""
    # matplotlib is slow to load: not before it is needed
    from headwise.pruning.figures import curve_figure
    from headwise.report.figures import FIGURES

    pictures = []
    if paper:
        from headwise.report.paper.figures import PAPER_FIGURES

        for number, (slug, title, draw) in PAPER_FIGURES.items():
            key, name = f"figure{number}_{slug}", f"Figure {number}: {title}"
            pictures.append(_save(key, name, draw(source), folder, FIGURE_NOTES[number]))
    pictures += [_save(key, title, draw(source), folder) for key, (title, draw) in FIGURES.items()]
    for search in source.searches:
        parts: tuple[Part, ...] = ("held_out", "other")
        for part in parts:
            if search.order and part in search.texts:
                title = f"{search.kind}: change of loss on {PART_NAMES[part]}, beside other orders"
                drawn = curve_figure(search, part)
                pictures.append(_save(f"{search.kind}_{part}", title, drawn, folder))
    return [picture for picture in pictures if picture is not None]


def _save(
    key: str, title: str, figure: Any, folder: Path, notes: tuple[str, ...] = ()
) -> Picture | None:
    """Write the figure's files; the page gets it for light and for dark."""
    if figure is None:
        return None
    from headwise.drawing import darken, figure_bytes
    from headwise.report.figures import save_all

    save_all({key: figure}, folder)
    light = (folder / f"{key}.png").read_bytes()
    darken(figure)
    return Picture(key, title, notes, light, figure_bytes(figure, "png"))
