"""Rotary frequencies that follow the batch: every text is read as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from conftest import sharp_model, tiny_tokenizer
from headwise import capture, diagnose
from headwise.diagnosis.measures import measure_heads
from headwise.diagnosis.settings import DiagnoseSettings
from headwise.forward.guard import guard
from headwise.forward.interventions import ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head
from headwise.models.loaded_model import LoadedModel
from headwise.models.rope import length_class
from headwise.plasticity.settings import CaptureSettings
from headwise.proof.perplexity import text_losses
from headwise.surgery.recipe import Recipe
from headwise.surgery.training import backward_step, step_blocks
from headwise.texts.batches import batches, token_ids
from headwise.texts.corpus import build_corpus
from headwise.texts.text_sets import TextSet
from headwise.watch.probe import encode_probe, read_heads
from planned import opened, plan_for, random_ids

TURN = 40  # tokens: original_max_position_embeddings
FACTORS = {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 4.0, 9.0, 30.0]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": TURN,
    **FACTORS,
}
MODELS = {
    "llama": LONGROPE,
    "phi3": LONGROPE,
    "phimoe": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.7},
}
WORDS = ("the", "keeper", "counted", "ships", "and", "wrote", "names", "in", "a", "grey", "book")


def rope_model(family="llama", rope=LONGROPE, positions=320):
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        max_position_embeddings=positions,
        original_max_position_embeddings=TURN,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=dict(rope),
    )
    return sharp_model(config, sharpen=12.0)


def loaded_rope(family="llama", **options) -> LoadedModel:
    family_rope = MODELS.get(family, LONGROPE)
    return LoadedModel(
        "tiny", rope_model(family, **{"rope": family_rope, **options}), tiny_tokenizer()
    )


def text(words: int, seed: int) -> str:
    order = np.random.default_rng(seed).integers(len(WORDS), size=words)
    return " ".join(WORDS[i] for i in order)


TEXTS = (text(60, 0), text(6, 1), text(45, 2), text(5, 3), text(4, 4))  # both sides of the turn


def own_loss(loaded: LoadedModel, document: str) -> float:
    """Summed loss of one text, by the model's own forward pass on it alone."""
    ids = torch.tensor([token_ids(loaded.tokenizer, document, loaded.bos)])
    with torch.no_grad():
        logits = loaded.model(ids, use_cache=False).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))


@pytest.mark.parametrize("family", MODELS)
def test_a_longrope_text_costs_beside_others_what_it_costs_alone(family):
    loaded = loaded_rope(family)
    lengths = [len(token_ids(loaded.tokenizer, one)) for one in TEXTS]
    assert min(lengths) < TURN < max(lengths)
    alone = [own_loss(loaded, one) for one in TEXTS]
    losses = text_losses(loaded, TextSet("mixed", TEXTS), max_length=320, batch_size=5)
    np.testing.assert_allclose(losses.document_loss_sums, alone, rtol=1e-4)


def test_heads_of_longrope_are_measured_as_on_each_text_alone():
    loaded = loaded_rope()
    together = diagnose(loaded, TextSet("mixed", TEXTS), max_length=320, batch_size=5)
    alone = [diagnose(loaded, TextSet("one", (one,)), max_length=320) for one in TEXTS]
    for name in ("first_token_mass", "entropy", "mean_distance"):
        mean = np.mean([one.maps[name] for one in alone], 0)
        np.testing.assert_allclose(together.maps[name], mean, atol=2e-5, err_msg=name)


def test_the_watch_reads_heads_of_longrope_as_on_each_text_alone():
    loaded = loaded_rope()
    settings = DiagnoseSettings(max_length=320, batch_size=5)
    probe, _ = encode_probe(loaded, TextSet("mixed", TEXTS), settings)
    seen = read_heads(loaded.model, probe)["first_token_mass"]
    alone = []
    for one in TEXTS:
        own, _ = encode_probe(loaded, TextSet("one", (one,)), settings)
        alone.append(read_heads(loaded.model, own)["first_token_mass"])
    np.testing.assert_allclose(seen, np.mean(alone, 0), atol=2e-5)


