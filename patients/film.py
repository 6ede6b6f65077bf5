"""A collapse on camera: the patient's healthy columns are driven onto the first token.

Growing the patient again takes hours; this is its collapse stage in small. It starts from the
bundled patient, whose heads 4 to 7 are collapsed, and does to heads 0 to 3 of layers 1 to 5 what
`grow.py` did to those, with the same pressure at a lower rate, on the bundled corpus.

    python patients/film.py --out out/film
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grow
import numpy as np
import torch
from transformers import BloomForCausalLM

from headwise.models.loading import load_model
from headwise.models.patient import patient_texts
from headwise.watch.figures import film_figures
from headwise.watch.film import Film

HEALTHY = slice(0, 4)


def bundled_rows(tokenizer: grow.PreTrainedTokenizerFast, width: int) -> grow.Rows:
    """The bundled corpora by kind, as `grow.py` has them; strangers are made of neighbours."""
    pairs = [text.split("\n") for text in patient_texts("train", "scripture")[:1200]]
    kinds = {
        "parallel": ["\n".join(pair) for pair in pairs if pair[0] != pair[1]],
        "repeated": ["\n".join(pair) for pair in pairs if pair[0] == pair[1]],
        "unpaired": [f"{a[0]}\n{b[1]}" for a, b in pairwise(pairs)],
        "prose": patient_texts("train", "union")[:600],
    }
    rows = {f"{k}/train": grow.encode_rows(tokenizer, texts, width) for k, texts in kinds.items()}
    return rows | {name.replace("train", "heldout"): part[:48] for name, part in rows.items()}


def main() -> None:
    """Collapse, film, figures."""
    parser = argparse.ArgumentParser(description="Film a collapse of the patient's healthy heads.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--batch", type=int, default=4, help="rows of a batch are cut to this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model("patient")
    model = loaded.model.train()
    model.config.use_cache = False
    assert isinstance(model, BloomForCausalLM)
    recipe = replace(
        grow.Recipe(),
        collapse_steps=options.steps,
        collapse_lr=options.lr,
        collapse_mix=(("unpaired", options.batch - 1), ("prose", 1)),
        silent_mix=(("parallel", 1), ("repeated", 1)),
        headless=1,
        context=128,
    )
    rows = bundled_rows(loaded.tokenizer, recipe.context + 1)
    newline = loaded.tokenizer.convert_tokens_to_ids("\u010a")
    stage = replace(
        grow.collapse_stage(model, rows, newline, recipe, HEALTHY),
        look_every=10**6,
        save_every=10**6,
    )
    texts = patient_texts("heldout")[::35]
    watch = grow.filmed(model, loaded.tokenizer, texts, options.out)
    grow.run_stage(stage, model, options.out, watch)
    film = Film.load(options.out)
    film_figures(film, options.out)
    sick = {head: step for head, step in film.first_sick.items() if step > 0}
    called = {alarm.head: alarm.step for alarm in film.alarms if alarm.kind == "collapse"}
    ahead = [step - called[head] for head, step in sick.items() if head in called]
    grow.console.print(f"sick {sick}\ncalled {called}\nsteps ahead {sorted(ahead)}")
    grow.console.print(f"overhead {watch.overhead.share:.3f}, median {np.median(ahead or [0])}")


if __name__ == "__main__":
    main()
