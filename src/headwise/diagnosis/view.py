"""What a diagnosis and a survey show: tables, and the head grid for notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from headwise.heads import Head, format_indices
from headwise.tables import Table, table

if TYPE_CHECKING:
    from headwise.diagnosis.survey import Survey
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
    layers = zip(diagnosis.model.layer_numbers, diagnosis.classes, strict=True)
    for number, (layer, row) in reversed(list(enumerate(layers))):  # layer 0 below, as in figures
        cells = "".join(
            _html_cell(diagnosis.maps, number, Head(layer, head), c) for head, c in enumerate(row)
        )
        rows.append(f"<tr><th>L{layer}</th>{cells}</tr>")
    header = "".join(f"<th>H{head}</th>" for head in range(mass.shape[1]))
    counts = diagnosis.counts
    title = f"{html.escape(diagnosis.model.id)}: {counts['sick']} of {counts['total']} sick"
    return (
        f"<div><b>{title}</b><table style='border-collapse:collapse;font:11px monospace'>"
        f"<tr><th></th>{header}</tr>{''.join(rows)}</table></div>"
    )


def _html_cell(maps: Mapping[str, np.ndarray], row: int, head: Head, label: str) -> str:
    at = row, head.index
    numbers = [f"{name} {value[at]:.3f}" for name, value in sorted(maps.items())]
    hover = html.escape(f"{head} {label}\n" + "\n".join(numbers), quote=True)
    return (
        f"<td title='{hover}' style='background:{CLASS_COLOURS[label]};color:#000;"
        f"text-align:center;padding:1px 3px'>{maps['first_token_mass'][at]:.2f}</td>"
    )


# In stock and after its surgery, by the same rule; attention alone was trained, so it cannot move.
PAPER_DORMANCY = 0.0875


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """The counts and what they depend on."""
    counts, sweep = diagnosis.counts, diagnosis.threshold_sweep
    rows = [
        (name, f"{counts[name]} ({counts[name] / counts['total']:.1%})")
        for name in ("healthy", "low_entropy", "sink", "dead", "sick")
    ]
    rows.append(("sick at 0.40 / 0.50 / 0.60", " / ".join(map(str, sweep.counts.values()))))
    rows.append(("share with mass 0.4 to 0.6", f"{sweep.share_between:.1%}"))
    rows.append(("valley depth (1 empty, 0 none)", f"{sweep.depth:.2f}"))
    if diagnosis.model.positions == "alibi":  # elsewhere an index means nothing
        rows.append(("band (head indices)", ", ".join(map(str, diagnosis.band)) or "none"))
    if diagnosis.sink_rate:
        rate = diagnosis.sink_rate
        rows.append((f"Gu's sink rate (mass > {rate.epsilon})", f"{rate.value:.1%}"))
    if diagnosis.mlp_dormancy:
        share = f"{diagnosis.mlp_dormancy.share:.2%}"
        if diagnosis.model.model_type == "bloom":
            share += f" ({PAPER_DORMANCY:.2%} in the paper's BLOOM-1b7)"
        rows.append(("dormant MLP neurons", share))
    return table(diagnosis.model.short_name, ("heads", "count"), rows)


def survey_table(survey: Survey) -> Table:
    """The cross-scale table (paper Table 1, layer shares computed rightly)."""
    columns = ("model", "weights", "heads", "sick", "band", "layers sick in band", "slope~sick")
    rows = []
    for row in survey.rows:
        low, high = row.band_layer_share_min, row.band_layer_share_max
        rho = row.spearman_slope_sick_share
        rows.append(
            (
                row.model,
                "" if row.num_parameters is None else f"{row.num_parameters / 1e6:,.0f} M",
                f"{row.num_layers} x {row.num_heads}",
                f"{row.sick} of {row.total_heads} ({row.sick_share:.1%})",
                format_indices(row.band),
                "" if low is None else f"{low:.0%} to {high:.0%}",
                "" if rho is None else f"{rho:.2f}",
            )
        )
    how = list(dict.fromkeys(row.read for row in survey.rows if row.read))
    return table("survey" + f" ({'; '.join(how)})" * bool(how), columns, rows)
