"""The tables of docs/results.md, made anew from the small artefacts beside this file.

    python docs/data/tables.py            # prints them
    python docs/data/tables.py --write    # puts them into docs/results.md
    python docs/data/tables.py --pack /work/measured    # the artefacts, from what was measured

No model is needed. On the page a table stands between `<!-- table NAME -->` and `<!-- end -->`, and
`tests/test_results.py` compares it with what this file makes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PAGE = HERE.parent / "results.md"
BLOOM = HERE.parent.parent / "src" / "headwise" / "data" / "bloom"
DRAWS = 2000
ARMS = {
    "auto": "auto, 0 steps",
    "auto-60": "auto, 60",
    "as-they-are-60": "as they are, 60",
    "lora-60": "lora, 60",
    "surgery-60": "surgery, 60",
}
PATIENTS = {
    "asleep:6": "asleep by queries, 6 heads",
    "asleep:12": "asleep by queries, 12 heads",
    "keys:6": "asleep by keys",
    "half:6": "half asleep",
    "noise:6": "values and outputs are noise",
    "second:6": "sink on the second token",
    "flat:6": "flat attention, W_q = 0",
    "rotated:6": "values rotated",
    "collapsed:7": "collapsed, 7 heads, all weights free",
}
Row = dict[str, Any]


def lines_of(name: str) -> list[Row]:
    """The rows of a .jsonl beside this file."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def sums(rows: Sequence[Row], name: str) -> np.ndarray:
    """A value of every document, added over seeds."""
    return np.array([row[name] for row in rows]).sum(0)


def resampled(documents: int) -> np.ndarray:
    """All documents once, then draws of as many with replacement."""
    draws = np.random.default_rng(0).integers(0, documents, (DRAWS, documents))
    return np.concatenate([np.arange(documents)[None], draws])


def interval(values: np.ndarray, form: str) -> str:
    """The first value, and the 95% interval of the others."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return f"{values[0]:{form}} ({low:{form}} to {high:{form}})"


def share(rows: Sequence[Row]) -> str:
    """What is undone of the harm, over seeds, with each seed's share beside it."""
    at = resampled(len(rows[0]["tokens"]))
    healthy, ill, loss = (sums(rows, name)[at].sum(1) for name in ("healthy", "ill", "loss"))
    shares = 100 * (ill - loss) / (ill - healthy)
    low, high = np.quantile(shares[1:], (0.025, 0.975))
    each = [100 * _undone(row) for row in sorted(rows, key=lambda row: row["seed"])]
    told = ", ".join(f"{one:.0f}" for one in each)
    seeds = sorted(row["seed"] for row in rows)
    some = "" if seeds == [0, 1, 2] else f" (seed {', '.join(map(str, seeds))})"
    return f"{shares[0]:.0f}% ({low:.0f} to {high:.0f}); {told}{some}"


def _undone(row: Row) -> float:
    healthy, ill, loss = (float(np.sum(row[name])) for name in ("healthy", "ill", "loss"))
    return (ill - loss) / (ill - healthy)


def diseases() -> str:
    """The share of the known harm that each arm undoes."""
    found = lines_of("undone")
    arms = {arm: told for arm, told in ARMS.items() if any(row["arm"] == arm for row in found)}
    rows = []
    for patient, name in PATIENTS.items():
        some = [row for row in found if row["patient"] == patient]
        if not some:
            continue
        harms = {
            row["seed"]: (np.sum(row["ill"]) - np.sum(row["healthy"])) / np.sum(row["tokens"])
            for row in some
        }
        harm = ", ".join(f"{harms[seed]:.2f}" for seed in sorted(harms))
        of_arms = [[row for row in some if row["arm"] == arm] for arm in arms]
        rows.append([name, harm, *(share(of) if of else "not run" for of in of_arms)])
    return markdown(["patient", "harm by seed, nats", *arms.values()], rows)


def study(name: str) -> str:
    """Every arm of a study against stock."""
    summary = json.loads((HERE / f"{name}.json").read_text())
    texts = list(next(iter(summary["against_stock"].values())))
    rows = []
    for arm, of in summary["arms"].items():
        changes = [summary["against_stock"][arm][text] for text in texts]
        first = [
            f"{c['value']:+.4f} ({c['low']:+.4f} to {c['high']:+.4f}); "
            + ", ".join(f"{one:+.3f}" for one in c["by_seed"])
            for c in changes
        ]
        recovery = [one for one in of["recovery"] if one]
        back = ", ".join(str(one["functional"]) for one in recovery)
        rows.append([arm, *first, ", ".join(map(str, of["sick"])), back or "-"])
    stock = next(iter(summary["arms"].values()))["stock_sick"]
    head = ["arm", *(f"loss against stock, {text}; by seed" for text in texts)]
    return markdown([*head, f"sick heads (stock: {stock})", "heads that came back"], rows)


