"""A diagnosis in a notebook: the head grid as an HTML table."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.diagnosis.values import Diagnosis


# Okabe-Ito: told apart by colour-blind readers
CLASS_COLOURS = {
    "healthy": "#56B4E9",
    "low_entropy": "#F0E442",
    "sink": "#E69F00",
    "dead": "#D55E00",
}


def grid_html(diagnosis: Diagnosis) -> str:
    """The head grid as an HTML table, for notebooks; hover shows the numbers."""
    mass = diagnosis.maps["first_token_mass"]
    rows = []
    for layer, row in enumerate(diagnosis.classes):
        cells = "".join(_html_cell(diagnosis.maps, layer, head, c) for head, c in enumerate(row))
        rows.append(f"<tr><th>L{layer}</th>{cells}</tr>")
    header = "".join(f"<th>H{head}</th>" for head in range(mass.shape[1]))
    counts = diagnosis.counts
    title = f"{html.escape(diagnosis.model.id)}: {counts['sick']} of {counts['total']} sick"
    return (
        f"<div><b>{title}</b><table style='border-collapse:collapse;font:11px monospace'>"
        f"<tr><th></th>{header}</tr>{''.join(rows)}</table></div>"
    )


def _html_cell(maps: Mapping[str, Any], layer: int, head: int, label: str) -> str:
    numbers = [f"{name} {value[layer, head]:.3f}" for name, value in sorted(maps.items())]
    hover = html.escape(f"L{layer}H{head} {label}\n" + "\n".join(numbers), quote=True)
    return (
        f"<td title='{hover}' style='background:{CLASS_COLOURS[label]};color:#000;"
        f"text-align:center;padding:1px 3px'>{maps['first_token_mass'][layer, head]:.2f}</td>"
    )
