"""Models that stay on disk: all texts through one layer before the next is read."""

from __future__ import annotations

import json
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import tiny_language_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward import passes
from headwise.models import loading
from headwise.models.loading import load_model
from headwise.models.stored_weights import StoredTensor, stored_weights
from headwise.proof.perplexity import text_losses
from headwise.texts.text_sets import TextSet
from planned import small_texts

CLOSE = 1e-6
TEXTS = TextSet("streamed", small_texts(7).texts)
# both tap routes, a tied and a free output head, learned positions, a cap, a hybrid
FAMILIES = ("bloom", "llama", "gpt2", "gemma2", "lfm2")


def saved(name, folder):
    tiny_language_model(name).save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp(request.param))


def close(found, expected):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    return np.abs(found - expected).max() <= CLOSE * max(1.0, np.abs(expected).max())


def test_a_streamed_diagnosis_is_that_of_the_loaded_model(folder):
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    assert all(p.is_meta for p in streamed.model.parameters())
    found, expected = (diagnose(one, TEXTS, batch_size=2) for one in (streamed, plain))
    for name, values in expected.maps.items():
        assert close(found.maps[name], values), name
    assert found.classes == expected.classes
    assert found.model == expected.model  # the fingerprint too
    assert found.mlp_dormancy == expected.mlp_dormancy
    assert found.alarms == expected.alarms


def test_streamed_losses_are_those_of_the_loaded_model(folder):
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    found, expected = (text_losses(one, TEXTS, batch_size=3) for one in (streamed, plain))
    assert close(found.sums, expected.sums)
    assert (found.tokens == expected.tokens).all()


def test_each_layer_is_read_once_for_all_texts(folder, monkeypatch):
    streamed = load_model(folder, bos=False, stream=True)
    stored = stored_weights(streamed.model)
    layers = {(one.file, one.offset) for name, one in stored.tensors.items() if ".0." in name}
    reads = []
    read = StoredTensor.read

    def counted(self, start, stop):
        reads.append((self.file, self.offset))
        return read(self, start, stop)

    monkeypatch.setattr(StoredTensor, "read", counted)
    text_losses(streamed, TEXTS, batch_size=1)
    assert layers
    assert {reads.count(place) for place in layers} == {1}


def test_a_model_larger_than_free_memory_is_streamed_without_being_asked(tmp_path, monkeypatch):
    folder = saved("llama", tmp_path)
    assert stored_weights(load_model(folder, bos=False).model) is None
    monkeypatch.setattr(loading, "free_memory", lambda: 1000)
    assert stored_weights(load_model(folder, bos=False).model) is not None


def test_free_memory_respects_the_limit_of_the_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    free = loading.free_memory()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**40, hard))
        assert loading.free_memory() <= min(free * 1.1, 2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert free > 2**20


def test_a_checkpoint_without_a_tensor_cannot_be_streamed(tmp_path):
    folder = saved("llama", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / index["model.layers.1.mlp.up_proj.weight"]
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"cannot be streamed.*up_proj"):
        load_model(folder, bos=False, stream=True)


def test_a_nan_in_a_streamed_layer_is_named(tmp_path):
    folder = saved("llama", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / index["model.layers.1.mlp.up_proj.weight"]
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"NaN.*layers\.1\.mlp\.up_proj"):
        diagnose(load_model(folder, bos=False, stream=True), TEXTS)


def test_a_streamed_layer_that_is_not_what_its_row_says_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "_EXACT", -1.0)
    loaded = load_model(saved("llama", tmp_path), bos=False, stream=True)
    with pytest.raises(UnknownArchitectureError, match="output of layer 0 differs"):
        diagnose(loaded, TEXTS)
