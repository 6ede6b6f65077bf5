"""`docs/schemas.md`, made of the saved values: `python tests/schemas_page.py` rewrites it.

A saved value is a frozen dataclass, and its fields are the keys of the file. What a field means is
the comment beside it in the source, so that the page cannot say something else than the code.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

# ruff: noqa: E501
from headwise.diagnosis.values import Diagnosis
from headwise.plasticity.values import CaptureInfo, PlasticitySummary
from headwise.proof.completed_texts import Completions
from headwise.proof.values import Comparison, Evaluation
from headwise.studies.summary import StudySummary
from headwise.surgery.values import RunSettings
from headwise.therapy.values import Therapy
from headwise.triaging.values import Triage

PAGE = Path(__file__).parent.parent / "docs" / "schemas.md"
# file -> (schema, value)
FILES: dict[str, tuple[str, type]] = {
    "diagnosis.json": ("diagnosis", Diagnosis),
    "triage.json": ("triage", Triage),
    "run.json": ("run", RunSettings),
    "therapy.json": ("therapy", Therapy),
    "evaluation.json": ("evaluation", Evaluation),
    "comparison.json": ("comparison", Comparison),
    "completions.json": ("completions", Completions),
    "summary.json": ("study-summary", StudySummary),
    "capture.json": ("capture", CaptureInfo),
    "plasticity.json": ("plasticity", PlasticitySummary),
}
HEAD = """# Artefacts

Every JSON file that headwise writes has `"schema": "headwise.KIND/1"`, full precision, and no time of day: the same inputs give the same bytes. Unknown
schemas and cut-off files are refused. A layer x head map is a list of layers, each a list of heads. `diagnosis.json` and others also hold what follows from these keys (`counts`, `threshold_sweep`, `band`), for readers without headwise. This page is made from the code (`python tests/schemas_page.py`).
"""


def comments(kind: type) -> dict[str, str]:
    """What is written behind or above each field of a class."""
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    lines = {
        token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    told = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            inside = [lines[n][0] for n in range(node.lineno, node.end_lineno + 1) if n in lines]
            above, at = [], node.lineno - 1
            while at in lines and lines[at][1]:
                above.insert(0, lines[at][0])
                at -= 1
            told[node.target.id] = " ".join(above + inside)
    return told


def type_name(kind: object) -> str:
    """A type as a reader of JSON knows it."""
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return text.replace("|", "or").replace("\n", " ")


def table(kind: type) -> list[str]:
    known = comments(kind)
    annotations = {field.name: field.type for field in fields(kind)}
    rows = [
        f"| `{name.rstrip('_')}` | {type_name(annotations[name])} | {known.get(name, '')} |"
        for name in annotations
        if not name.startswith("_")
    ]
    return ["| key | type | |", "|---|---|---|", *rows, ""]


def records_in(kind: type, seen: dict[str, type]) -> None:
    """All values below a value, each once, by name."""

    def visit(hint: object) -> None:
        if isinstance(hint, type) and is_dataclass(hint):
            if hint.__name__ not in seen:
                seen[hint.__name__] = hint
                records_in(hint, seen)
            return
        for part in get_args(hint):
            visit(part)

    for hint in get_type_hints(kind).values():
        visit(hint)


def page() -> str:
    lines, shared = [HEAD], {}
    for file, (schema, kind) in FILES.items():
        summary = inspect.getdoc(kind).splitlines()[0]
        lines += [f"## `{file}`", "", f"`headwise.{schema}/1`. {summary}", "", *table(kind)]
        records_in(kind, shared)
    lines += ["## Values inside them", ""]
    for name in sorted(shared):
        lines += [f"### {name}", "", inspect.getdoc(shared[name]).splitlines()[0], ""]
        lines += table(shared[name])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
