"""How much of a known harm `auto` undoes: every disease of `sicken.py`, beside its controls.

    python patients/undone.py MODEL --texts SAMPLES.jsonl --out out/undone --seeds 0,1,2

The heads are drawn by the seed. A row is the share of the harm that is undone on held-out text,
(ill - treated) / (ill - healthy), with a 95% interval by bootstrap over documents; the healthy
twin's row is the change of its own loss, and an empty patch has none. Rows are appended to
`OUT/rows.jsonl`, and one that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from sicken import DISEASES, sicken

from headwise import LoadedModel, diagnose, load_model, make_plan, read_texts, repair
from headwise.forward.interventions import ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head, all_heads, format_heads
from headwise.models.architectures import geometry_of
from headwise.texts.batches import encode_for

HELD, LENGTH, DRAWS = 40, 160, 2000
RECIPE = {
    "batch_size": 3,
    "accumulation": 1,
    "block": 128,
    "validate_every": 20,
    "save_every": 60,
    "map_every": 60,
    "validation_blocks": 16,
    "lr": 6.7e-4,
}
ARMS = {"auto": 0, "auto-60": 60, "as-they-are-60": 60}  # steps
ROWS = "rows.jsonl"


def main() -> None:
    """Read the command line and make the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--diseases", default="healthy,asleep,keys,half,noise,second,flat,rotated")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--count", type=int, default=6, help="heads that fall ill")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    texts = list(read_texts([asked.texts]).texts)
    asked.out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, asked.seeds.split(",")):
        for disease in asked.diseases.split(","):
            make_rows(asked, disease, seed, texts)


def make_rows(asked: argparse.Namespace, disease: str, seed: int, texts: list[str]) -> None:
    """One patient: the harm, and what each arm undoes of it."""
    done = known_rows(asked.out)
    arms = [arm for arm in asked.arms.split(",") if (disease, seed, arm) not in done]
    if not arms:
        return
    held, rest = texts[-HELD:], texts[:-HELD]
    loaded = load_model(asked.model)
    healthy, tokens = document_losses(loaded, held)
    planted = drawn_heads(loaded, asked.count, seed)
    if disease in DISEASES:
        sicken(loaded, planted, rest, disease)
    ill = document_losses(loaded, held)[0]
    for arm in arms:
        out = asked.out / f"{disease}-{seed}-{arm}"
        changes = {**RECIPE, "steps": ARMS[arm]}
        if arm.startswith("auto"):
            run = repair(loaded, None, rest, out=out, treatment="auto", seed=seed, changes=changes)
        else:
            plan = make_plan(diagnose(loaded, rest[:4], max_length=64), heads=format_heads(planted))
            run = repair(
                loaded, plan, rest, out=out, mode="gradient-only", seed=seed, changes=changes
            )
        with run.patch.applied(loaded.model):
            treated = document_losses(loaded, held)[0]
        row = {
            "disease": disease,
            "seed": seed,
            "arm": arm,
            "planted": format_heads(planted),
            "treated": run.settings.plan.treatments if not run.patch.is_empty else {},
            "harm": float((ill - healthy).sum() / tokens.sum()),
            "change": float((treated - ill).sum() / tokens.sum()),
            "undone": share(healthy, ill, treated) if disease in DISEASES else None,
        }
        with (asked.out / ROWS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def known_rows(out: Path) -> set[tuple[str, int, str]]:
    """Disease, seed and arm of what was measured before."""
    if not (out / ROWS).exists():
        return set()
    rows = [json.loads(line) for line in (out / ROWS).read_text().splitlines()]
    return {(row["disease"], row["seed"], row["arm"]) for row in rows}


def drawn_heads(loaded: LoadedModel, count: int, seed: int) -> list[Head]:
    """Heads of all layers but the first and the last."""
    geometry = geometry_of(loaded.model)
    inner = [h for h in all_heads(geometry.num_layers, geometry.num_heads) if h.layer]
    inner = [head for head in inner if head.layer < geometry.num_layers - 1]
    places = np.random.default_rng(seed).choice(len(inner), count, replace=False)
    return sorted(inner[place] for place in places)


def document_losses(loaded: LoadedModel, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss and predicted tokens of every document."""
    encoded = encode_for(loaded, texts, max_length=LENGTH)
    costs = variant_losses(loaded.model, encoded, [Variant((Head(0, 0),), ZERO)])
    return costs.base, costs.tokens


def share(healthy: np.ndarray, ill: np.ndarray, treated: np.ndarray) -> list[float]:
    """What is undone of the harm, and its 95% interval."""
    draws = np.random.default_rng(0).integers(0, len(ill), (DRAWS, len(ill)))
    rows = [np.arange(len(ill)), *draws]
    shares = [(ill[at] - treated[at]).sum() / (ill[at] - healthy[at]).sum() for at in rows]
    return [float(shares[0]), *map(float, np.quantile(shares[1:], (0.025, 0.975)))]


if __name__ == "__main__":
    main()
