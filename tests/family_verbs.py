"""Every verb on a tiny model of every family: works, or is refused with a reason; nothing else.

`python tests/family_verbs.py [FAMILY...]` runs them and writes `data/family_verbs.json`, which the
table of `docs/families.md` is made of; `make test-families` runs them again and compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from headwise import (
    apply_patches,
    capture,
    check,
    complete,
    diagnose,
    evaluate,
    load_model,
    make_plan,
    repair,
    triage,
)
from headwise.errors import HeadwiseError
from headwise.models.families.known_families import ARCHITECTURES
from headwise.plasticity.settings import CaptureSettings
from headwise.proof.completed_texts import Prompt
from headwise.proof.settings import Sampling
from headwise.texts.text_sets import TextSet
from headwise.triaging.settings import TriageSettings
from planned import TINY_RECIPE, small_texts, weight_bits
from tiny import MORE, TINY

DATA = Path(__file__).parent / "data" / "family_verbs.json"
TEXTS = TextSet("sentences", SENTENCES)
RECIPE = TINY_RECIPE.model_copy(update={"steps": 1, "validate_every": 1, "block": 48})
BRIEF = TriageSettings(max_length=48)
WORKS = "works"


class Family:
    """A tiny model on disk, loaded, with a diagnosis and a plan where these can be made."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        tiny_language_model(name).save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        self.loaded = load_model(str(folder / "model"), bos=False)
        self.diagnosis = diagnose(self.loaded, TEXTS, max_length=48)
        self.layer = self.diagnosis.model.layer_numbers[-1]
        self.heads = f"L{self.layer}H0-1"
        self.plan = make_plan(self.diagnosis, heads=self.heads)

    def repair(self, **options):
        out = self.folder / f"run-{'-'.join(map(str, options.values()))}"
        return repair(self.loaded, self.plan, small_texts(60), RECIPE, out=out, **options)


def _check(family):
    found = check(family.loaded)
    assert found.passed, found.reason()


def _stream(family):
    streamed = load_model(str(family.folder / "model"), bos=False, stream=True)
    found = diagnose(streamed, TEXTS, max_length=48)
    assert found.classes == family.diagnosis.classes


def _apply(family):
    patch, model = family.repair(mode="sham").patch, str(family.folder / "model")
    merged = apply_patches(family.loaded, [patch], family.folder / "merged")
    merged = load_model(str(merged), bos=False)
    back = apply_patches(merged, [patch], family.folder / "back", undo=True)
    again = load_model(str(back), bos=False)
    assert weight_bits(again.model) == weight_bits(load_model(model, bos=False).model)


VERBS = {
    "check": _check,
    "diagnose": lambda f: diagnose(f.loaded, TEXTS, max_length=48),
    "--stream": _stream,
    "triage": lambda f: triage(f.loaded, f.diagnosis, TEXTS, heads=f.heads, settings=BRIEF),
    "repair": lambda f: f.repair(),
    "release": lambda f: f.repair(treatment="release"),
    "centre": lambda f: f.repair(treatment="centre"),
    "lora": lambda f: f.repair(mode="lora"),
    "apply": _apply,
    "evaluate": lambda f: evaluate(f.loaded, [TEXTS], max_length=48, heads=f"L{f.layer}H0"),
    "complete": lambda f: complete(
        f.loaded, [Prompt("The lighthouse keeper", "prose")], Sampling(new_tokens=4)
    ),
    "capture": lambda f: capture(
        f.loaded, TEXTS, out=f.folder / "qk", settings=CaptureSettings(max_length=48)
    ),
}


def tiny_name(family: str) -> str:
    """The first of a family's tiny models."""
    return next(name for name, (kind, _) in (TINY | MORE).items() if kind == family)


def outcomes(family: str) -> dict[str, str]:
    """What each verb does: "works", or the first line of its refusal."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Family(tiny_name(family), Path(folder))
        bits = weight_bits(tried.loaded.model)
        found = {}
        for verb, run in VERBS.items():
            try:
                run(tried)
                found[verb] = WORKS
            except HeadwiseError as error:
                found[verb] = str(error).partition("\n")[0]
            assert weight_bits(tried.loaded.model) == bits, f"{verb} leaves the model changed"
    return found


if __name__ == "__main__":
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    for each in sys.argv[1:] or sorted(ARCHITECTURES):
        known[each] = outcomes(each)
    ordered = {family: known[family] for family in sorted(known)}  # verbs in their own order
    DATA.write_text(json.dumps(ordered, indent=1) + "\n")
