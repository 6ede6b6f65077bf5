"""`report.html`: one file with style, script, data and pictures inside; it asks for nothing else.

Texts from models and corpora pass jinja's autoescape or JSON with <, > and & replaced, and the
script writes them with textContent only. A content security policy forbids every request.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from headwise.bundled import DATA
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.proof.completed_texts import Completions
from headwise.provenance import Provenance, text_name
from headwise.report.effect import (
    perplexity_change,
    recovered_text,
    together_text,
    untested_text,
)
from headwise.report.finding import Verdict
from headwise.report.payload import as_script, page_payload
from headwise.report.source import Source
from headwise.report.verdict import main_run
from headwise.tables import Table, table
from headwise.values import to_plain

ASSETS = DATA / "report"
SCRIPTS = ("sheets.js", "heads.js", "detail.js")  # one function of several files, in this order


@dataclass(frozen=True)
class Picture:
    """One figure as PNGs for light and dark pages."""

    key: str
    title: str
    notes: tuple[str, ...]
    light: bytes = field(repr=False)
    dark: bytes = field(repr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height on the page, so that nothing jumps; PNGs have twice the pixels."""
        width, height = struct.unpack(">II", self.light[16:24])  # the PNG header
        return width // 2, height // 2


def render_page(
    source: Source,
    verdict: Verdict,
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    *,
    paper: bool,
) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": as_symbols,
        "text_name": text_name,
        "base64": lambda raw: base64.b64encode(raw).decode(),
    }
    asked = source.completions
    completions = None if asked is None or not asked.conditions else asked
    names = [] if completions is None else _ordered(completions, source.arms())
    summary = None if completions is None else _completion_table(completions, names)
    payload = page_payload(source, [*tables, *([summary] if summary else [])])
    main = main_run(source)
    return environment.get_template("template.html.j2").render(
        source=source,
        paper=paper,
        has_grid=bool(payload["conditions"]),
        several=len(payload["conditions"]) > 1 or bool(source.runs),
        css=_asset("report.css"),
        js=Markup("\n").join(_asset(name) for name in SCRIPTS),
        verdict=verdict,
        cards=_cards(source),
        main_arm="" if main is None else main.arm,
        changes=_changes(source),
        tables=tables,
        completions=completions,
        condition_names=names,
        completion_table=summary,
        pictures=pictures,
        facts=_facts(source),
        payload=as_script(payload),
    )


def _asset(name: str) -> Markup:
    # our own files, inlined as they are
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def _cards(source: Source) -> list[tuple[str, str, str]]:
    """The few numbers one remembers: name, value and a note each."""
    cards = []
    stock, main = source.stock, main_run(source)
    if stock is not None and stock.diagnosis is not None:
        counts = stock.diagnosis.counts
        note = f"{counts['dead']} dead, {counts['sink']} sinks"
        cards.append(("sick heads in stock", f"{counts['sick']} of {counts['total']}", note))
    if main is None:
        return cards
    if main.diagnosis is not None:
        counts = main.diagnosis.counts
        told = f"{counts['sick']} of {counts['total']}"
        cards.append((f"sick after {main.arm}", told, "by first-token mass alone"))
    if seeds := source.recoveries(main.arm):
        alone = "one by one: not ill, and losing it costs more than in stock"
        note = together_text(seeds) or alone
        cards.append(("functionally recovered", recovered_text(seeds), note))
    change = source.against_stock(main.arm)
    if change is not None:
        note = f"{change.low:+.4f} to {change.high:+.4f} nats per token"
        cards.append(("held-out loss", f"{change.value:+.4f}", note))
    losses = source.stock_losses()
    if change is not None and losses is not None:
        told = f"{exp(change.value) - 1:+.2%}"
        cards.append(("perplexity", told, perplexity_change(change, losses.loss.value)))
    return cards


def _changes(source: Source) -> list[tuple[str, Interval, str]]:
    """Every arm's change of loss, and how many of its heads recovered."""
    changes = [(arm, source.against_stock(arm)) for arm in source.arms()]
    seeds = {arm: source.recoveries(arm) for arm in source.arms()}
    functional = {
        arm: f"{recovered_text(some)} heads functional"
        for arm, some in seeds.items()
        if some and not untested_text(some)
    }
    return [(arm, change, functional.get(arm, "")) for arm, change in changes if change]


def _ordered(completions: Completions, arms: Sequence[str]) -> list[str]:
    """Conditions of the completions: stock, then the arms as they stand elsewhere."""
    order = ["stock", *arms]
    return sorted(
        completions.conditions, key=lambda n: (order.index(n) if n in order else len(order), n)
    )


def _completion_table(completions: Completions, names: Sequence[str]) -> Table:
    summary = completions.summary()
    measures = list(summary[names[0]]["all"])
    columns = "; ".join(["condition", *(f"{m.replace('_', ' ')} [.3f]" for m in measures)])
    rows = [[name, *(summary[name]["all"][m] for m in measures)] for name in names]
    return table("Measures of the completions", columns, rows, key="completions")


def as_symbols(text: str) -> str:
    """Control characters as symbols: they have no place in HTML and would be lost."""
    shown = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return text.translate({**shown, 0x7F: 0x2421})


def _facts(source: Source) -> dict[str, str]:
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
    return {name: value for name, value in facts.items() if value}


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
