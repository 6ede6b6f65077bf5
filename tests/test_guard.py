"""No verb trusts a row, and no mask is taken for another: what differs is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from conftest import SENTENCES, sharp_model, tiny_language_model, tiny_model, tiny_tokenizer
from headwise import capture, diagnose, evaluate, repair
from headwise.errors import ArtefactError, HeadwiseError, UnknownArchitectureError
from headwise.forward import faithfulness, tap
from headwise.forward.faithfulness import boundaries, compare_runs, proof_length
from headwise.forward.guard import guard
from headwise.forward.layer_by_layer import require_faithful
from headwise.forward.partial_run import layer_input
from headwise.forward.separability import check
from headwise.forward.tap import tapped
from headwise.models.architectures import projection_of
from headwise.models.families.known_families import ARCHITECTURES
from headwise.texts.text_sets import TextSet
from planned import TINY_RECIPE, plan_for, small_texts
from test_tap import logits, relative, token_ids
from tiny import COMMON, TINY

TEXTS = list(SENTENCES)


def test_chunks_are_followed_past_their_end():
    model = tiny_model("llama4-chunks")
    ids = torch.tensor([token_ids(120)])
    with tapped(model):
        seen = logits(model, ids)
    assert relative(seen, logits(model, ids)) < 1e-5


def test_the_check_sees_a_chunk_that_is_taken_for_a_window(monkeypatch):
    """The mistake that passed on 12 tokens: transformers hands the chunk over as `local_size`."""
    model = tiny_model("llama4-chunks")
    known = tap._window_of

    def mistaken(mask_function):
        return None if mask_function is tap.causal_mask_function else known(mask_function) or 32

    monkeypatch.setattr(tap, "_window_of", mistaken)
    found = check(model)
    assert not found.passed
    assert "the tap changes the logits" in found.reason()
    monkeypatch.setattr(faithfulness, "_LOGITS", 0)  # as of a large vocabulary: few positions
    monkeypatch.setattr(faithfulness, "_FEWEST", 8)
    assert compare_runs(model).positions == 8
    assert "the tap changes the logits" in check(model).reason()
    monkeypatch.setattr(faithfulness, "proof_length", lambda model: 12)
    assert compare_runs(model).logits < 1e-5


def test_a_check_samples_layers_and_heads_and_says_which():
    model = tiny_language_model("llama", num_hidden_layers=5)
    found = check(model)
    assert found.passed
    sampled = {"layers": [0, 2, 4], "heads": [0, 2, 3], "logit_positions": 128}
    assert found.to_json()["sampled"] == sampled
    assert len(check(model, everything=True).probes) == 5 * 4 * 3


def test_a_sample_has_a_layer_of_every_kind():
    kinds = ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 2
    model = tiny_language_model("gemma3", num_hidden_layers=7, layer_types=kinds)
    assert check(model).to_json()["sampled"]["layers"] == [0, 3, 4, 6]  # 4 is the only full one


def test_the_proof_goes_past_every_boundary_that_the_config_names():
    assert boundaries(tiny_model("llama4-chunks"))["attention_chunk_size"] == 32
    assert boundaries(tiny_model("gemma2")) == {"sliding_window": 40}
    assert proof_length(tiny_model("llama")) == 128
    config = AutoConfig.for_model("mistral", **{**COMMON, "sliding_window": 200})
    assert proof_length(sharp_model(config)) == 264


def two_way():
    """Gemma 3 as an encoder: known by name, with another attention."""
    family, extra = TINY["gemma3"]
    vocabulary = {"vocab_size": len(tiny_tokenizer())}
    config = {**COMMON, **extra, **vocabulary, "use_bidirectional_attention": True}
    return sharp_model(AutoConfig.for_model(family, **config))


def test_attention_that_looks_ahead_is_refused_by_every_verb(tmp_path):
    model, tokenizer = two_way(), tiny_tokenizer()
    with pytest.raises(HeadwiseError, match="not causal"):
        diagnose(model, tokenizer, TEXTS)
    with pytest.raises(HeadwiseError, match="not causal"):
        evaluate(model, tokenizer, [TextSet("texts", tuple(TEXTS))])
    with pytest.raises(HeadwiseError, match="not causal"):
        capture(model, tokenizer, TEXTS, out=tmp_path / "qk")
    plan, texts = plan_for(model), small_texts(40)
    with pytest.raises(HeadwiseError, match="not causal"):
        repair(model, tokenizer, plan, texts, TINY_RECIPE, out=tmp_path / "run")


WRONG = {
    "granite": {"logits_over": ""},  # perplexities would be wrong, unnoticed
    "gemma2": {"logits_cap": ""},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_wrong_about_the_logits_is_refused(name, monkeypatch):
    model = tiny_language_model(name)
    guard(model)
    row = ARCHITECTURES[TINY[name][0]]
    monkeypatch.setitem(ARCHITECTURES, TINY[name][0], replace(row, **WRONG[name]))
    with pytest.raises(UnknownArchitectureError, match="not what its row says"):
        guard(model)
    assert "loss path" in check(model).reason()
    with pytest.raises(UnknownArchitectureError, match="not what its row says"):
        diagnose(model, tiny_tokenizer(), TEXTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_guard_and_the_check(dtype):
    model = tiny_language_model("llama").to(dtype)
    guard(model)
    assert check(model).passed


def test_what_happens_between_a_head_and_its_output_projection_is_seen(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "afmoe", replace(ARCHITECTURES["afmoe"], gated=False))
    assert "before the output projection reads it" in check(tiny_model("afmoe")).reason()


class PackedLinear(nn.Module):
    """A projection in eight bits, as quantising libraries make them."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Buffer(scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def packed(unpacked):
    """A tiny llama whose projections are packed, or the same numbers in the open."""
    model = tiny_language_model("llama")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            small = PackedLinear(linear)
            if unpacked:
                linear.weight.data = small.weight.float() * small.scale
            else:
                setattr(layer.self_attn, name, small)
    return model