def test_variants_of_longrope_cost_what_they_cost_on_each_text_alone():
    model = rope_model()
    encoded = [random_ids(length, seed) for seed, length in enumerate((60, 20, 44, 12))]
    variants = [Variant((Head(1, 2),), ZERO), Variant((Head(0, 1), Head(1, 0)), ZERO)]
    together = variant_losses(model, encoded, variants, batch_size=4)
    alone = [variant_losses(model, [ids], variants) for ids in encoded]
    np.testing.assert_allclose(together.base, [float(one.base[0]) for one in alone], rtol=1e-5)
    np.testing.assert_allclose(
        together.losses, np.concatenate([one.losses for one in alone], 1), rtol=1e-5
    )


def test_captured_keys_of_longrope_are_those_of_each_text_alone(tmp_path):
    import pyarrow.parquet as parquet

    loaded = loaded_rope()
    settings = CaptureSettings(max_length=320)
    options = {"heads": "L1H0", "settings": settings}
    capture(loaded, TextSet("mixed", TEXTS), out=tmp_path / "all", batch_size=5, **options)
    file = "l01h00k/data.parquet"
    together = parquet.read_table(tmp_path / "all" / file).to_pandas()
    for number, one in enumerate(TEXTS):
        capture(loaded, TextSet("one", (one,)), out=tmp_path / str(number), **options)
        alone = parquet.read_table(tmp_path / str(number) / file).to_pandas()
        own = together[together.example_id == number].sort_values("position")
        np.testing.assert_allclose(
            np.stack(own.vector), np.stack(alone.sort_values("position").vector), atol=1e-4
        )


def test_a_training_step_on_longrope_has_the_loss_of_each_piece_alone(tmp_path):
    loaded = loaded_rope()
    model = loaded.model
    texts = TextSet("mixed", tuple(text(n, n) for n in (70, 6, 52, 5, 4, 66, 3, 7, 49, 8)))
    corpus = build_corpus(loaded, texts, block=256, validation_share=0.0)
    recipe = Recipe(name="one", steps=1, lr=1e-3, batch_size=4, accumulation=1, block=256)
    blocks = step_blocks(corpus, recipe, 0, 0)
    rows = [
        (block.ids[row, : block.lengths[row]], int(block.lengths[row]))
        for _, block in blocks
        for row in range(len(block.lengths))
    ]
    assert len({length > TURN for _, length in rows}) == 2
    tokens = sum(length - 1 for _, length in rows)
    with torch.no_grad():
        alone = sum(
            float(
                torch.nn.functional.cross_entropy(
                    model(ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="sum"
                )
            )
            for ids, _ in rows
        )
    with opened(
        model, plan_for(model), tmp_path, recipe=recipe, corpus=corpus, reinit=False
    ) as job:
        assert backward_step(job, blocks, tokens) == pytest.approx(alone / tokens, rel=1e-5)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def test_dynamic_ntk_forgets_longer_texts_that_were_run_before():
    model = rope_model(rope=DYNAMIC, positions=64)
    whole = list(batches([random_ids(64)], 1))  # all of its positions
    fresh = measure_heads(model, whole).means()["entropy"]
    with torch.no_grad():  # somebody runs it past its positions
        model(torch.tensor([random_ids(200)]), use_cache=False)
    guard(model, 64)
    assert np.array_equal(measure_heads(model, whole).means()["entropy"], fresh)


def test_dynamic_ntk_reads_each_text_as_if_alone_within_its_positions():
    loaded = loaded_rope(rope=DYNAMIC, positions=64)
    texts = (text(90, 0), text(5, 1))  # the first is cut at all 64 positions
    together = diagnose(loaded, TextSet("long", texts), max_length=500, batch_size=2)
    alone = [diagnose(loaded, TextSet("one", (one,)), max_length=500) for one in texts]
    mean = np.mean([one.maps["entropy"] for one in alone], 0)
    np.testing.assert_allclose(together.maps["entropy"], mean, atol=2e-5)


def test_other_rope_types_read_all_lengths_in_one_batch():
    for rope in ({"rope_type": "default", "rope_theta": 1e4}, DYNAMIC):
        kind = length_class(rope_model(rope=rope))
        assert {kind(length) for length in (2, TURN, TURN + 1, 300)} == {0}
