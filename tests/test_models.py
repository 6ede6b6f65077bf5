"""Loading: what is refused and how it is told, in the library and on the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from conftest import tiny_language_model, tiny_model
from headwise import load_model
from headwise.cli import app
from headwise.errors import HeadwiseError, ModelError, UnknownArchitectureError
from headwise.models.description import describe_model, weight_fingerprint


@pytest.fixture
def copy(model_dir, tmp_path):
    """A private copy of the model directory, to be damaged."""
    return shutil.copytree(model_dir, tmp_path / "model")


def test_a_directory_becomes_a_model_with_its_name(model_dir):
    loaded = load_model(str(model_dir))
    assert loaded.id == str(model_dir)
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype == torch.float32
    about = loaded.describe()
    assert (about.num_layers, about.num_heads, about.num_kv_heads) == (2, 4, 2)
    assert about.positions == "rope"
    assert about.num_parameters == sum(p.numel() for p in loaded.model.parameters())


def test_a_type_is_chosen_by_name(model_dir):
    assert next(load_model(str(model_dir), dtype="bfloat16").model.parameters()).dtype == (
        torch.bfloat16
    )
    with pytest.raises(ModelError, match="unknown --dtype 'float17'"):
        load_model(str(model_dir), dtype="float17")
    with pytest.raises(ModelError, match="unknown --dtype 'nn'"):
        load_model(str(model_dir), dtype="nn")


def test_the_fingerprint_is_of_every_bit():
    model = tiny_model("bloom")
    before = weight_fingerprint(model)
    assert weight_fingerprint(tiny_model("bloom")) == before
    weight = model.transformer.h[1].mlp.dense_h_to_4h.bias
    with torch.no_grad():
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    assert weight_fingerprint(model) != before
    assert describe_model(model).slopes == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8])


def damage_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remove_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def poison(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"][2, 3] = float("nan")
    save_file(tensors, path, {"format": "pt"})


def lose_a_tensor(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, {"format": "pt"})


def pickle_weights(folder):
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def save_unknown(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "rwkv", vocab_size=400, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


DAMAGE = {
    "an unknown architecture": (
        save_unknown,
        UnknownArchitectureError,
        "model_type='rwkv'",
    ),
    "no tokenizer": (remove_tokenizer, ModelError, "no tokenizer could be loaded"),
    "weights cut off": (cut_weights, ModelError, "the weight file is damaged or cut off"),
    "weights cut off in the header": (
        cut_header,
        ModelError,
        "the weight file is damaged or cut off",
    ),
    "a NaN weight": (
        poison,
        ModelError,
        r"NaN or infinity, first in model\.layers\.1\.self_attn\.k_proj\.weight",
    ),
    "a missing tensor": (
        lose_a_tensor,
        ModelError,
        r"no weights for model\.layers\.1\.self_attn\.k_proj\.weight",
    ),
    "a shape that differs": (
        lambda folder: damage_config(folder, intermediate_size=40),
        ModelError,
        "the weight file is damaged or cut off|do not fit",
    ),
    "an unknown model type": (
        lambda folder: damage_config(folder, model_type="nonesuch"),
        ModelError,
        "nonesuch",
    ),
    "pickled weights": (pickle_weights, ModelError, "--allow-pickle"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ModelError,
        "could not be loaded",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_model_is_refused_with_the_reason(kind, copy):
    damage, error, message = DAMAGE[kind]
    damage(copy)
    with pytest.raises(error, match=message) as caught:
        load_model(str(copy))
    assert isinstance(caught.value, HeadwiseError)


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "a/b/c", "gone.gguf"])
def test_a_missing_model_is_refused(name):
    with pytest.raises(ModelError, match=r"no such model directory|no such GGUF file"):
        load_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF but cut off")
    with pytest.raises(ModelError, match=r"could be loaded|could not be loaded|cut off"):
        load_model(str(path))


def test_a_hub_id_that_is_not_at_hand_is_refused_offline():
    with pytest.raises(ModelError, match=r"^offline: |no tokenizer could be loaded"):
        load_model("nobody/nothing")


def test_pickled_weights_load_when_asked_for(copy, model_dir):
    pickle_weights(copy)
    loaded = load_model(str(copy), allow_pickle=True)
    assert weight_fingerprint(loaded.model) == weight_fingerprint(load_model(str(model_dir)).model)


def run(*arguments):
    """The command line in this process; known failures reach us as they reach `main`."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_diagnose_writes_what_it_says(model_dir, tmp_path):
    result = run("diagnose", model_dir, "--out", tmp_path, "--max-length", 64)
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert {"diagnosis.json", "first_token_mass_map.png", "profile_by_position.svg"} <= names
    assert "wrote" in result.output
    body = json.loads((tmp_path / "diagnosis.json").read_text())
    assert body["provenance"]["texts"]["name"] == "bundled"
    quiet = run(
        "diagnose",
        model_dir,
        "--out",
        tmp_path / "q",
        "--quiet",
        "--no-figures",
        "--max-length",
        64,
    )
    assert quiet.output == ""
    first, second = tmp_path / "diagnosis.json", tmp_path / "q" / "diagnosis.json"
    assert first.read_bytes() == second.read_bytes()


