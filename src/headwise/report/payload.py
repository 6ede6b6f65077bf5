"""The data that `report.html` carries for its head grid: every head, measure, step and condition.

Numbers are cut to five significant digits and long runs to 60 checkpoints, so that the page stays
small; the artefacts keep everything. A measure appears only if some condition has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from headwise.diagnosis.roles import PROBE, ROLE_NAMES, ROLES
from headwise.diagnosis.values import CLASSES, Diagnosis
from headwise.proof.zones import Map
from headwise.report.source import MASS, Condition, Source
from headwise.report.verdict import main_run
from headwise.tables import Table
from headwise.triaging.values import TRIAGE_CLASSES
from headwise.triaging.view import TRIAGE_LETTERS
from headwise.values import to_plain

MAX_STEPS = 60


@dataclass(frozen=True)
class ShownMeasure:
    """One measure of the head grid: how it is named, coloured and printed."""

    key: str
    label: str
    help: str
    limits: tuple[int | float, int | float] | None = None  # as JSON shows them
    unit: str = ""
    diverging: bool = False
    digits: int = 3
    names: tuple[str, ...] = ()  # of a measure that is a class: its values are their numbers
    letters: tuple[str, ...] = ()
    colours: tuple[str, ...] = ()


MEASURES = (
    ShownMeasure(
        MASS,
        "first-token mass",
        "Mean share of attention on the first token. Above 0.5 a head is sick, above 0.95 dead.",
        (0, 1),
    ),
    ShownMeasure(
        "change",
        "change from stock",
        "Change of first-token mass from stock: blue fell, red rose.",
        (-0.5, 0.5),
        diverging=True,
    ),
    ShownMeasure(
        "ablation",
        "ablation cost",
        "Rise of held-out loss when the head's output is set to zero; above zero it is of use.",
        unit="nats",
        diverging=True,
        digits=4,
    ),
    ShownMeasure("entropy", "entropy", "Mean entropy of the attention.", unit="nats"),
    ShownMeasure("output_norm", "output norm", "Mean norm of what the head adds."),
    ShownMeasure("max_logit", "largest logit", "The largest attention logit: it can run away."),
    ShownMeasure(
        "sink_rate", "sink rate", "Share of texts on which the head's mass exceeds 0.3.", (0, 1)
    ),
    ShownMeasure(
        "constant_share",
        "constant share",
        "Share of the head's output power that is the same for every token.",
        (0, 1),
    ),
    ShownMeasure(
        "plasticity",
        "plasticity",
        "Attention plasticity: how far the ranking of keys depends on the query.",
        (0, 1),
    ),
    ShownMeasure(
        "normalized_entropy",
        "normalised entropy",
        "Entropy over its maximum at that position.",
        (0, 1),
    ),
    ShownMeasure("local_mass", "local mass", "Attention on the last three tokens.", (0, 1)),
    ShownMeasure(
        "value_norm_ratio",
        "value norm of token 0",
        "Norm of the first token's value over the others': sinks often make it small.",
    ),
    ShownMeasure(
        "triage",
        "triage class",
        "Why a sick head of the stock model is sick, as `headwise triage` measured it.",
        (0, len(TRIAGE_CLASSES) - 1),
        names=TRIAGE_CLASSES,
        letters=tuple(TRIAGE_LETTERS[name][0] for name in TRIAGE_CLASSES),
        colours=tuple(TRIAGE_LETTERS[name][1] for name in TRIAGE_CLASSES),
    ),
    ShownMeasure(
        "role",
        "role",
        "What the head does most: the attention on a set of keys, above chance.",
        (0, len(ROLE_NAMES) - 1),
        names=tuple(name.replace("_", " ") for name in ROLE_NAMES),
        letters=("·", *(role.letter for role in ROLES)),
        colours=("#e0e0e0", *(role.colour for role in ROLES)),
    ),
    *(
        ShownMeasure(
            role.name,
            f"role: {role.label}",
            f"Attention on {role.counts}, minus what chance gives.",
            (0, 1),
        )
        for role in ROLES
    ),
    ShownMeasure(
        PROBE,
        "role: induction probe",
        "Random tokens, repeated: attention on the token after the first copy, minus chance.",
        (0, 1),
    ),
)
Interval3 = list[float]  # value, low, high


def page_payload(source: Source, tables: Sequence[Table]) -> dict[str, Any]:
    """All that the script needs, ready for JSON."""
    shown = [(c, c.diagnosis) for c in source.conditions if c.diagnosis is not None]
    conditions = [_condition(condition, diagnosis) for condition, diagnosis in shown]
    modes = [condition.mode for condition, _ in shown]
    stock = modes.index("stock") if source.runs and "stock" in modes else -1
    keys = {key for c in conditions for key in c["maps"]}
    keys |= {"change"} if stock >= 0 else set()
    keys |= {"ablation"} if any(c["ablation"] for c in conditions) else set()
    triage = _triage(source, shown[0][1]) if shown else None
    keys |= {"triage"} if triage else set()
    main = main_run(source)
    names = [condition.key for condition, _ in shown]
    layers, heads = shown[0][1].model.shape if shown else (0, 0)
    return {
        "tables": {table.key: table.to_csv() for table in tables},
        "layers": layers,
        "numbers": list(shown[0][1].model.layer_numbers) if shown else [],
        "sliding": shown[0][1].model.sliding_rows if shown else [],
        "heads": heads,
        "thresholds": to_plain(shown[0][1].thresholds) if shown else {},
        "buckets": _buckets([diagnosis for _, diagnosis in shown]),
        "classes": CLASSES,
        "conditions": conditions,
        "measures": [_shown(row) for row in MEASURES if row.key in keys],
        "triage": triage,
        "stock": stock,
        "open": names.index(main.key) if main is not None and main.key in names else 0,
        "start": _start(source, shown[0][1]) if shown else [0, 0],
    }


def _shown(row: ShownMeasure) -> dict[str, Any]:
    """A measure as the script reads it; what only classes have is left out elsewhere."""
    return {key: value for key, value in to_plain(row).items() if value != []}


def _triage(source: Source, shown: Diagnosis) -> list[list[int | None]] | None:
    """[layer][head] of the class's number; None where a head was not judged."""
    if source.triage is None or source.triage.model.shape != shown.model.shape:
        return None
    heads = source.triage.heads
    return [
        [
            TRIAGE_CLASSES.index(heads[name].class_)
            if (name := f"L{layer}H{head}") in heads
            else None
            for head in range(shown.model.num_heads)
        ]
        for layer in shown.model.layer_numbers
    ]


