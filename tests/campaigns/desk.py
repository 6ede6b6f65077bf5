"""What campaigns work on: a tiny model, and one artefact of every kind that it left behind."""

from __future__ import annotations

import json
from functools import cache, partial

import torch

from conftest import tiny_language_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.survey import survey
from headwise.models.loaded_model import LoadedModel
from headwise.plasticity.capture import capture
from headwise.plasticity.run import measure_plasticity
from headwise.plasticity.settings import CaptureSettings
from headwise.proof.compare import compare
from headwise.proof.completed_texts import Prompt
from headwise.proof.completions import complete
from headwise.proof.evaluate import evaluate
from headwise.proof.settings import Sampling
from headwise.studies.run import run_study
from headwise.studies.study import Study
from headwise.texts.text_sets import TextSet
from headwise.therapy.repair import repair
from headwise.triaging.settings import TriageSettings
from headwise.triaging.triage import triage
from headwise.watch.checkpoints import watch_checkpoints
from planned import TINY_RECIPE, plan_for, random_batch, small_texts

RECIPE = TINY_RECIPE.model_copy(update={"save_every": 1, "validate_every": 2, "patience": 1000})
TEXTS = small_texts()
HELD = TextSet("held", tuple(f"{text} And so on." for text in TEXTS.texts[:4]))


@cache
def loaded() -> LoadedModel:
    torch.set_num_threads(1)
    return LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer()).reading(False)


@cache
def plan(targets="L0H1,L1H0-1"):
    return plan_for(loaded().model, targets)


def random_block():
    return random_batch((12,), 0, 90)


def run_repair(out, *, resume=False, steps=6, mode="surgery", targets="L1H0-1", cache=False):
    recipe = RECIPE.model_copy(update={"steps": steps, "cache_prefix": cache})
    options = {"out": out, "resume": resume, "mode": mode}
    return repair(loaded(), plan(targets), TEXTS, recipe, **options)


def run_auto(out, *, resume=False, steps=2):
    recipe = RECIPE.model_copy(update={"steps": steps})
    return repair(loaded(), plan(), TEXTS, recipe, out=out, resume=resume, treatment="auto")


def run_capture(out, *, resume=False):
    settings = CaptureSettings(buckets="uniform:8", max_length=24)
    return capture(loaded(), HELD, out=out, settings=settings, batch_size=1, resume=resume)


def run_plasticity(out, source, *, resume=False):
    return measure_plasticity(source, out=out, resume=resume, max_workers=1, definition="full")


def saved_checkpoints(folder, steps=(1, 2, 3)):
    """A training run's checkpoints: the same model, moved a little each time."""
    model = tiny_language_model("llama")
    for step in steps:
        with torch.no_grad():
            for place, weights in enumerate(model.parameters()):
                weights.add_(
                    0.01 * step * torch.cos(torch.arange(weights.numel()) + place).view_as(weights)
                )
        model.save_pretrained(folder / f"checkpoint-{step}")
        loaded().tokenizer.save_pretrained(folder / f"checkpoint-{step}")


def run_watch(out, source, *, resume=False):
    return watch_checkpoints(source, HELD, out=out, max_length=24, bos=False, resume=resume)


def small_study(folder):
    return Study(
        name="small",
        model=str(folder / "model"),
        bos=False,
        texts=[str(folder / "held.jsonl")],
        corpora={"train": [str(folder / "corpus.jsonl")]},
        plan={"heads": "L1H0-1"},
        changes=RECIPE.model_copy(update={"steps": 3}).model_dump(exclude={"name"}),
        arms=[{"name": "surgery"}, {"name": "sham", "mode": "sham"}],
        max_length=24,
        max_texts=3,
        completions=0,
        ablate="operated",
    )


def saved_model(folder):
    loaded().model.save_pretrained(folder / "model")
    loaded().tokenizer.save_pretrained(folder / "model")
    for name, texts in (("corpus", TEXTS), ("held", HELD)):
        rows = [json.dumps({"text": text}) for text in texts.texts]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def make_artefacts(folder):
    """One artefact of every kind, in `folder`."""
    measure = {"max_length": 24, "batch_size": 4}
    stock = diagnose(loaded(), HELD, **measure)
    stock.save(folder / "diagnosis.json")
    how = TriageSettings(max_texts=4, max_length=24)
    triage(loaded(), stock, HELD, heads="L1H0-1", settings=how).save(folder / "triage.json")
    run = run_repair(folder / "run", cache=True, steps=3)
    before = evaluate(loaded(), [HELD], heads="L1H0-1", max_texts=4, **measure)
    after = evaluate(loaded(), [HELD], patches=[run.patch], heads="L1H0-1", max_texts=4, **measure)
    before.save(folder / "before.json")
    after.save(folder / "evaluation.json")
    compare(before, after).save(folder / "comparison.json")
    drawn = complete(loaded(), [Prompt("A lighthouse")], Sampling(4), patches={"run": [run.patch]})
    drawn.save(folder / "completions.json")
    survey([str(folder / "diagnosis.json")]).save(folder / "survey.json")
    run_auto(folder / "auto", steps=2)
    run_capture(folder / "qk")
    run_plasticity(folder / "plasticity", folder / "qk")
    saved_checkpoints(folder / "checkpoints")
    run_watch(folder / "film", folder / "checkpoints")
    saved_model(folder)
    run_study(small_study(folder), out=folder / "study")
    return folder


verbs = {
    "repair": run_repair,
    "repair --mode lora": partial(run_repair, mode="lora"),
    "repair, cached prefix": partial(run_repair, cache=True),
    "repair --treatment auto": run_auto,
    "capture": run_capture,
}
