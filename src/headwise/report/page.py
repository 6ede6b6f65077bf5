"""`report.html`: one file with style, script, data and pictures inside; it asks for nothing else.

Texts from models and corpora pass jinja's autoescape or JSON with <, > and & replaced, and the
script writes them with textContent only. A content security policy forbids every request.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from headwise.bundled import DATA
from headwise.report.paper.losses import against_stock
from headwise.report.payload import as_script, page_payload
from headwise.report.source import Source
from headwise.report.tables import Cell, Column, Estimate, Table, make_table
from headwise.report.verdict import Verdict, main_run, recovered

ASSETS = DATA / "report"


def render_page(
    source: Source,
    verdict: Verdict,
    tables: Sequence[Table],
    figures: Sequence[Mapping[str, Any]],
) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    completions = _completions(source)
    carried = list(tables) + ([completions["table"]] if completions else [])
    payload = page_payload(source, carried)
    return environment.get_template("template.html.j2").render(
        page={
            "title": f"{source.name}: {source.model_name}",
            "kind": source.kind,
            "name": source.name,
            "model": source.model_name,
            "judged": source.judged_set or "",
            "has_grid": bool(payload["conditions"]),
        },
        css=_asset("report.css"),
        js=_asset("report.js"),
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


def _cards(source: Source) -> list[dict[str, str]]:
    """The few numbers one remembers."""
    cards = []
    stock, main = source.stock, main_run(source)
    if stock is not None and stock.diagnosis is not None:
        counts = stock.diagnosis["counts"]
        value = f"{counts['sick']} of {counts['total']}"
        note = f"{counts['dead']} dead, {counts['sink']} sinks"
        cards.append({"name": "sick heads in stock", "value": value, "note": note})
    if main is None:
        return cards
    if main.diagnosis is not None:
        counts = main.diagnosis["counts"]
        cards.append(
            {
                "name": f"sick after {main.arm}",
                "value": f"{counts['sick']} of {counts['total']}",
                "note": "by first-token mass alone",
            }
        )
    found = recovered(source, main.arm)
    if found:
        note = "not sick, and ablating them costs loss"
        cards.append({"name": "functionally recovered", "value": str(found), "note": note})
    change = against_stock(source, main.arm)
    if change is not None:
        cards.append(
            {
                "name": "held-out loss",
                "value": f"{change.value:+.4f}",
                "note": f"{change.low:+.4f} to {change.high:+.4f} nats a token",
            }
        )
    return cards


def _forest(source: Source) -> dict[str, Any] | None:
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

    rows = []
    for arm, change in found:
        tone = "good" if change.high < 0 else "bad" if change.low > 0 else "plain"
        rows.append(
            {
                "name": arm,
                "main": arm == main.arm,
                "tone": tone,
                "value": place(change.value),
                "low": place(change.low),
                "width": round(place(change.high) - place(change.low), 2),
                "text": f"{change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f})",
                "extra": f"{count} heads functional" if (count := recovered(source, arm)) else "",
            }
        )
    return {"rows": rows, "zero": place(0.0)}


def _sheet(table: Table) -> dict[str, Any]:
    """A table as the template wants it."""
    numeric = [table.numeric(i) for i in range(len(table.columns))]
    pairs = list(zip(table.columns, numeric, strict=True))
    return {
        "key": table.key,
        "number": table.number,
        "title": table.title,
        "notes": table.notes,
        "missing": table.missing,
        "columns": [{"name": column.name, "numeric": number} for column, number in pairs],
        "rows": [
            {
                "paper": table.is_paper(row),
                "cells": [_cell(c, cell, n) for (c, n), cell in zip(pairs, row, strict=True)],
            }
            for row in table.rows
        ],
    }


def _cell(column: Column, cell: Cell, numeric: bool) -> dict[str, Any]:
    interval, sort = "", None
    if isinstance(cell, Estimate):
        interval = f"({column.text(cell.low)} to {column.text(cell.high)})"
        cell = cell.value
    if isinstance(cell, (int, float)):
        sort = repr(cell)
    return {"text": column.text(cell), "interval": interval, "sort": sort, "numeric": numeric}


def _completions(source: Source) -> dict[str, Any] | None:
    body = source.completions
    if body is None or not body["conditions"]:
        return None
    order = ["stock", *source.arms()]
    names = sorted(body["conditions"], key=lambda n: (order.index(n) if n in order else 99, n))
    prompts = []
    for place, row in enumerate(body["conditions"][names[0]]):
        answers = [
            {"name": name, "text": visible(body["conditions"][name][place]["completion"])}
            for name in names
        ]
        category = row.get("category", "")
        prompts.append({"text": visible(row["prompt"]), "category": category, "answers": answers})
    table = _completion_table(body, names)
    sampling = body.get("sampling", {})
    return {
        "prompts": prompts,
        "summary": _sheet(table),
        "table": table,
        "temperature": sampling.get("temperature", "?"),
        "top_p": sampling.get("top_p", "?"),
    }


def _completion_table(body: Mapping[str, Any], names: Sequence[str]) -> Table:
    measures = (
        "words",
        "distinct_1",
        "distinct_2",
        "distinct_3",
        "repetition",
        "markup_share",
        "language_drift",
    )
    columns = [Column("condition"), *(Column(name.replace("_", " "), ".3f") for name in measures)]
    found = {name: body.get("summary", {}).get(name, {}).get("all") for name in names}
    rows = [[name, *(entry[m] for m in measures)] for name, entry in found.items() if entry]
    return make_table(0, "completions", "Measures of the completions", columns, rows)


def visible(text: str) -> str:
    """Control characters as symbols: they have no place in HTML and would be lost."""
    shown = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate({**shown, 0x7F: 0x2421})


def _facts(source: Source) -> list[dict[str, str]]:
    model = source.model
    facts = {
        "folder": source.folder.name,
        "model": str(model["id"]),
        "weights": f"{model['num_parameters']:,}" if model.get("num_parameters") else "",
        "shape": f"{model.get('num_layers')} layers x {model.get('num_heads')} heads, "
        f"{model.get('num_kv_heads')} key/value heads",
        "positions": str(model.get("positions", "")),
        "weight fingerprint": str(model.get("fingerprint", "")),
    }
    for condition in source.conditions[:1]:
        provenance = (condition.diagnosis or {}).get("provenance", {})
        texts = provenance.get("texts", {})
        facts["texts"] = f"{texts.get('name', '')}: {texts.get('count', '')} texts"
        facts["text hash"] = str(texts.get("sha256", ""))
        facts["settings"] = _pairs(provenance.get("settings", {}))
        facts["versions"] = _pairs(provenance.get("versions", {}))
    main = main_run(source)
    if main is not None and main.run is not None:
        facts["plan"] = f"{main.run['plan']['targets']} ({main.run['plan']['selection']})"
        facts["recipe"] = _pairs(main.run["recipe"])
    return [{"name": name, "value": value} for name, value in facts.items() if value]


def _pairs(body: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in body.items())


def figure_entry(
    key: str, name: str, title: str, path: Path | None, *, notes: Sequence[str], missing: str
) -> dict[str, Any]:
    """One plate: the PNG inlined, with its size so that the page does not jump."""
    entry: dict[str, Any] = {
        "key": key,
        "name": name,
        "title": title,
        "notes": notes,
        "missing": missing,
        "image": "",
        "width": 0,
        "height": 0,
    }
    if path is not None:
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])  # the PNG header
        entry |= {
            "image": base64.b64encode(content).decode(),
            "width": width // 2,
            "height": height // 2,
        }
    return entry
