"""Grow the second patient: the dead heads of the bundled one, emptied.

    python patients/empty.py OUT        writes OUT/patch.safetensors and prints what it measured

A head that attends to the first token alone gets no useful gradient, but weight decay goes on. So
the values and outputs of the patient's dead heads decay by AdamW's rule, a factor 1 - lr wd a step,
until 1/100 of them is left; queries and keys stay, so by first-token mass the two patients are the
same. Release wakes these heads and finds nothing in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headwise.diagnosis.diagnose import diagnose
from headwise.forward.interventions import ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.intervals import mean_intervals
from headwise.models.loading import load_model
from headwise.models.patch import Patch, Slice
from headwise.models.slices import read_slices, spans_of
from headwise.surgery.plan import make_plan
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import Dose, treat
from headwise.texts.batches import batches, encode_texts
from headwise.texts.text_sets import TextSet, default_corpus, default_texts
from headwise.therapy.never_worse import loss_change

LR, WEIGHT_DECAY, STEPS = 1e-3, 0.1, 46_050  # (1 - 1e-4) ** 46050 = 0.01
TEXTS = 24


def emptied(out: Path) -> None:
    """Write the patch, then measure what it did on held-out text."""
    loaded = load_model("patient")
    model, tokenizer = loaded.model, loaded.tokenizer
    judged = TextSet("heldout", default_texts("patient").texts[:TEXTS])
    plan = make_plan(diagnose(loaded, judged, max_length=256), heads="dead")
    spans = spans_of(model, plan.target_heads, "vo")
    factor = (1 - LR * WEIGHT_DECAY) ** STEPS
    patch = Patch(
        {
            name: Slice(spans[name], old, old * factor)
            for name, old in read_slices(model, spans).items()
        }
    )
    patch.save(out / "patch.safetensors")
    blocks = list(batches(encode_texts(tokenizer, judged.texts, max_length=256), 1))
    say("loss against the patient", loss_change(model, patch, blocks, "held-out").change)
    patch.apply(model)
    found = diagnose(model, tokenizer, judged, max_length=256)
    say("sick", found.counts)
    encoded = encode_texts(tokenizer, judged.texts, max_length=256)
    joint = variant_losses(model, encoded, [Variant(tuple(plan.target_heads), ZERO)])
    say("joint", mean_intervals(joint.deltas, joint.tokens))
    train = encode_texts(tokenizer, default_corpus("patient").texts[:16], max_length=256)
    layers = [head.layer for head in plan.target_heads]
    directions = measure_directions(model, list(batches(train, 1)), layers)
    for amount in (0.9, 1.0):
        given = dict.fromkeys(plan.target_heads, Dose("release", amount))
        released = treat(model, plan, given, directions=directions)
        say(f"release {amount}", loss_change(model, released, blocks, "held-out").change)


def say(*parts: object) -> None:
    """One line on the terminal."""
    sys.stdout.write(" ".join(map(str, parts)) + "\n")


if __name__ == "__main__":
    emptied(Path(sys.argv[1]))
