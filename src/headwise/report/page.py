"""`report.html`: one file with style, script, data and pictures inside; it asks for nothing else.

Texts from models and corpora pass jinja's autoescape or JSON with <, > and & replaced, and the
script writes them with textContent only. A content security policy forbids every request.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from headwise.bundled import DATA
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.proof.completed_texts import Completions
from headwise.provenance import Provenance
from headwise.report.effect import effect_of
from headwise.report.finding import Verdict
from headwise.report.paper.losses import against_stock
from headwise.report.payload import as_script, page_payload
from headwise.report.recovered import recovered
from headwise.report.source import Source
from headwise.report.tables import Column, Entry, Table, make_table
from headwise.report.verdict import main_run
from headwise.values import to_plain

ASSETS = DATA / "report"
SCRIPTS = ("sheets.js", "heads.js", "detail.js")  # one function of several files, in this order


@dataclass(frozen=True)
class Fact:
    """A name and a value of the page's head or foot; a card has a note besides."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ForestRow:
    """One arm's change of loss, its places in percent of the axis."""

    name: str
    main: bool
    tone: str
    value: float
    low: float
    width: float
    text: str
    extra: str


@dataclass(frozen=True)
class Forest:
    """All arms on one axis."""

    rows: tuple[ForestRow, ...]
    zero: float


@dataclass(frozen=True)
class SheetEntry:
    """One place of a table as the page prints it."""

    text: str
    interval: str
    sort: str | None
    numeric: bool


@dataclass(frozen=True)
class SheetRow:
    """One row; printed rows of the paper are marked."""

    paper: bool
    cells: tuple[SheetEntry, ...]


@dataclass(frozen=True)
class SheetColumn:
    """A heading."""

    name: str
    numeric: bool


@dataclass(frozen=True)
class Sheet:
    """A table as the template wants it."""

    key: str
    number: int
    title: str
    notes: tuple[str, ...]
    missing: str
    columns: tuple[SheetColumn, ...]
    rows: tuple[SheetRow, ...]


@dataclass(frozen=True)
class Answer:
    """What one condition made of a prompt."""

    name: str
    text: str


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt with its answers."""

    text: str
    category: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class CompletionSection:
    """The completions of the page."""

    prompts: tuple[AskedPrompt, ...]
    summary: Sheet
    table: Table
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Plate:
    """One figure: its PNG for light and dark pages, with the size so that nothing jumps."""

    key: str
    name: str
    title: str
    notes: tuple[str, ...] = ()
    missing: str = ""
    image: str = field(default="", repr=False)
    dark: str = field(default="", repr=False)
    width: int = 0
    height: int = 0


def render_page(
    source: Source,
    verdict: Verdict,
    tables: Sequence[Table],
    figures: Sequence[Plate],
    *,
    paper: bool = True,
) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    completions = None if source.completions is None else _section(source, source.completions)
    carried = list(tables) + ([completions.table] if completions else [])
    payload = page_payload(source, carried)
    return environment.get_template("template.html.j2").render(
        page={
            "title": f"{source.name}: {source.model_name}",
            "kind": source.kind,
            "name": source.name,
            "model": source.model_name,
            "judged": source.judged_set or "",
            "has_grid": bool(payload["conditions"]),
            "several": len(payload["conditions"]) > 1 or bool(source.runs),
            "paper": paper,
        },
        css=_asset("report.css"),
        js=Markup("\n").join(_asset(name) for name in SCRIPTS),
        verdict=verdict,
        cards=_cards(source),
        forest=_forest(source),
        tables=[_sheet(table) for table in tables],
        completions=completions,
        figures=figures,
        facts=_facts(source),
        payload=as_script(payload),
    )


def _asset(name: str) -> Markup:
    # our own files, inlined as they are
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def _cards(source: Source) -> list[Fact]:
    """The few numbers one remembers."""
    cards = []
    stock, main = source.stock, main_run(source)
    if stock is not None and stock.diagnosis is not None:
        counts = stock.diagnosis.counts
        note = f"{counts['dead']} dead, {counts['sink']} sinks"
        cards.append(Fact("sick heads in stock", f"{counts['sick']} of {counts['total']}", note))
    if main is None:
        return cards
    if main.diagnosis is not None:
        counts = main.diagnosis.counts
        told = f"{counts['sick']} of {counts['total']}"
        cards.append(Fact(f"sick after {main.arm}", told, "by first-token mass alone"))
    found = recovered(source, main.arm)
    if found:
        note = "not sick, and ablating them costs loss"
        cards.append(Fact("functionally recovered", str(found), note))
    change = against_stock(source, main.arm)
    if change is not None:
        note = f"{change.low:+.4f} to {change.high:+.4f} nats per token"
        cards.append(Fact("held-out loss", f"{change.value:+.4f}", note))
    effect = effect_of(source, main)
    if effect is not None:
        told = f"{effect.perplexity_change:+.2%}"
        cards.append(Fact("perplexity", told, effect.perplexities))
    return cards


def _forest(source: Source) -> Forest | None:
    """Positions in percent of every arm's change of loss with its interval."""
    main = main_run(source)
    found = [(arm, change) for arm in source.arms() if (change := against_stock(source, arm))]
    if not found or main is None:
        return None
    low = min(0.0, *(change.low for _, change in found))
    high = max(0.0, *(change.high for _, change in found))
    margin = 0.06 * (high - low or 1.0)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    rows = tuple(
        ForestRow(
            arm,
            arm == main.arm,
            "good" if change.high < 0 else "bad" if change.low > 0 else "plain",
            place(change.value),
            place(change.low),
            round(place(change.high) - place(change.low), 2),
            f"{change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f})",
            f"{count} heads functional"
            if (count := recovered(source, arm)) and count.tested
            else "",
        )
        for arm, change in found
    )
    return Forest(rows, place(0.0))


