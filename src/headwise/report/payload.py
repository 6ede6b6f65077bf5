"""The data that `report.html` carries for its head grid: every head, measure, step and condition.

Numbers are cut to five significant digits and long runs to 60 checkpoints, so that the page stays
small; the artefacts keep everything. A measure appears only if some condition has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from headwise.report.source import MASS, Condition, Source
from headwise.report.tables import Table, to_csv
from headwise.report.verdict import main_run

MAX_STEPS = 60


CLASSES = ("healthy", "low_entropy", "sink", "dead")


# key, label, unit, fixed limits, diverging, digits, help
MEASURES: tuple[tuple[str, str, str, tuple[float, float] | None, bool, int, str], ...] = (
    (
        MASS,
        "first-token mass",
        "",
        (0, 1),
        False,
        3,
        "Mean share of attention on the first token. Above 0.5 a head is sick, above 0.95 dead.",
    ),
    (
        "change",
        "change from stock",
        "",
        (-0.5, 0.5),
        True,
        3,
        "Change of first-token mass from stock: blue fell, red rose.",
    ),
    (
        "ablation",
        "ablation cost",
        "nats",
        None,
        True,
        4,
        "Rise of held-out loss when the head's output is set to zero; above zero it is of use.",
    ),
    ("entropy", "entropy", "nats", None, False, 3, "Mean entropy of the attention."),
    ("output_norm", "output norm", "", None, False, 3, "Mean norm of what the head adds."),
    (
        "constant_share",
        "constant share",
        "",
        (0, 1),
        False,
        3,
        "Share of the head's output power that is the same for every token.",
    ),
    (
        "plasticity",
        "plasticity",
        "",
        (0, 1),
        False,
        3,
        "Attention plasticity: how far the ranking of keys depends on the query.",
    ),
    (
        "normalized_entropy",
        "normalised entropy",
        "",
        (0, 1),
        False,
        3,
        "Entropy over its maximum at that position.",
    ),
    ("local_mass", "local mass", "", (0, 1), False, 3, "Attention on the last three tokens."),
    (
        "value_norm_ratio",
        "value norm of token 0",
        "",
        None,
        False,
        3,
        "Norm of the first token's value over the others': sinks often make it small.",
    ),
)


def page_payload(source: Source, tables: Sequence[Table]) -> dict[str, Any]:
    """All that the script needs, ready for JSON."""
    shown = [c for c in source.conditions if c.diagnosis is not None]
    conditions = [_condition(c) for c in shown]
    first = None if not shown else shown[0].diagnosis
    keys = {key for c in conditions for key in c["maps"]}
    stock = next((i for i, c in enumerate(shown) if c.mode == "stock" and source.runs), -1)
    keys |= {"change"} if stock >= 0 else set()
    keys |= {"ablation"} if any(c["ablation"] for c in conditions) else set()
    main = main_run(source)
    return {
        "tables": {table.key: to_csv(table) for table in tables},
        "layers": 0 if first is None else len(first["classes"]),
        "heads": 0 if first is None else len(first["classes"][0]),
        "thresholds": {} if first is None else first["thresholds"],
        "buckets": _buckets(shown),
        "classes": CLASSES,
        "conditions": conditions,
        "measures": [_measure(row) for row in MEASURES if row[0] in keys],
        "stock": stock,
        "open": next((i for i, c in enumerate(shown) if main and c.key == main.key), 0),
        "start": _start(source, shown),
    }


def _measure(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("key", "label", "unit", "limits", "diverging", "digits", "help")
    return dict(zip(names, row, strict=True))


def _condition(condition: Condition) -> dict[str, Any]:
    body = condition.diagnosis or {}
    operated, watched = condition.zone("operated"), condition.zone("watched")
    steps = _thinned(condition.steps)
    named = {row[0] for row in MEASURES}
    maps = {name: short(value) for name, value in body["maps"].items() if name in named}
    if condition.plasticity is not None:
        maps["plasticity"] = short(condition.plasticity.maps.plasticity)
    arm = condition.arm if condition.number == 1 else f"{condition.arm}, pass {condition.number}"
    return {
        "key": condition.key,
        "label": condition.label,
        "armLabel": arm,
        "seed": condition.seed,
        "mode": condition.mode,
        "maps": maps,
        "classes": [[CLASSES.index(name) for name in row] for row in body["classes"]],
        "profile": short(body["profile"][MASS]) if body.get("profile") else None,
        "pooled": short(body["pooled"]["maps"], 3) if body.get("pooled") else None,
        "ablation": _ablation(condition),
        "operated": np.asarray(operated, dtype=int).tolist(),
        "watched": np.asarray(watched, dtype=int).tolist(),
        "before": None if condition.before is None else short(condition.before.tolist()),
        "steps": [step for step, _ in steps],
        "stepMaps": [short(mass.tolist()) for _, mass in steps],
    }


def _thinned(steps: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """At most 60 checkpoints, evenly spread, first and last kept."""
    if len(steps) <= MAX_STEPS:
        return list(steps)
    places = np.unique(np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int))
    return [steps[int(place)] for place in places]


def _ablation(condition: Condition) -> list[list[list[float] | None]] | None:
    """[layer][head] of [value, low, high]; None where the head was not ablated."""
    if condition.evaluation is None or condition.diagnosis is None:
        return None
    rows = [
        [condition.ablation(f"L{layer}H{head}") for head in range(len(row))]
        for layer, row in enumerate(condition.diagnosis["classes"])
    ]
    if not any(cell for row in rows for cell in row):
        return None
    keys = ("value", "low", "high")
    return [
        [None if cell is None else [_cut(cell[k]) for k in keys] for cell in row] for row in rows
    ]


def _buckets(shown: Sequence[Condition]) -> list[str]:
    for condition in shown:
        profile = (condition.diagnosis or {}).get("profile")
        if profile:
            pairs = zip(profile["bucket_start"], profile["bucket_stop"], strict=True)
            return [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairs]
    return []


def _start(source: Source, shown: Sequence[Condition]) -> list[int]:
    """The head shown first: the sickest in stock that was operated on, or else the sickest."""
    if not shown:
        return [0, 0]
    mass = shown[0].maps[MASS].copy()
    main = main_run(source)
    operated = None if main is None else main.zone("operated")
    if operated is not None and operated.any() and operated.shape == mass.shape:
        mass[~operated] = -1
    layer, head = np.unravel_index(int(np.argmax(mass)), mass.shape)
    return [int(layer), int(head)]


def short(value: Any, digits: int = 5) -> Any:
    """Nested lists with every number cut to a few significant digits."""
    if isinstance(value, (list, tuple)):
        return [short(item, digits) for item in value]
    return None if value is None else _cut(value, digits)


def _cut(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}") or 0  # 0 is shorter than 0.0, and half a pooled map


def as_script(payload: Any) -> Markup:
    """JSON that cannot end its script element or be read as markup."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # every character with a meaning in HTML was replaced above
