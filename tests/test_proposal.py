"""Families without a row: found by shape, proved on the model itself, or refused by the proof."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.olmo2 import Olmo2Config, Olmo2ForCausalLM
from typer.testing import CliRunner

from conftest import sharp_model, tiny_tokenizer
from headwise import diagnose
from headwise.cli import app
from headwise.errors import UnknownArchitectureError
from headwise.forward.guard import guard
from headwise.forward.separability import check, prove_row
from headwise.models.architectures import architecture_of, is_proposed
from headwise.models.families.known_families import ARCHITECTURES
from headwise.models.families.proposal import propose_rows, row_text
from tiny import COMMON, GQA, MORE, TINY


class WanderConfig(LlamaConfig):
    """A llama under a name that nobody knows."""

    model_type = "wander"


class WanderForCausalLM(LlamaForCausalLM):
    """Its model."""

    config_class = WanderConfig


class StrollConfig(Olmo2Config):
    """An olmo2, whose norms couple the heads, under a name that nobody knows."""

    model_type = "stroll"


class StrollForCausalLM(Olmo2ForCausalLM):
    """Its model."""

    config_class = StrollConfig


for made, language_model in ((WanderConfig, WanderForCausalLM), (StrollConfig, StrollForCausalLM)):
    AutoConfig.register(made.model_type, made, exist_ok=True)
    AutoModelForCausalLM.register(made, language_model, exist_ok=True)

VOCABULARY = {"vocab_size": len(tiny_tokenizer())}


def unknown(family):
    return sharp_model(AutoConfig.for_model(family, **{**COMMON, **GQA, **VOCABULARY}))


def test_a_renamed_llama_works_without_a_row():
    model = unknown("wander")
    assert is_proposed(model)
    diagnosis = diagnose(model, tiny_tokenizer(), ["one two three four five six seven eight"])
    same = sharp_model(AutoConfig.for_model("llama", **{**COMMON, **GQA, **VOCABULARY}))
    known = diagnose(same, tiny_tokenizer(), ["one two three four five six seven eight"])
    assert diagnosis.maps["entropy"].tolist() == known.maps["entropy"].tolist()
    assert check(model).passed


def test_a_renamed_olmo2_is_refused_by_the_proof():
    model = unknown("stroll")
    with pytest.raises(UnknownArchitectureError, match=r"moved heads \[0, 1, 2, 3\]"):
        guard(model)
    with pytest.raises(UnknownArchitectureError, match="does not hold: noise in the q weights"):
        diagnose(model, tiny_tokenizer(), ["one two three four five six seven eight"])


def test_the_command_line_says_that_a_row_was_proved_and_writes_it(tmp_path):
    unknown("wander").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    done = CliRunner().invoke(
        app, ["check", str(tmp_path / "model"), "--write-row", "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "'wander' has no row; its heads were found by shape and proved" in done.output
    assert '"wander": Architecture(),' in done.output


WAYS = ("llama", "phi3", "gpt_neox", "gpt2", "qwen3", "granite", "gemma2", "mistral")
ODD = ("afmoe", "cohere", "phi", "lfm2", "seed_oss", "gpt_bigcode-mha")


@pytest.mark.parametrize("name", [*WAYS, *ODD])
def test_known_families_would_be_found_by_their_shape(name, monkeypatch):
    """The rows of the table are the answers that the proposal must give."""
    family, extra = (TINY | MORE)[name]
    row = ARCHITECTURES[family]
    monkeypatch.delitem(ARCHITECTURES, family)
    model = sharp_model(AutoConfig.for_model(family, **{**COMMON, **extra}))
    found = prove_row(model)
    kept = ("layers", "attention", "projections", "output", "order", "gated", "logits_over")
    assert [getattr(found, key) for key in kept] == [getattr(row, key) for key in kept]
    assert architecture_of(model) == found
    guard(model, 64)


def test_a_model_without_a_shape_that_could_be_read_is_refused():
    model = sharp_model(AutoConfig.for_model("mamba", **{**COMMON, "state_size": 4}))
    assert propose_rows(model) == []
    with pytest.raises(UnknownArchitectureError, match="model_type='mamba'"):
        guard(model)


def test_a_shape_whose_attention_bypasses_the_interface_is_refused():
    model = sharp_model(AutoConfig.for_model("codegen", **{**COMMON, "rotary_dim": 4}))
    with pytest.raises(UnknownArchitectureError, match="does not hold: the tap saw no layer"):
        guard(model)


@pytest.mark.parametrize("encoder_layers", [2, 3])
@pytest.mark.parametrize("family", ["bart", "marian", "pegasus"])
def test_the_decoder_of_a_sequence_model_is_read_by_its_own_attention(family, encoder_layers):
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    sizes["encoder_layers"] = encoder_layers
    sizes |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "vocab_size": 97}
    model = sharp_model(AutoConfig.for_model(family, **sizes, pad_token_id=0, scale_embedding=True))
    assert check(model).passed
    assert architecture_of(model).attention == "self_attn"


def test_check_tries_every_row_that_a_shape_suggests_as_the_command_does():
    """Of a fused projection the order of the heads is tried: fuyu's is the second of two."""
    model = sharp_model(AutoConfig.for_model("fuyu", **COMMON))
    assert check(model).passed
    assert architecture_of(model).order == "grouped"


@pytest.mark.parametrize("family", ["mvp", "trocr"])
def test_check_refuses_what_it_cannot_tap(family):
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2}
    sizes |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "vocab_size": 97}
    model = sharp_model(AutoConfig.for_model(family, **sizes, pad_token_id=0))
    with pytest.raises(UnknownArchitectureError, match="does not hold: the tap saw no layer"):
        check(model)


def test_a_row_is_written_as_it_would_stand_in_the_table():
    row = ARCHITECTURES["phi"]
    assert row_text("phi", row) == (
        "\"phi\": Architecture(output='dense', mlp_in=('mlp.fc1',), mlp_out='mlp.fc2'),"
    )