def _condition(condition: Condition, diagnosis: Diagnosis) -> dict[str, Any]:
    zones, steps = condition.zones, _thinned(condition.steps)
    assert zones is not None  # a diagnosis has a shape
    named = {row.key for row in MEASURES}
    maps = {name: short(value) for name, value in diagnosis.maps.items() if name in named}
    if diagnosis.roles:
        maps["role"] = [[ROLE_NAMES.index(name) for name in row] for row in diagnosis.roles]
    if condition.plasticity is not None:
        maps["plasticity"] = short(condition.plasticity.maps["plasticity"])
    arm = condition.arm if condition.number == 1 else f"{condition.arm}, pass {condition.number}"
    profile, pooled = diagnosis.profile, diagnosis.pooled
    return {
        "key": condition.key,
        "label": condition.label,
        "armLabel": arm,
        "seed": condition.seed,
        "mode": condition.mode,
        "maps": maps,
        "classes": [[CLASSES.index(name) for name in row] for row in diagnosis.classes],
        "profile": None if profile is None else short(profile.first_token_mass),
        "pooled": None if pooled is None else short(pooled.maps, 3),
        "waking": None if diagnosis.waking is None else to_plain(diagnosis.waking),
        "ablation": _ablation(condition, diagnosis),
        "operated": zones.operated.astype(int).tolist(),
        "watched": zones.watched.astype(int).tolist(),
        "before": None if condition.before is None else short(condition.before),
        "steps": [step for step, _ in steps],
        "stepMaps": [short(mass) for _, mass in steps],
        **_film(condition),
    }


def _film(condition: Condition) -> dict[str, Any]:
    """Every measure of a film step by step, and its alarms as marks."""
    film = condition.film
    if film is None:
        return {}
    readings = _thinned(
        [(place, reading.maps[MASS]) for place, reading in enumerate(film.readings)]
    )
    chosen = [film.readings[place] for place, _ in readings]
    named = {row.key for row in MEASURES} & set(chosen[0].maps)
    maps = {name: [short(reading.maps[name]) for reading in chosen] for name in sorted(named)}
    marks = [[alarm.step, alarm.head, alarm.kind] for alarm in film.alarms]
    return {"film": maps, "marks": marks}


def _thinned(steps: Sequence[tuple[int, Map]]) -> list[tuple[int, Map]]:
    """At most 60 checkpoints, evenly spread, first and last kept."""
    if len(steps) <= MAX_STEPS:
        return list(steps)
    places = np.unique(np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int))
    return [steps[int(place)] for place in places]


def _ablation(condition: Condition, diagnosis: Diagnosis) -> list[list[Interval3 | None]] | None:
    """[layer][head] of [value, low, high]; None where the head was not ablated."""
    rows = [
        [condition.ablation(f"L{layer}H{head}") for head in range(diagnosis.model.num_heads)]
        for layer in diagnosis.model.layer_numbers
    ]
    if not any(cost for row in rows for cost in row):
        return None
    return [
        [
            None if cost is None else [_cut(x) for x in (cost.value, cost.low, cost.high)]
            for cost in row
        ]
        for row in rows
    ]


def _buckets(diagnoses: Sequence[Diagnosis]) -> list[str]:
    for diagnosis in diagnoses:
        profile = diagnosis.profile
        if profile is not None:
            pairs = zip(profile.bucket_start, profile.bucket_stop, strict=True)
            return [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairs]
    return []


def _start(source: Source, first: Diagnosis) -> list[int]:
    """The head shown first: the sickest in stock that was operated on, or else the sickest."""
    mass = first.maps[MASS].copy()
    main = main_run(source)
    zones = None if main is None else main.zones
    if zones is not None and zones.operated.any() and zones.operated.shape == mass.shape:
        mass[~zones.operated] = -1
    layer, head = np.unravel_index(int(np.argmax(mass)), mass.shape)
    return [int(layer), int(head)]


def short(value: Any, digits: int = 5) -> Any:
    """Nested lists with every number cut to a few significant digits."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [short(item, digits) for item in value]
    return None if value is None else _cut(value, digits)


def _cut(value: float, digits: int = 5) -> int | float:
    return float(f"{value:.{digits}g}") or 0  # 0 is shorter than 0.0, and half a pooled map


def as_script(payload: Any) -> Markup:
    """JSON that cannot end its script element or be read as markup."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # every character with a meaning in HTML was replaced above
