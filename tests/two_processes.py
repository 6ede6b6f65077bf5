"""Every verb that shares its texts out, as one process of several: `two_processes.py MODEL OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.settings import Thresholds
from headwise.heads import Head
from headwise.models.loading import load_model
from headwise.plasticity.capture import capture
from headwise.proof.evaluate import evaluate
from headwise.ranks import process_group
from headwise.surgery.plan import make_plan
from headwise.texts.text_sets import TextSet
from headwise.therapy.repair import repair
from headwise.triaging.settings import TriageSettings
from headwise.triaging.triage import triage
from planned import TINY_RECIPE, small_texts

TEXTS = TextSet("shared", small_texts(21).texts)


def work(model: str, out: Path, mode: str = "surgery") -> None:
    """Write every artefact into `out`."""
    loaded = load_model(model, bos=False)
    found = diagnose(loaded, TEXTS, batch_size=2, thresholds=Thresholds(sink=0.2))
    found.save(out / "diagnosis.json")
    settings = TriageSettings(max_texts=7, max_length=24)
    triage(loaded, found, TEXTS, heads="L0H0-1", settings=settings).save(out / "triage.json")
    few = TextSet("few", TEXTS.texts[:5])
    for adaptive in (False, True):
        judged = evaluate(loaded, [few], heads="L0-1H1", batch_size=1, adaptive=adaptive)
        judged.save(out / f"evaluation-{adaptive}.json")
    capture(loaded, TEXTS, out=out / "qk", heads=[Head(1, 0), Head(0, 3)])
    plan = make_plan(found, heads="L0H1,L1H0-1")
    recipe = TINY_RECIPE.with_changes(steps=3, accumulation=3)
    repair(loaded, plan, small_texts(), recipe, out=out / "run", mode=mode, keep=TEXTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        work(sys.argv[1], Path(sys.argv[2]))
