"""A patch inside the base's GGUF file, and as a LoRA beside it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from typer.testing import CliRunner

from headwise.cli import app
from headwise.errors import HeadwiseError, ModelError
from headwise.handover.gguf_file import export_gguf, export_lora_gguf
from headwise.handover.merging import apply_patches
from headwise.heads import Head
from headwise.models.loading import load_model
from headwise.models.patch import Patch, Slice
from headwise.models.slices import read_slices, spans_of
from test_gguf import tiny_llama, write_gguf

HEADS = (Head(0, 1), Head(1, 2))
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture
def base(tmp_path, monkeypatch, request):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "base.gguf"
    write_gguf(path, tiny_llama(), Type[getattr(request, "param", "Q8_0")])
    return load_model(str(path), bos=False)


def changed_patch(loaded, roles="qo", amount=0.5, heads=HEADS):
    """Noise in some slices of heads."""
    generator = torch.Generator().manual_seed(0)
    spans = spans_of(loaded.model, heads, roles)
    slices = {}
    for name, value in read_slices(loaded.model, spans).items():
        noise = torch.randn(value.shape, generator=generator) * value.std() * amount
        slices[name] = Slice(spans[name], value, value + noise)
    return Patch(slices)


def release_patch(loaded):
    """A change of rank one per head, as `release` makes it."""
    spans = spans_of(loaded.model, HEADS, "q")
    slices = {}
    for name, value in read_slices(loaded.model, spans).items():
        u = torch.nn.functional.normalize(torch.ones(len(value)), dim=0)
        slices[name] = Slice(spans[name], value, value - torch.outer(u, u @ value))
    return Patch(slices)


@torch.inference_mode()
def logits(model):
    return model(TOKENS, use_cache=False).logits


def tensors(path):
    reader = gguf.GGUFReader(path)
    return {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize(
    ("base", "error"),
    [("F32", 0.0), ("F16", 1e-3), ("Q8_0", 0.01), ("Q5_0", 0.07), ("Q4_1", 0.15)],
    indirect=["base"],
)
def test_a_patched_file_read_back_is_the_patched_model(base, error, tmp_path):
    patch = changed_patch(base)
    written = export_gguf(base, patch, tmp_path / "patched.gguf")
    again = load_model(str(tmp_path / "patched.gguf"), bos=False).model.state_dict()
    with patch.applied(base.model):
        for name, value in base.model.state_dict().items():
            size = float(value.abs().max())
            assert float((again[name] - value).abs().max()) <= error * size, name
    assert written.error <= error
    assert set(written.stored) == {
        f"blk.{layer}.attn_{role}.weight" for layer in (0, 1) for role in ("q", "output")
    }


@pytest.mark.parametrize("base", ["F32", "F16", "Q8_0", "Q5_0", "Q4_1"], indirect=True)
def test_its_logits_are_the_merged_directorys_within_the_quantisations_error(base, tmp_path):
    """That error is measured: what rounding did to the logits of the whole model, mean square."""
    patch = changed_patch(base)
    export_gguf(base, patch, tmp_path / "patched.gguf")
    apply_patches(base, [patch], tmp_path / "merged")
    merged = logits(load_model(str(tmp_path / "merged"), bos=False).model)
    again = logits(load_model(str(tmp_path / "patched.gguf"), bos=False).model)
    quantised = (logits(base.model) - logits(tiny_llama())).square().mean().sqrt()
    allowed = quantised + 1e-6 * merged.square().mean().sqrt()
    assert (again - merged).square().mean().sqrt() <= allowed


def halve_blocks(path, name):
    """Another rounding than gguf-py's, as llama.cpp with an importance matrix has it."""
    reader = gguf.GGUFReader(path, "r+")
    [tensor] = [one for one in reader.tensors if one.name == name]
    numbers = tensor.data.reshape(-1, 34)[:, 2:].view(np.int8)  # behind a 2-byte scale
    numbers[:] = numbers // 2
    reader.data.flush()


