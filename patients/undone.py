"""How much of a known harm a repair undoes: diseases of `sicken.py`, `auto` beside its controls.

    python patients/undone.py stories15M --texts SAMPLES.jsonl --seeds 0,1,2 --out out/undone
    python patients/small.py gpt2 --out gpt2
    python patients/undone.py gpt2 --texts patient --patients healthy,collapsed:7 --out out/undone
    python patients/undone.py --table --out out/undone

A patient is a disease and how many heads fall ill, which the seed draws; it is kept in
`OUT/patients`. A share is (ill - treated) / (ill - healthy) on held-out texts, and 0 for an empty
patch; the healthy twin has none, and its number is the change of its own loss. All arms train at
one rate, or with several `--rates` each at its best on the run's validation text, which it is
neither trained on nor measured with. The controls are told which heads are ill; `auto` is not. Rows
are appended to `OUT/rows.jsonl` with the losses of every document, and one that is there already is
not made again; `--table` prints them with 95% intervals over documents (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sicken import DISEASES, sicken

from headwise import LoadedModel, Patch, diagnose, load_model, make_plan, read_texts, repair
from headwise.forward.interventions import ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head, all_heads, format_heads
from headwise.models.architectures import geometry_of
from headwise.models.patient import patient_texts
from headwise.texts.batches import encode_for
from headwise.therapy.repair import RepairRun

PATIENTS = "healthy,asleep:6,asleep:12,keys:6,half:6,noise:6,second:6,flat:6,rotated:6"
HELD, TRAIN, LENGTH, DRAWS = 40, 600, 160, 2000
RECIPE = {
    "batch_size": 3,
    "accumulation": 1,
    "block": 128,
    "validate_every": 20,
    "save_every": 60,
    "map_every": 60,
    "validation_blocks": 16,
}
RATE = "6.7e-4"  # the rate of `treatment_recipe` at this width
# steps, and what `repair` is asked for besides
ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    "auto": (0, {"treatment": "auto"}),
    "auto-60": (60, {"treatment": "auto"}),
    "as-they-are-60": (60, {"mode": "gradient-only"}),
    "lora-60": (60, {"mode": "lora"}),
    "surgery-60": (60, {"mode": "surgery"}),
}
ROWS = "rows.jsonl"


def main() -> None:
    """Read the command line and make the rows that are missing, or print those that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a healthy model")
    parser.add_argument("--texts", help="text that it knows; `patient`: what small.py trains on")
    parser.add_argument("--patients", default=PATIENTS, help="DISEASE:HEADS,... or healthy")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rates", default=RATE)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what is there")
    asked = parser.parse_args()
    if asked.table:
        sys.stdout.write(table(known_rows(asked.out)))
        return
    if not asked.model or not asked.texts:
        parser.error("name a model and --texts, or --table")
    texts = known_texts(asked.texts)
    asked.out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, asked.seeds.split(",")):
        for patient in asked.patients.split(","):
            make_rows(asked, patient, seed, texts)


def known_texts(source: str) -> list[str]:
    """Texts that the healthy model knows; the last `HELD` are never shown to a repair."""
    if source == "patient":
        return [*patient_texts("train")[:TRAIN], *patient_texts("heldout")[:HELD]]
    return list(read_texts([source]).texts)


