"""What the terminal shows: tables and the coloured head grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.diagnosis.notebook import CLASS_COLOURS
from headwise.proof.evaluation import JOINT

if TYPE_CHECKING:
    from headwise.diagnosis.values import Diagnosis
    from headwise.intervals import Interval
    from headwise.plasticity.run import Plasticity
    from headwise.proof.comparison import Comparison
    from headwise.proof.completed_texts import Completions
    from headwise.proof.evaluation import Evaluation

CLASS_LETTERS = {"healthy": "·", "low_entropy": "e", "sink": "s", "dead": "D"}


def console(quiet: bool = False) -> Console:
    """Standard output; silent if asked."""
    return Console(quiet=quiet, highlight=False, soft_wrap=True)


def head_grid(diagnosis: Diagnosis, name: str = "first_token_mass") -> Text:
    """Layers down, heads across: background by class, the digit is the mass in tenths."""
    mass = diagnosis.maps[name]
    text = Text("layer\\head ")
    text.append("".join(f"{h % 100:>3}" for h in range(mass.shape[1])) + "\n", style="dim")
    for layer, row in enumerate(diagnosis.classes):
        text.append(f"{layer:>10} ", style="dim")
        for head, label in enumerate(row):
            digit = CLASS_LETTERS[label] + f"{min(int(mass[layer, head] * 10), 9)}"
            text.append(f" {digit}", style=f"black on {CLASS_COLOURS[label]}")
        text.append("\n")
    text.append("           ")
    for name_, colour in CLASS_COLOURS.items():
        text.append(f" {CLASS_LETTERS[name_]} {name_} ", style=f"black on {colour}")
        text.append(" ")
    text.append("digit = first-token mass in tenths", style="dim")
    return text


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table; numbers are right-aligned."""
    result = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], (int, float)) for row in rows)
        result.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        result.add_row(*(cell(value) for value in row))
    return result