def _sheet(table: Table) -> Sheet:
    pairs = [(column, table.numeric(i)) for i, column in enumerate(table.columns)]
    rows = tuple(
        SheetRow(
            table.is_paper(row),
            tuple(_entry(c, entry, n) for (c, n), entry in zip(pairs, row, strict=True)),
        )
        for row in table.rows
    )
    columns = tuple(SheetColumn(column.name, number) for column, number in pairs)
    return Sheet(table.key, table.number, table.title, table.notes, table.missing, columns, rows)


def _entry(column: Column, entry: Entry, numeric: bool) -> SheetEntry:
    interval, sort = "", None
    if isinstance(entry, Interval):
        interval = f"({column.text(entry.low)} to {column.text(entry.high)})"
        entry = entry.value
    if isinstance(entry, (int, float)):
        sort = repr(entry)
    return SheetEntry(column.text(entry), interval, sort, numeric)


def _section(source: Source, found: Completions) -> CompletionSection | None:
    if not found.conditions:
        return None
    order = ["stock", *source.arms()]
    names = sorted(found.conditions, key=lambda n: (order.index(n) if n in order else 99, n))
    prompts = tuple(
        AskedPrompt(
            visible(row.prompt.text),
            row.prompt.category,
            tuple(Answer(n, visible(found.conditions[n][place].text)) for n in names),
        )
        for place, row in enumerate(found.conditions[names[0]])
    )
    table = _completion_table(found, names)
    sampling = found.sampling
    return CompletionSection(prompts, _sheet(table), table, sampling.temperature, sampling.top_p)


def _completion_table(found: Completions, names: Sequence[str]) -> Table:
    summary = found.summary()
    measures = list(summary[names[0]]["all"])
    columns = [Column("condition"), *(Column(name.replace("_", " "), ".3f") for name in measures)]
    rows: list[list[Entry]] = [
        [name, *(summary[name]["all"][m] for m in measures)] for name in names
    ]
    return make_table(0, "completions", "Measures of the completions", columns, rows)


def visible(text: str) -> str:
    """Control characters as symbols: they have no place in HTML and would be lost."""
    shown = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate({**shown, 0x7F: 0x2421})


def _facts(source: Source) -> list[Fact]:
    facts = {"folder": source.folder.name, "model": source.model_id, **_model_facts(source.model)}
    for condition in source.conditions[:1]:
        if condition.diagnosis is not None:
            facts |= _measurement_facts(condition.diagnosis.provenance)
    main = main_run(source)
    if main is not None and main.run is not None:
        planned = main.run.plan.model
        if source.model is None:  # a bare run knows the shape alone
            facts["shape"] = f"{planned.num_layers} layers x {planned.num_heads} heads"
            facts["weight fingerprint"] = main.run.fingerprint
        facts["plan"] = f"{main.run.plan.targets} ({main.run.plan.selection})"
        facts["recipe"] = _pairs(main.run.recipe)
    return [Fact(name, value) for name, value in facts.items() if value]


def _model_facts(model: ModelInfo | None) -> dict[str, str]:
    if model is None:
        return {}
    return {
        "weights": f"{model.num_parameters:,}" if model.num_parameters else "",
        "shape": f"{model.num_layers} layers x {model.num_heads} heads, "
        f"{model.num_kv_heads} key/value heads",
        "positions": model.positions,
        "weight fingerprint": model.fingerprint,
    }


def _measurement_facts(found: Provenance) -> dict[str, str]:
    texts = found.texts
    return {
        "texts": "" if texts is None else f"{texts.name}: {texts.count} texts",
        "text hash": "" if texts is None else texts.sha256,
        "settings": _pairs(found.settings),
        "versions": _pairs(found.versions),
    }


def _pairs(value: object) -> str:
    return "" if value is None else ", ".join(f"{k} {v}" for k, v in to_plain(value).items())


def plate(
    key: str,
    name: str,
    title: str,
    pictures: tuple[bytes, bytes] | None,
    *,
    notes: Sequence[str],
    missing: str,
) -> Plate:
    """One figure of the page, as PNGs for light and dark; without them it is words."""
    if pictures is None:
        return Plate(key, name, title, tuple(notes), missing)
    width, height = struct.unpack(">II", pictures[0][16:24])  # the PNG header
    light, dark = (base64.b64encode(picture).decode() for picture in pictures)
    return Plate(key, name, title, tuple(notes), missing, light, dark, width // 2, height // 2)