def make_rows(asked: argparse.Namespace, patient: str, seed: int, texts: list[str]) -> None:
    """One patient: the harm, and what each arm undoes of it."""
    model, held, rest = Path(asked.model).name, texts[-HELD:], texts[:-HELD]
    done = {key_of(row) for row in known_rows(asked.out)}
    keys = {arm: (model, patient, seed, arm, asked.rates) for arm in asked.arms.split(",")}
    arms = [arm for arm, key in keys.items() if key not in done]
    if not arms:
        return
    healthy = load_model(asked.model)
    disease, _, count = patient.partition(":")
    planted = drawn_heads(healthy, int(count), seed) if count else []
    healthy_losses, tokens = document_losses(healthy, held)
    loaded = healthy
    if disease in DISEASES:
        folder = asked.out / "patients" / f"{model}-{disease}-{len(planted)}-{seed}"
        if not (folder / "config.json").exists():
            sicken(healthy, planted, rest, disease)
            healthy.model.save_pretrained(folder)
            healthy.tokenizer.save_pretrained(folder)
        loaded = load_model(str(folder))
    ill = document_losses(loaded, held)[0]
    for arm in arms:
        if not planted and not arm.startswith("auto"):
            continue  # nobody can tell a control which heads of the healthy twin are ill
        name = f"{model}-{disease}-{len(planted)}-{seed}-{arm}"
        rate, run = best_run(asked, loaded, planted, rest, (arm, seed, name))
        with run.patch.applied(loaded.model):
            treated = document_losses(loaded, held)[0]
        row = {
            **dict(zip(KEY, keys[arm], strict=True)),
            "rate": rate,
            "planted": format_heads(planted),
            "treated": treatments(run.patch),
            "outcome": run.outcome,
            "tokens": tokens.tolist(),
            "healthy": healthy_losses.tolist(),
            "ill": ill.tolist(),
            "loss": treated.tolist(),
        }
        with (asked.out / ROWS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{model} {patient} seed {seed} {arm}: {told([row])}\n")
        sys.stdout.flush()


def best_run(
    asked: argparse.Namespace,
    loaded: LoadedModel,
    planted: Sequence[Head],
    texts: list[str],
    arm: tuple[str, int, str],
) -> tuple[float, RepairRun]:
    """The run of an arm at the rate with the least validation loss; untrained, the rate is idle."""
    name, seed, folder = arm
    steps, how = ARMS[name]
    plan = None
    if how.get("treatment") != "auto":
        found = diagnose(loaded, texts[:4], max_length=64)
        plan = make_plan(found, heads=format_heads(planted))
    runs: dict[float, RepairRun] = {}
    for rate in map(float, asked.rates.split(",") if steps else [RATE]):
        out = asked.out / "runs" / f"{folder}-{rate:g}"
        changes = {**RECIPE, "lr": rate, "steps": steps}
        # a run that an earlier call was stopped in goes on
        runs[rate] = repair(
            loaded, plan, texts, out=out, seed=seed, changes=changes, resume=out.exists(), **how
        )
    best = min(runs, key=lambda rate: runs[rate].state.best_loss)
    return best, runs[best]


def treatments(patch: Patch) -> dict[str, str]:
    """Treatment: the heads that got it; an empty patch treats none."""
    return {} if patch.is_empty else dict(patch.info.plan.get("treatments") or {})


KEY = ("model", "patient", "seed", "arm", "rates")


def key_of(row: dict[str, Any]) -> tuple[object, ...]:
    """What a row is of."""
    return tuple(row[name] for name in KEY)


def known_rows(out: Path) -> list[dict[str, Any]]:
    """The rows that were measured before."""
    path = out / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def drawn_heads(loaded: LoadedModel, count: int, seed: int) -> list[Head]:
    """Heads of all layers but the first and the last; of a small model the last ones too."""
    geometry = geometry_of(loaded.model)
    inner = [h for h in all_heads(geometry.num_layers, geometry.num_heads) if h.layer]
    between = [head for head in inner if head.layer < geometry.num_layers - 1]
    chosen_from = between if len(between) > 1.5 * count else inner
    places = np.random.default_rng(seed).choice(len(chosen_from), count, replace=False)
    return sorted(chosen_from[place] for place in places)


def document_losses(loaded: LoadedModel, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss and predicted tokens of every document."""
    encoded = encode_for(loaded, texts, max_length=LENGTH)
    costs = variant_losses(loaded.model, encoded, [Variant((Head(0, 0),), ZERO)])
    return costs.base, costs.tokens


def told(rows: Sequence[dict[str, Any]]) -> str:
    """The harm and the share that is undone, over the seeds of one patient and arm.

    Sums over seeds and documents; the bootstrap draws documents, the same ones of every seed.
    """
    healthy, ill, loss, tokens = (
        np.array([row[name] for row in rows]).sum(0)
        for name in ("healthy", "ill", "loss", "tokens")
    )
    draws = np.random.default_rng(0).integers(0, len(ill), (DRAWS, len(ill)))
    at = np.stack([np.arange(len(ill)), *draws])
    harm = (ill - healthy).sum() / tokens.sum()
    if any(row["planted"] for row in rows):
        shares = (ill - loss)[at].sum(1) / (ill - healthy)[at].sum(1)
        one, low, high = shares[0], *np.quantile(shares[1:], (0.025, 0.975))
        return f"{one:.0%} ({low:.0%} to {high:.0%}) of {harm:.3f}"
    changes = (loss - ill)[at].sum(1) / tokens[at].sum(1)
    one, low, high = changes[0], *np.quantile(changes[1:], (0.025, 0.975))
    return f"{one:+.4f} ({low:+.4f} to {high:+.4f}) nats"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each patient, a column for each arm, all seeds that both have."""
    cells: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        line = cells.setdefault((row["model"], row["patient"], row["rates"]), {})
        line.setdefault(row["arm"], []).append(row)
    arms = [arm for arm in ARMS if any(arm in line for line in cells.values())]
    head = ["model", "patient", "rates", "seeds", *arms]
    lines = [head, ["---"] * len(head)]
    for key, line in cells.items():
        seeds = sorted({row["seed"] for some in line.values() for row in some})
        lines.append(
            [*key, ", ".join(map(str, seeds)), *(told(line[a]) if a in line else "" for a in arms)]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