def paired(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Arms of a study against each other, on its first text set."""
    between = json.loads((HERE / f"{name}.json").read_text())["between_arms"]
    rows = []
    for left, right in pairs:
        change = next(iter(between[f"{left} - {right}"].values()))
        told = f"{change['value']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})"
        rows.append([f"{left} - {right}", told])
    return markdown(["difference of loss, paired by document and seed", "nats"], rows)


def never_worse() -> str:
    """Runs, refusals, kept patches and violations by kind of model."""
    found = lines_of("never_worse")
    kinds = {"random": "random", "trained": "tiny, trained (healthy)", "sink": "patient, sinks"}
    rows = []
    for kind, name in [*kinds.items(), ("", "all")]:
        some = [row for row in found if kind in ("", row["kind"])]
        kept = [row for row in some if "like" in row]
        worse = [
            f"{sum(row[text]['value'] > 0 for row in kept)} "
            f"({sum(row[text]['low'] > 0 for row in kept)})"
            for text in ("like", "other")
        ]
        refused = sum(row["outcome"] == "refused" for row in some)
        rows.append(
            [name, len(some) - refused, refused, len(some) - refused - len(kept), len(kept), *worse]
        )
    head = ["models", "runs", "refused corpora", "empty patch", "kept"]
    return markdown([*head, "worse on like text (surely)", "worse on other text (surely)"], rows)


def masters() -> str:
    """Gradients alone in float32 and in bfloat16."""
    found = lines_of("masters")
    rows = []
    for rate, steps in sorted({(row["rate"], row["steps"]) for row in found}, reverse=True):
        for kind in ("float32", "bfloat16"):
            some = [row for row in found if (row["rate"], row["kind"]) == (rate, kind)]
            at = resampled(len(some[0]["tokens"]))
            gain = (sums(some, "after") - sums(some, "before"))[at].sum(1)
            told = interval(gain / sums(some, "tokens")[at].sum(1), "+.4f")
            moved = ", ".join(f"{100 * row['moved']:.1f}%" for row in some)
            sick = ", ".join(str(row["sick"]) for row in some)
            rows.append([f"{rate:g}", steps, kind, len(some), told, moved, sick])
    head = ["rate", "steps", "weights and AdamW in", "seeds", "loss against stock, nats"]
    return markdown([*head, "weights that moved", "sick heads after (stock: 20)"], rows)


def first_token() -> str:
    """First-token mass by length, first token and kind of text."""
    found = lines_of("first_token")
    rows = []
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in found):
        for bos in (True, False):
            cells = {
                row["length"]: f"{row['mean']:.3f}, {row['late']:.3f}, {row['above']}"
                for row in found
                if (row["model"], row["kind"], row["bos"]) == (model, kind, bos)
            }
            lengths = [64, 128, 256, 1024]
            told = [cells.get(length, "") for length in lengths]
            rows.append([model, kind, "yes" if bos else "no", *told])
    head = ["model", "text", "BOS", "64 tokens", "128", "256", "1,024"]
    return markdown(head, rows)


def claims() -> str:
    """Claims of the BLOOM paper, what its own maps say, and what ours say."""
    maps = {name: np.array(rows) for name, rows in _bloom("stock_first_token_mass").items()}
    stock, deltas = maps["1b7"], _bloom("1b7_delta_e3")
    operated = np.zeros(stock.shape, bool)
    for name in _bloom("1b7_operated_heads_after_e3")["curated_e3"]:
        layer, head = name[1:].split("H")
        operated[int(layer), int(head)] = True
    above = [int((stock > mass).sum()) for mass in (0.4, 0.5, 0.6)]
    ranks = [_rank_correlation((mass > 0.5).mean(0)) for mass in maps.values()]
    sick = [100 * float((mass > 0.5).mean()) for mass in maps.values()]
    curated = stock + np.array(deltas["cur"])
    fell_ill = int(((curated > 0.5) & (stock <= 0.5) & ~operated).sum())
    rose = (int((stock[~operated] > 0.5).sum()), int((curated[~operated] > 0.5).sum()))
    healthy = 100 * float((stock <= 0.5).mean())
    outside = np.ones(stock.shape, bool)
    outside[5:23, 9:] = False
    first = min(layer for layer, _ in zip(*np.nonzero(operated), strict=True))
    movable = outside & (np.arange(len(stock)) > first)[:, None]
    moved = int(((np.abs(curated - stock) > 0.05) & movable).sum())
    sham = json.loads((HERE / "controls.json").read_text())
    cleared = ", ".join(map(str, sham["arms"]["sham"]["sick"]))
    change = next(iter(sham["against_stock"]["gradient-only"].values()))
    surgery = next(iter(sham["against_stock"]["surgery"].values()))
    rows = [
        [
            "first-token mass is bimodal: a threshold of 0.40 or 0.60 gives nearly the same heads",
            "139 of 384 above 0.50",
            f"bloom-1b7 has {above[0]}, {above[1]} and {above[2]} heads above 0.40, 0.50 and 0.60",
            "does not hold",
        ],
        [
            "collapsed heads attend almost entirely to the first token",
            "-",
            f"{int((stock > 0.8).sum())} of {above[1]} are above 0.8, {int((stock > 0.95).sum())} "
            "above 0.95",
            "does not hold",
        ],
        [
            "upper indices collapse because their ALiBi slopes are the steepest",
            "heads 9 to 15 of bloom-1b7",
            "slopes fall with the index; rank correlation of index and share of sick layers "
            + ", ".join(f"{rank:+.2f}" for rank in ranks)
            + " (560m to 7b1)",
            "the band holds, the reason is upside down: the shallowest slopes collapse",
        ],
        [
            "collapse decreases with scale",
            "44.0, 36.2, 38.0, 30.8%",
            ", ".join(f"{share:.1f}%" for share in sick),
            "the counts hold; the fall is not steady",
        ],
        [
            "surgery recovers 98.7% of heads",
            "379 of 384",
            f"{healthy:.1f}% were healthy before; and the sham, which learns nothing, leaves "
            f"{cleared} of 20 sick heads in the patient",
            "the count is of first-token mass, which proves nothing",
        ],
        [
            "harm to other heads is rare",
            "two heads of layer 23",
            f"{fell_ill} heads that were neither sick nor operated on are sick after pass 1; sick "
            f"heads outside the surgery: {rose[0]} before, {rose[1]} after",
            "does not hold",
        ],
        [
            "a part of the other heads drifts",
            "76 of 258 outside the band",
            f"{outside.sum() - movable.sum()} of the {outside.sum()} lie no later than the first "
            f"operated layer and cannot move; of the others {moved} of {movable.sum()} do",
            "understated",
        ],
        [
            "training without surgery recovers nothing",
            "gradient-only, bfloat16",
            f"patient, float32: gradient-only {change['value']:+.3f} nats, surgery "
            f"{surgery['value']:+.3f} (table of controls; bfloat16: below)",
            "does not hold in float32 on the patient; cannot be told for BLOOM",
        ],
        [
            "the repaired model is better",
            "training perplexity 16.99 to 15.10",
            "the paper's own held-out perplexity rises from 21.45 to 27.52 and 28.76",
            "does not hold on text it was not trained for",
        ],
    ]
    return markdown(["claim", "published", "what the data say", "verdict"], rows)


def _bloom(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BLOOM / f"bloom_{name}.json").read_text())
    return found


def _rank_correlation(values: np.ndarray) -> float:
    """Spearman's, of a value per index with the index; equal values share their mean rank."""
    ranks = np.array([(values < one).sum() + ((values == one).sum() - 1) / 2 for one in values])
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


CONTROLS = (
    ("surgery", "sham"),
    ("surgery", "gradient-only"),
    ("surgery", "random-heads"),
)
TABLES = {
    "diseases": diseases,
    "controls": lambda: study("controls"),
    "controls-paired": lambda: paired("controls", CONTROLS),
    "never-worse": never_worse,
    "claims": claims,
    "masters": masters,
    "first-token": first_token,
}


def on_page(page: str) -> dict[str, str]:
    """The tables of a page, by name."""
    return dict(re.findall(r"<!-- table ([\w-]+) -->\n(.*?)<!-- end -->", page, re.DOTALL))


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, old in on_page(page).items():
        start = f"<!-- table {name} -->\n"
        page = page.replace(f"{start}{old}<!-- end -->", f"{start}{TABLES[name]()}<!-- end -->")
    return page


def pack(measured: Path) -> None:
    """Copy what the tables need, with fewer digits where there is a value for each document."""
    for name in ("undone", "masters"):
        path = measured / f"{name}.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            _write(name, [{key: _short(value) for key, value in row.items()} for row in rows])
    for name in ("never_worse", "first_token"):
        path = measured / f"{name}.jsonl"
        if path.exists():
            _write(name, [json.loads(line) for line in path.read_text().splitlines()])
    path = measured / "controls" / "summary.json"
    if path.exists():
        (HERE / "controls.json").write_text(path.read_text())


def _short(value: Any) -> Any:
    many = isinstance(value, list) and value and isinstance(value[0], float)
    return [round(one, 2) for one in value] if many else value


def _write(name: str, rows: Sequence[Row]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (HERE / f"{name}.jsonl").write_text(text)


def main() -> None:
    """Print the tables, put them into the page, or renew the artefacts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--pack", type=Path)
    asked = parser.parse_args()
    if asked.pack:
        pack(asked.pack)
    elif asked.write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        for name, make in TABLES.items():
            sys.stdout.write(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