def test_bytes_outside_the_patch_are_the_bases(base, tmp_path):
    """By hand: blocks of 32 numbers in rows; a head's queries are 16 rows of 64.

    Blocks that would be quantised to other bytes again (no value is 127) must keep theirs.
    """
    halve_blocks(base.id, "blk.0.attn_q.weight")
    base = load_model(base.id, bos=False)
    export_gguf(base, changed_patch(base, "q"), tmp_path / "patched.gguf")
    old, new = tensors(base.id), tensors(tmp_path / "patched.gguf")
    for name, tensor in old.items():
        same = (np.asarray(tensor.data) == np.asarray(new[name].data)).all(-1)
        rows = {"blk.0.attn_q.weight": range(16, 32), "blk.1.attn_q.weight": range(32, 48)}
        assert set(np.flatnonzero(~same)) == set(rows.get(name, ()))
    raw_old, raw_new = (
        (tmp_path / "base.gguf").read_bytes(),
        (tmp_path / "patched.gguf").read_bytes(),
    )
    assert len(raw_old) == len(raw_new)
    start = gguf.GGUFReader(base.id).data_offset
    assert raw_old[:start] == raw_new[:start]


def test_a_type_that_cannot_be_written_becomes_a_finer_one(base, tmp_path, monkeypatch):
    own = gguf.quants.quantize

    def only_fallback(values, kind):
        if kind != Type.Q8_0:
            raise NotImplementedError
        return own(values, kind)

    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "other"))
    write_gguf(tmp_path / "f16.gguf", tiny_llama(), Type.F16)  # stands for a K-quant
    loaded = load_model(str(tmp_path / "f16.gguf"), bos=False)
    patch = changed_patch(loaded, "o")
    with monkeypatch.context() as context:
        context.setattr(gguf.quants, "quantize", only_fallback)
        written = export_gguf(loaded, patch, tmp_path / "patched.gguf")
    assert set(written.stored.values()) == {"Q8_0"}
    assert "was F16, which gguf-py cannot write, and is Q8_0 now" in str(written)
    again = load_model(str(tmp_path / "patched.gguf"), bos=False).model
    with patch.applied(loaded.model):
        expected = logits(loaded.model)
    assert float((logits(again) - expected).abs().max() / expected.abs().max()) < 0.1


def test_a_lora_beside_the_base_is_the_patched_model(base, tmp_path):
    """Added as llama.cpp adds it: W + B A in the file's own order of rows."""
    patch = release_patch(base)
    export_lora_gguf(base, patch, tmp_path / "lora.gguf")
    lora, own = tensors(tmp_path / "lora.gguf"), tensors(base.id)
    assert {name.rsplit(".", 1)[0] for name in lora} == {
        f"blk.{layer}.attn_q.weight" for layer in (0, 1)
    }
    merged = tmp_path / "merged.gguf"
    write_merged(merged, base.id, own, lora)
    again = load_model(str(merged), bos=False).model
    with patch.applied(base.model):
        expected = logits(base.model)
    assert float((logits(again) - expected).abs().max() / expected.abs().max()) < 1e-4


def write_merged(path, source, own, lora):
    """The base in float32 with the LoRA added, copied field by field."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(
            name,
            field.contents(),
            kind,
            field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None,
        )
    for name, tensor in own.items():
        value = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if f"{name}.lora_a" in lora:
            value += np.asarray(lora[f"{name}.lora_b"].data) @ np.asarray(
                lora[f"{name}.lora_a"].data
            )
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_cannot_be_done_is_refused(base, tmp_path):
    with pytest.raises(HeadwiseError, match="changes nothing"):
        export_gguf(base, changed_patch(base, amount=0.0), tmp_path / "x.gguf")
    whole = changed_patch(base, heads=[Head(0, index) for index in range(4)])
    with pytest.raises(HeadwiseError, match="low-rank changes"):
        export_lora_gguf(base, whole, tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="only if the base is one"):
        export_gguf(load_model("patient"), changed_patch(base), tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_the_command_writes_what_the_library_writes(base, tmp_path):
    patch = changed_patch(base)
    patch.save(tmp_path / "patch.safetensors")
    export_gguf(base, patch, tmp_path / "library.gguf")
    command = ["export", str(tmp_path / "patch.safetensors"), "--model", base.id]
    done = CliRunner().invoke(app, [*command, "--gguf", str(tmp_path / "command.gguf")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "command.gguf").read_bytes() == (tmp_path / "library.gguf").read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 2
