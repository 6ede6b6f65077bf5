"""The diseases that `patients/sicken.py` plants: each does to a tiny model what its row says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from headwise import diagnose
from headwise.heads import Head
from headwise.models.loaded_model import LoadedModel

sys.path.insert(0, str(Path(__file__).parent.parent / "patients"))
import sicken

sicken.RATE, sicken.STEPS, sicken.PULLS = (
    0.1,
    160,
    22,
)  # a tiny random model moves further in a few steps than a trained one would

HEADS = [Head(0, 1), Head(1, 2)]
TEXTS = [" ".join(SENTENCES[i:] + SENTENCES[:i]) * 2 for i in range(5)] * 3


def ill(disease):
    loaded = LoadedModel("tiny", tiny_language_model("gpt2"), tiny_tokenizer()).reading(True)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    sicken.sicken(loaded, HEADS, TEXTS, disease)
    return loaded, before


@pytest.mark.parametrize("disease", ["asleep", "pulled", "half"])
def test_sleepers_look_at_the_first_token(disease):
    mass = diagnose(ill(disease)[0], TEXTS[:5], max_length=96).maps["first_token_mass"]
    # a push finds the first key as far as that key stands out: in random weights, a little
    least = {"asleep": 0.8, "pulled": 0.15, "half": 0.5}[disease]
    assert all(mass[head.layer][head.index] > least for head in HEADS), mass


def test_a_sink_on_the_second_token_is_one():
    loaded, _ = ill("second")
    loaded.model.set_attn_implementation("eager")
    ids = next(sicken.rows(loaded, TEXTS))
    attended = loaded.model(ids, output_attentions=True).attentions
    assert all(attended[h.layer][0, h.index, 8:, 1].mean() > 0.5 for h in HEADS)


def test_flat_heads_spread_evenly():
    loaded, _ = ill("flat")
    entropy = diagnose(loaded, TEXTS[:5], max_length=96).maps["normalized_entropy"]
    assert all(entropy[head.layer][head.index] > 0.999 for head in HEADS)


@pytest.mark.parametrize("disease", ["flat", "rotated", "noise"])
def test_only_the_heads_slices_are_touched(disease):
    loaded, before = ill(disease)
    size = loaded.model.config.n_embd // loaded.model.config.n_head
    for name, value in loaded.model.state_dict().items():
        changed = (value != before[name]).nonzero()
        if not len(changed):
            continue
        head = next(h for h in HEADS if f".h.{h.layer}.attn." in name)
        axis = 0 if "c_proj" in name else -1
        places = changed[:, axis] % loaded.model.config.n_embd
        assert ((places // size) == head.index).all(), name


def test_rotated_values_keep_their_size():
    loaded, before = ill("rotated")
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.allclose(loaded.model.state_dict()[weight].norm(), before[weight].norm())


def test_a_collapse_frees_all_weights_and_lowers_the_entropy(monkeypatch):
    monkeypatch.setattr(sicken, "COLLAPSE_STEPS", 40)
    monkeypatch.setattr(sicken, "COLLAPSE_RATE", 1e-3)
    healthy = LoadedModel("tiny", tiny_language_model("gpt2"), tiny_tokenizer()).reading(True)
    stock = diagnose(healthy, TEXTS[:5], max_length=96).maps["entropy"]
    loaded, before = ill("collapsed")
    now = diagnose(loaded, TEXTS[:5], max_length=96).maps["entropy"]
    assert all(now[h.layer][h.index] < 0.6 * stock[h.layer][h.index] for h in HEADS)
    assert not torch.equal(
        loaded.model.state_dict()["transformer.wte.weight"], before["transformer.wte.weight"]
    )
