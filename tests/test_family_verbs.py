"""Every verb on every family of the long tail: what `docs/families.md` says works, worked.

A few odd ones run always; the rest with `-m families`.
"""

from __future__ import annotations

import json

import pytest

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from family_verbs import DATA, outcomes
from headwise import capture, compare, diagnose, evaluate, make_plan, repair
from headwise.errors import ArtefactError
from headwise.models.families.known_families import ARCHITECTURES
from headwise.plasticity.settings import CaptureSettings
from headwise.texts.text_sets import TextSet
from planned import TINY_RECIPE, small_texts, weight_bits
from tiny import MORE, UNEVEN

ODD = {"lfm2", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma3n", "gemma4", "llama4-chunks"}
NAMES = [
    name if name in ODD else pytest.param(name, marks=pytest.mark.families) for name in sorted(MORE)
]
RECIPE = TINY_RECIPE.model_copy(update={"steps": 2, "validate_every": 1, "block": 48})
TEXTS = TextSet("sentences", SENTENCES)


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_plan_repair_evaluate_compare_and_capture(name, tmp_path):
    model, tokenizer = tiny_language_model(name), tiny_tokenizer()
    bits = weight_bits(model)
    diagnosis = diagnose(model, tokenizer, TEXTS, max_length=48)
    layer = diagnosis.model.layer_numbers[-1]
    written = capture(
        model, tokenizer, TEXTS, out=tmp_path / "qk", settings=CaptureSettings(max_length=48)
    )
    assert written.rows[f"l{layer:02d}h01q"] > 0
    plan = make_plan(diagnosis, heads=f"L{layer}H0-1")
    if MORE[name][0] in UNEVEN:
        with pytest.raises(ArtefactError, match="layers of this model differ"):
            repair(model, tokenizer, plan, small_texts(60), RECIPE, out=tmp_path / "run")
        return
    run = repair(model, tokenizer, plan, small_texts(60), RECIPE, out=tmp_path / "run")
    assert plan.summary.trainable_weights == run.patch.num_weights
    assert any(part.startswith(f"L{layer}H0.q") for part in run.patch.slices)
    options = {"max_length": 48, "heads": f"L{layer}H0"}
    before = evaluate(model, tokenizer, [TEXTS], **options)
    after = evaluate(model, tokenizer, [TEXTS], patches=[run.patch], **options)
    comparison = compare(before, after, plan=plan)
    assert comparison.drift.operated.heads == 2
    assert before.heads.ablation_zero[f"L{layer}H0"].value is not None
    assert weight_bits(model) == bits


FEW = {"recurrent_gemma", "falcon_h1", "deepseek_v3", "jamba", "dbrx"}  # each with its own way out


@pytest.mark.parametrize(
    "family",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.families)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_every_verb_works_or_is_refused_with_the_reason_of_the_page(family):
    assert outcomes(family) == json.loads(DATA.read_text())[family]


def test_vectors_before_rope_are_refused_where_no_projection_gives_them(tmp_path):
    model, settings = tiny_language_model("deepseek_v3"), CaptureSettings(pre_rope=True)
    with pytest.raises(ArtefactError, match="before RoPE do not come out of one projection"):
        capture(model, tiny_tokenizer(), TEXTS, out=tmp_path / "qk", settings=settings)
