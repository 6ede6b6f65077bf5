"""The command and the library call give the same bytes, verb by verb."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headwise
from conftest import tiny_language_model, tiny_tokenizer
from headwise.artefacts import save_artefact
from headwise.cli import app
from headwise.diagnosis.figures import diagnosis_figures
from headwise.handover.push import push
from headwise.plasticity.settings import CaptureSettings
from headwise.proof.completed_texts import read_prompts
from headwise.proof.settings import Sampling
from headwise.pruning.settings import PruneSettings, SearchSettings, StreamSettings
from planned import small_texts

STUDY = """
name: small
model: model
corpora: {train: [corpus.jsonl]}
texts: [few.jsonl]
plan: {heads: "L0H1"}
max_length: 24
max_texts: 4
changes: {steps: 2, block: 24, batch_size: 2, accumulation: 1, validate_every: 1, save_every: 1,
          validation_blocks: 2, map_every: 1}
arms: [{name: surgery}]
seeds: [0]
"""
CHANGES = {"steps": 2, "block": 24, "batch_size": 2}
SHORT = "--texts few.jsonl --max-length 24"
PATCH = Path("run/patch.safetensors")
COMMANDS = {  # verb: what is typed, in the order of the story
    "check": "check model --out check",
    "diagnose": f"diagnose model {SHORT} --out d",
    "survey": f"survey model model {SHORT} --out s",
    "plan": "plan d --heads L0H1 --out plan.yaml",
    "triage": f"triage model --diagnosis d --heads L0H1 {SHORT} --out t",
    "repair": "repair model --plan plan.yaml --corpus corpus.jsonl --steps 2 --block 24 "
    "--batch-size 2 --out run",
    "prune": "prune model --texts corpus.jsonl --max-length 24 --max-texts 24 --exact 2 --width 1 "
    "--curve 0 --no-figures --out prune",
    "stream": "stream model --texts corpus.jsonl --max-length 24 --max-texts 24 --first 2 "
    "--recent 4 --exact 2 --width 1 --curve 0 --no-figures --out stream",
    "evaluate": f"evaluate model {SHORT} --heads L0H1 --out before",
    "evaluate --patch": f"evaluate model {SHORT} --heads L0H1 --patch {PATCH} --out after",
    "evaluate by default": "evaluate model --heads none --max-length 16 --out default",
    "compare": "compare before after --plan plan.yaml --run run --csv --out comparison",
    "complete": f"complete model --prompts prompts.txt --patch {PATCH} --new-tokens 2 --out c",
    "capture": f"capture model {SHORT} --layers 0 --buckets uniform:8 --out qk",
    "plasticity": "plasticity qk --workers 1 --no-figures --out plasticity",
    "apply": f"apply model {PATCH} --out merged",
    "export": f"export {PATCH} --peft adapter --full-rank",
    "push": "push merged ./pushed --run run",
    "report": "report run --before before --after after --no-paper --out report",
    "watch": f"watch training {SHORT} --no-figures --out film",
    "study": "study study.yaml --out study --no-report",
}


def by_library(verb):
    """The same from Python, with what the commands before it wrote."""
    texts = headwise.read_texts(["few.jsonl"])
    loaded = None if verb in NO_MODEL else headwise.load_model("model")
    short, plan = {"max_length": 24}, Path("plan.yaml")
    if verb == "check":
        result = headwise.check(loaded)
        body = {**result.to_json(), "model": loaded.id}
        save_artefact(Path("check/check.json"), "check", body)
    elif verb == "diagnose":
        found = headwise.diagnose(loaded, texts, **short)
        found.save(Path("d/diagnosis.json"))
        diagnosis_figures(found, Path("d"))
    elif verb == "survey":
        found = headwise.survey(["model", "model"], texts=texts, **short)
        found.save(Path("s/survey.json"))
    elif verb == "plan":
        found = headwise.Diagnosis.load(Path("d/diagnosis.json"))
        headwise.make_plan(found, heads="L0H1").save(plan)
    elif verb == "triage":
        found = headwise.Diagnosis.load(Path("d/diagnosis.json"))
        how = headwise.TriageSettings(**short)
        judged = headwise.triage(loaded, found, texts, heads="L0H1", settings=how)
        judged.save(Path("t/triage.json"))
    elif verb == "repair":
        corpus = headwise.read_texts(["corpus.jsonl"])
        plan = headwise.SurgeryPlan.load(plan)
        headwise.repair(loaded, plan, corpus, changes=CHANGES, out="run")
    elif verb in ("prune", "stream"):
        corpus = headwise.read_texts(["corpus.jsonl"])
        search = SearchSettings(max_texts=24, exact=2, width=1, curve=0)
        if verb == "prune":
            how = PruneSettings(search, max_length=24)
            headwise.prune(loaded, corpus, out="prune", settings=how)
        else:
            how = StreamSettings(search, first=2, recent=4, max_length=24)
            headwise.stream(loaded, corpus, out="stream", settings=how)
    elif verb == "evaluate":
        found = headwise.evaluate(loaded, [texts], heads="L0H1", **short)
        found.save(Path("before/evaluation.json"))
    elif verb == "evaluate --patch":
        found = headwise.evaluate(loaded, [texts], heads="L0H1", patches=[PATCH], **short)
        found.save(Path("after/evaluation.json"))
    elif verb == "evaluate by default":
        found = headwise.evaluate(loaded, heads="none", max_length=16)
        found.save(Path("default/evaluation.json"))
    elif verb == "compare":
        found = headwise.compare(
            Path("before"), Path("after"), plan=headwise.SurgeryPlan.load(plan), run=Path("run")
        )
        found.save(Path("comparison/comparison.json"))
        Path("comparison/comparison.csv").write_text(found.to_csv())
    elif verb == "complete":
        prompts = read_prompts(Path("prompts.txt"))
        found = headwise.complete(loaded, prompts, Sampling(new_tokens=2), patches=[PATCH])
        found.save(Path("c/completions.json"))
    elif verb == "capture":
        how = CaptureSettings(buckets="uniform:8", **short)
        headwise.capture(loaded, texts, out="qk", layers="0", settings=how)
    elif verb == "plasticity":
        headwise.measure_plasticity("qk", out="plasticity", max_workers=1)
    elif verb == "apply":
        headwise.apply_patches(loaded, [headwise.Patch.load(PATCH)], "merged")
    elif verb == "export":
        headwise.export_peft(loaded, headwise.Patch.load(PATCH), "adapter", full_rank=True)
    elif verb == "push":
        push("merged", "./pushed", run="run")
    elif verb == "report":
        headwise.write_report(
            "run", "report", before=Path("before"), after=Path("after"), paper=False
        )
    elif verb == "watch":
        headwise.watch_checkpoints("training", texts, out="film", **short)
    else:
        headwise.run_study("study.yaml", out="study")


NO_MODEL = {"survey", "plan", "compare", "plasticity", "push", "report", "watch", "study"}


def write_desk(folder, family):
    tiny_language_model(family).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for step in (1, 2):
        place = folder / "training" / f"checkpoint-{step}"
        tiny_language_model(family).save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    for name, count in (("few.jsonl", 4), ("corpus.jsonl", 60)):
        rows = [json.dumps({"text": text}) + "\n" for text in small_texts(count).texts]
        (folder / name).write_text("".join(rows))
    (folder / "prompts.txt").write_text("The sea\nA clock\n")
    (folder / "study.yaml").write_text(STUDY)


@contextmanager
def at(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def contents(folder):
    """Every file of a folder with its bytes, without figures of commands, locks and caches."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: plain(path)
        for name, path in files.items()
        if path.is_file()
        and "/." not in f"/{name}"
        and not name.startswith("s/survey.p")
        and not name.startswith("s/survey.svg")
    }


def plain(path):
    if path.name == "trace.jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [{key: row[key] for key in row if "second" not in key} for row in rows]
    return path.read_bytes()


@pytest.fixture(scope="module", params=["llama", "bloom"])
def desks(request, tmp_path_factory):
    """Two equal desks, one for commands and one for the library."""
    folders = [tmp_path_factory.mktemp(f"{request.param}-{who}") for who in ("command", "library")]
    for folder in folders:
        write_desk(folder, request.param)
    return folders


@pytest.mark.parametrize("verb", COMMANDS)
def test_command_and_library_write_the_same_bytes(desks, verb):
    command, library = desks
    with at(command):
        done = CliRunner().invoke(app, COMMANDS[verb].split())
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    with at(library):
        by_library(verb)
    left, right = contents(command), contents(library)
    assert sorted(left) == sorted(right)
    assert [name for name in left if left[name] != right[name]] == []