def cell(value: object) -> str:
    """One table cell: four significant digits for floats, two for the tiny ones."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    return "" if value is None else str(value)


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """The counts and what they depend on."""
    counts = diagnosis.counts
    total = counts["total"]
    rows: list[tuple[str, str]] = [
        (name, f"{counts[name]} ({counts[name] / total:.1%})")
        for name in ("healthy", "low_entropy", "sink", "dead", "sick")
    ]
    sweep = diagnosis.threshold_sweep
    rows.append(("sick at 0.40 / 0.50 / 0.60", " / ".join(map(str, sweep.counts.values()))))
    rows.append(("share with mass 0.4 to 0.6", f"{sweep.share_between:.1%}"))
    rows.append(("valley depth (1 empty, 0 none)", f"{sweep.valley.depth:.2f}"))
    rows.append(("band (head indices)", ", ".join(map(str, diagnosis.band.indices)) or "none"))
    if diagnosis.sink_rate:
        rows.append(
            (
                f"Gu's sink rate (mass > {diagnosis.sink_rate.epsilon})",
                f"{diagnosis.sink_rate.value:.1%}",
            )
        )
    if diagnosis.mlp_dormancy:
        rows.append(("dormant MLP neurons", f"{diagnosis.mlp_dormancy.share:.2%}"))
    return table(diagnosis.model.id, ("heads", "count"), rows)


def evaluation_tables(found: Evaluation) -> list[Table]:
    """Perplexities, and the heads that matter most."""
    losses = [
        [name, entry.documents, entry.predicted_tokens, _interval(entry.perplexity)]
        for name, entry in found.text_sets.items()
    ]
    tables = [table("perplexity (95% interval)", ("texts", "documents", "tokens", "ppl"), losses)]
    costs = found.heads.ablation_zero
    order = sorted(costs, key=lambda name: -costs[name].value)
    shown = [name for name in order if name.startswith(JOINT)]
    shown += [name for name in order if not name.startswith(JOINT)][:8]
    rows = [[name, _interval(costs[name].interval)] for name in shown]
    if rows:
        tables.append(table("loss without the head (nats per token)", ("head", "change"), rows))
    if found.recovery:
        keys = ("operated", "not_sick", "judged", "functional")
        row = [getattr(found.recovery, key) for key in keys]
        columns = ("operated", "not sick", "judged by ablation", "functionally recovered")
        tables.append(table("recovery", columns, [row]))
    return tables


def _interval(found: Interval) -> str:
    return f"{found.value:.4g} ({found.low:.4g} to {found.high:.4g})"


def comparison_tables(found: Comparison) -> list[Table]:
    """Class counts, drift by zone and paired losses."""
    moves = found.transitions
    before, after = moves.counts_before, moves.counts_after
    counts = [[name, before[name], after[name]] for name in before]
    tables = [table("heads", ("class", "before", "after"), counts)]
    silent = [
        ["iatrogenic (fell ill untreated)", len(moves.iatrogenic_untreated)],
        ["self-healed (healed untreated)", len(moves.self_healed)],
        ["treated, no longer sick", len(moves.treated_no_longer_sick)],
    ]
    tables.append(table("transitions", ("", "heads"), silent))
    drifts = {zone: getattr(found.drift, zone) for zone in ("operated", "watched", "outside")}
    zones = [
        [
            zone,
            d.heads,
            d.movable,
            d.drifting,
            d.mean_abs_delta,
            d.worst and f"{d.worst.head} {d.worst.delta:+.3f}",
        ]
        for zone, d in drifts.items()
    ]
    columns = ("zone", "heads", "movable", "|change| > 0.05", "mean |change|", "worst")
    tables.append(table("drift of first-token mass", columns, zones))
    losses = [[n, _interval(e.difference), e.verdict] for n, e in found.losses.items()]
    if losses:
        tables.append(
            table("loss after - before, paired", ("texts", "nats per token", "verdict"), losses)
        )
    if found.plasticity:
        moved = [[zone, mean] for zone, mean in found.plasticity.mean_delta.items()]
        tables.append(table("change of plasticity", ("zone", "mean change"), moved))
    return tables


def completions_table(found: Completions) -> Table:
    """The measures of every condition, as means over all prompts."""
    columns = ("condition", "words", "distinct-2", "repetition", "markup")
    keys = ("words", "distinct_2", "repetition", "markup_share")
    rows = [[name, *(s["all"][key] for key in keys)] for name, s in found.summary().items()]
    return table("completions", columns, rows)


def bench_tables(name: str, rows: Sequence[Mapping[str, object]]) -> list[Table | str]:
    """A benchmark's rows; what is the same in all of them and what is a remark stands below."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "note"))
    same = [key for key in keys if len(rows) > 1 and len({str(row.get(key)) for row in rows}) == 1]
    shown = [key for key in keys if key not in same]
    cells = [[row.get(key) for key in shown] for row in rows]
    headings = [key.replace("_", " ") for key in shown]  # wrap at blanks
    below = [f"{key}: {cell(rows[0].get(key))}" for key in same]
    below += [
        f"{row.get('way', '')} at {row.get('length', '')}: {row['note']}"
        for row in rows
        if row.get("note")
    ]
    return [table(name, headings, cells), *below]


def cost_tables(name: str, rows: Sequence[Sequence[object]]) -> list[Table | str]:
    """What a study would run, and its totals; minutes and MB are the last two columns."""
    columns = ("run", "corpus", "passes", "steps", "M tokens", "minutes", "MB")
    shown: list[Table | str] = [table(f"study {name}", columns, rows)]
    if any(row[-2] is None for row in rows):
        shown.append("time and disk: unknown, the model's configuration is not at hand")
    else:
        minutes, megabytes = (sum(float(str(row[at])) for row in rows) for at in (-2, -1))
        shown.append(f"about {minutes:.0f} minutes on this machine and {megabytes:.0f} MB")
    return shown


def plasticity_table(found: Plasticity) -> Table:
    """Plasticity by layer: mean, smallest and largest head."""
    rows: dict[int, list[float]] = {}
    for head in found.heads:
        if head.ap_overall is not None:
            rows.setdefault(head.layer, []).append(head.ap_overall)
    cells = [[layer, len(v), sum(v) / len(v), min(v), max(v)] for layer, v in sorted(rows.items())]
    return table("attention plasticity", ("layer", "heads", "mean", "lowest", "highest"), cells)
