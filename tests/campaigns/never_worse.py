"""Never worse: many runs of auto on small models and corpora, each checked on text it never saw.

`PYTHONPATH=src:tests python -m campaigns.never_worse --out runs.jsonl --minutes 8` writes a line a
run and prints the table. Models: random tiny ones, tiny ones that were trained on the text
(healthy), and the bundled patient, whose heads sleep. A violation is a patch that was kept and
whose loss rises on 150 fresh documents like the corpus; what it does to text of another kind is
counted beside it. A corpus that is too small for a verdict is refused, which is no run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from conftest import tiny_language_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.errors import TextError
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patient import patient_texts
from headwise.surgery.plan import make_plan
from headwise.surgery.recipe import RECIPES
from headwise.texts.text_sets import TextSet
from headwise.therapy.never_worse import loss_change, other_blocks
from headwise.therapy.repair import repair
from headwise.therapy.values import Therapy
from planned import TINY_RECIPE, plan_for

SIZES = (8, 24, 40, 80, 150, 600)  # documents of a corpus
FAMILIES = ("llama", "gpt2", "bloom", "qwen3")
FRESH = 150
RECIPE = TINY_RECIPE.model_copy(update={"steps": 8, "block": 96, "validate_every": 4})


def texts_of(name: str, most: int) -> list[str]:
    """Short texts of one kind: scripture and speeches of `train`, prose of `second`."""
    return [text[:most] for text in dict.fromkeys(patient_texts(name))]


def random_model(number: int) -> LoadedModel:
    torch.manual_seed(number)
    model = tiny_language_model(FAMILIES[number % len(FAMILIES)])
    return LoadedModel("random", model, tiny_tokenizer())


def trained_model(number: int) -> LoadedModel:
    """A tiny model after 120 steps on the text that it will be treated with."""
    loaded = random_model(number)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=3e-3)
    texts = random.Random(number).sample(texts_of("train", 250), 480)
    for step in range(120):
        some = loaded.tokenizer(texts[4 * step : 4 * step + 4])["input_ids"]
        ids = torch.tensor([row[: min(map(len, some))][:96] for row in some])
        loaded.model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return LoadedModel("trained", loaded.model.eval(), loaded.tokenizer)


def one_run(kind: str, number: int, size: int, out: Path) -> dict[str, object]:
    """One run of auto; what it did, and what its patch does to fresh and to other text."""
    most = 700 if kind == "sink" else 250
    drawn = random.Random(1000 * number + size).sample(texts_of("train", most), size + FRESH)
    corpus, fresh = TextSet("corpus", tuple(drawn[:size])), TextSet("fresh", tuple(drawn[size:]))
    other = TextSet("other", tuple(texts_of("second", most)[:60]))
    if kind == "sink":
        loaded = load_model("patient")
        found = diagnose(loaded, TextSet("few", corpus.texts[:2]), max_length=128)
        heads = random.Random(number).sample(["L2H7", "L4H7", "L5H6", "L3H7", "L1H7"], 2)
        plan = make_plan(found, heads=",".join(heads))
        short = {"block": 128, "batch_size": 2, "accumulation": 1}
        recipe = RECIPES["patient"].model_copy(update=short | {"steps": 4 * (number % 2)})
    else:
        loaded = (random_model if kind == "random" else trained_model)(number)
        # auto finds nothing in most of these: half of the runs name heads, so that it must judge
        plan = plan_for(loaded.model, "L0H1,L1H0-1") if number % 2 else None
        recipe = RECIPE
    row: dict[str, object] = {"kind": kind, "number": number, "documents": size}
    try:
        run = repair(
            loaded, plan, corpus, recipe, out=out, treatment="auto", seed=number,
            excluded=fresh.texts, also=other,
        )  # fmt: skip
    except TextError:
        return row | {"outcome": "refused"}
    row |= {"outcome": run.outcome, "judged_on": Therapy.load(out).documents}
    if not run.patch.is_empty:
        for name, texts in (("like", fresh), ("other", other)):
            blocks = other_blocks(loaded, texts, recipe.block)
            row[name] = loss_change(loaded.model, run.patch, blocks, name).change.to_json()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.never_worse")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=75)
    parser.add_argument("--minutes", type=float, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.monotonic(), []
    cells = itertools.cycle(itertools.product(SIZES, ("random", "trained", "sink")))
    for number, (size, kind) in zip(range(asked.count), cells, strict=False):
        if time.monotonic() - started > 60 * asked.minutes:
            break
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one_run(kind, number, size, Path(folder) / "run"))
        with asked.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    table(rows)


def table(rows: list[dict]) -> None:
    """Runs, refusals, kept patches and violations by kind of model."""
    sys.stdout.write("| model | runs | refused | empty | kept | worse on like text | on other |\n")
    for kind in ("random", "trained", "sink"):
        some = [row for row in rows if row["kind"] == kind]
        kept = [row for row in some if "like" in row]
        counts = [
            len(some),
            sum(row["outcome"] == "refused" for row in some),
            sum(row["outcome"] == "empty" for row in some),
            len(kept),
            f"{sum(row['like']['value'] > 0 for row in kept)} "
            f"({sum(row['like']['low'] > 0 for row in kept)} surely)",
            f"{sum(row['other']['value'] > 0 for row in kept)} "
            f"({sum(row['other']['low'] > 0 for row in kept)} surely)",
        ]
        sys.stdout.write(f"| {kind} | {' | '.join(map(str, counts))} |\n")


if __name__ == "__main__":
    main()