def test_quantised_projections_are_measured_as_they_compute():
    quantised = diagnose(packed(False), tiny_tokenizer(), TEXTS)
    plain = diagnose(packed(True), tiny_tokenizer(), TEXTS)
    for name, values in plain.maps.items():
        np.testing.assert_allclose(quantised.maps[name], values, atol=1e-5, err_msg=name)


def test_surgery_on_quantised_projections_is_refused_with_the_way_out(tmp_path):
    model = packed(False)
    assert type(projection_of(model, 0, "q")) is PackedLinear
    plan, texts = plan_for(model), small_texts(40)
    with pytest.raises(ArtefactError, match="are quantised") as caught:
        repair(model, tiny_tokenizer(), plan, texts, TINY_RECIPE, out=tmp_path / "run")
    assert "before it is quantised" in str(caught.value)


def slow_bloom(dtype):
    """A BLOOM whose own code, with tensor parallelism made exact, forgets the output bias."""
    model = tiny_language_model("bloom", pretraining_tp=2, slow_but_exact=True)
    return model.to(dtype)


HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_bloom_with_slow_but_exact_parallelism_is_refused_in_every_precision(dtype):
    model = slow_bloom(dtype)
    with pytest.raises(UnknownArchitectureError, match="not what its row says"):
        guard(model)
    assert "run by headwise" in check(model).reason() or "the tap changes" in check(model).reason()


@pytest.mark.parametrize("dtype", HALF)
def test_a_streamed_bloom_with_slow_but_exact_parallelism_is_refused_too(dtype):
    model = slow_bloom(dtype)
    ids = torch.tensor([token_ids(64)])
    with pytest.raises(UnknownArchitectureError, match="not what its row says"):
        require_faithful(model, 1, ids, layer_input(model, ids, 1))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", sorted(TINY))
def test_half_precision_alone_is_no_reason_to_refuse(name, dtype):
    guard(tiny_model(name).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_the_guard_in_half_precision_sees_one_lost_key_in_a_window(dtype, monkeypatch):
    """One key of forty moves the logits less than rounding does through all layers."""
    model = tiny_model("mistral").to(dtype)
    known = tap._window_of
    monkeypatch.setattr(tap, "_window_of", lambda mask: (known(mask) or 1) - 1 or None)
    with pytest.raises(UnknownArchitectureError, match="not what its row says"):
        guard(model)