def test_survey_takes_models_and_diagnoses_together(model_dir, tmp_path):
    from headwise.diagnosis.bloom_maps import STOCK_MAPS

    result = run("survey", model_dir, STOCK_MAPS, "--out", tmp_path, "--max-length", 32)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "survey.json").read_text())["rows"]
    assert [row["sick"] for row in rows][1:] == [169, 139, 365, 296]
    assert (tmp_path / "survey.png").exists()


def test_check_says_what_it_proved(model_dir):
    result = run("check", model_dir)
    assert result.exit_code == 0, result.output
    assert "2 layers x 4 heads (2 key/value heads of 8)" in result.output
    assert (
        "Heads are separable: 18 slices of 6 of 8 heads moved exactly their own heads"
        in result.output
    )


def test_a_known_failure_is_one_message_and_exit_code_1(copy, tmp_path):
    """The real program, once: no traceback, the three parts of the message, nothing written."""
    poison(copy)
    done = subprocess.run(
        [sys.executable, "-m", "headwise.cli", "diagnose", copy, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("headwise: weights hold NaN or infinity")
    assert "  where  " in done.stderr
    assert "  fix    " in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_usage_is_exit_code_2(model_dir):
    assert run("diagnose").exit_code == 2
    assert run("diagnose", model_dir, "--max-length", 1).exit_code == 2
    assert run("diagnoze", model_dir).exit_code == 2


@pytest.mark.parametrize("kind", ["no tokenizer", "weights cut off", "an unknown architecture"])
def test_the_command_line_passes_failures_on_to_main(kind, copy, tmp_path):
    DAMAGE[kind][0](copy)
    result = run("diagnose", copy, "--out", tmp_path / "out")
    assert isinstance(result.exception, HeadwiseError)


@pytest.mark.parametrize(
    ("text", "message"), [("", "no text found"), ("a", "at least 2 are needed")]
)
def test_bad_texts_are_refused_on_the_command_line(model_dir, tmp_path, text, message):
    path = tmp_path / "x.txt"
    path.write_text(text)
    result = run("diagnose", model_dir, "--texts", path, "--out", tmp_path / "out")
    assert isinstance(result.exception, HeadwiseError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("projections", "message"),
    [
        (("q_proj", "v_proj", "k_proj"), "noise in the k weights of L0H0 changed its layer's v"),
        (("k_proj", "k_proj", "v_proj"), "does not fit this model"),
        (("q_proj", "k_proj", "w_proj"), "fits no layer of this model"),
    ],
)
def test_a_wrong_row_fails_the_check(model_dir, monkeypatch, projections, message):
    from dataclasses import replace

    from headwise.models.families.known_families import ARCHITECTURES

    monkeypatch.setitem(
        ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], projections=projections)
    )
    result = run("check", model_dir)
    assert isinstance(result.exception, UnknownArchitectureError)
    assert message in str(result.exception)


def test_gguf_models_can_be_saved_again(tmp_path):
    """The flag that transformers sets on a de-quantised model must not stop `save_pretrained`."""
    from headwise.models.loading import _forget_quantization

    model = tiny_language_model("llama")
    model.hf_quantizer = object()
    model.is_quantized = True
    model.config.quantization_config = {"quant_method": "gguf"}
    _forget_quantization(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
