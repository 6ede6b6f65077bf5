"""GGUF files of several kinds become the model they were made from."""

from __future__ import annotations

import json
import os
import resource
from contextlib import contextmanager

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import tiny_language_model, tiny_tokenizer
from headwise.cli import app
from headwise.errors import ModelError
from headwise.models import conversions, loading
from headwise.models.loading import load_model

HEADS, GROUPS, WIDTH = 4, 2, 64
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama():
    widths = {"hidden_size": WIDTH, "intermediate_size": 96}
    return tiny_language_model("llama", **widths, num_key_value_heads=GROUPS)


def gguf_name(name):
    if not name.startswith("model.layers."):
        whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        return whole.get(name.removesuffix(".weight"), "output") + ".weight"
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}.weight"


def interleaved(weights, heads):
    """llama.cpp rotates neighbours, transformers halves: its rows of q and k stand otherwise."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_words(writer):
    tokenizer = tiny_tokenizer()
    body = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = sorted(body["vocab"], key=body["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(words) - 3)
    )
    writer.add_token_merges([" ".join(pair) for pair in body["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(path, model, kind):
    """A GGUF file as llama.cpp's converter writes it; vectors stay in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    write_words(writer)
    for name, tensor in model.state_dict().items():
        weights = tensor.numpy().astype(np.float32)
        if "q_proj" in name or "k_proj" in name:
            weights = interleaved(weights, HEADS if "q_proj" in name else GROUPS)
        kept = gguf.GGMLQuantizationType.F32 if weights.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weights, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *(("F32", 0.0), ("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 0.01)),
        *(("Q5_0", 0.07), ("Q5_1", 0.07), ("Q4_0", 0.15), ("Q4_1", 0.15)),
    ],
)
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path, monkeypatch, kind, error):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    model = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", model, gguf.GGMLQuantizationType[kind])
    loaded = load_model(str(tmp_path / "tiny.gguf"), bos=False)
    found = loaded.model.state_dict()
    for name, weights in model.state_dict().items():
        size = weights.abs().max()
        assert float((found[name] - weights).abs().max()) <= error * float(size), name
    assert loaded.model.dtype == torch.float32
    text = "The lighthouse keeper"
    assert loaded.tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids


@pytest.mark.parametrize("raw", [b"", b"GGUF" + bytes(40), b"hello" * 100])
def test_a_damaged_gguf_file_is_told(tmp_path, monkeypatch, raw):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"(?s)x\.gguf.*fix|could be loaded|cannot be used"):
        load_model(str(tmp_path / "x.gguf"), bos=False)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_cut_off_gguf_file_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.Q8_0)
    raw = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(raw[: len(raw) * 2 // 3])
    with pytest.raises(ModelError, match="fix"):
        load_model(str(tmp_path / "cut.gguf"), bos=False)


@contextmanager
def full_disk(most):
    """No file may grow over so many bytes, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_cache_disk_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.Q8_0)
    with full_disk(20_000), pytest.raises(ModelError, match=r"(?s)cannot be kept.*HEADWISE_CACHE"):
        load_model(str(tmp_path / "tiny.gguf"), bos=False)
    assert not list((tmp_path / "cache" / "gguf").iterdir())
    assert load_model(str(tmp_path / "tiny.gguf"), bos=False).model.dtype == torch.float32


def test_a_gguf_file_is_converted_once_and_the_cache_is_shown_bounded_and_cleared(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    calls = []
    convert = loading._convert_gguf
    monkeypatch.setattr(
        loading, "_convert_gguf", lambda *args: (calls.append(args), convert(*args))
    )
    for name, kind in (("old", "Q8_0"), ("new", "F16")):
        write_gguf(tmp_path / f"{name}.gguf", tiny_llama(), gguf.GGMLQuantizationType[kind])
        for _ in range(2):
            load_model(str(tmp_path / f"{name}.gguf"), bos=False)
    assert len(calls) == 2
    old, new = conversions.conversions()
    os.utime(old / conversions.SOURCE, (1, 1))
    shown = CliRunner().invoke(app, ["cache"]).output
    assert "old.gguf" in shown
    assert "new.gguf" in shown
    conversions.make_room(new, bound=conversions.size_of(new))
    assert [conversions.source_of(one) for one in conversions.conversions()] == ["new.gguf"]
    conversions.make_room(new, bound=0)  # what is in use stays
    assert conversions.conversions() == [new]
    assert CliRunner().invoke(app, ["cache", "--clear"]).exit_code == 0
    assert conversions.conversions() == []
