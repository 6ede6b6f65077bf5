"""Models that stay on disk: all texts through one layer before the next is read."""

from __future__ import annotations

import json
import resource
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import tiny_language_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward import tap
from headwise.forward.interventions import UNSINK, ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head
from headwise.models import loading
from headwise.models.architectures import geometry_of
from headwise.models.description import weight_fingerprint
from headwise.models.loading import load_model
from headwise.models.patch import Patch, Slice
from headwise.models.slices import spans_of
from headwise.models.stored_weights import stored_weights
from headwise.models.tensor_files import StoredTensor
from headwise.models.values import PatchInfo
from headwise.plasticity.capture import capture
from headwise.plasticity.settings import CaptureSettings
from headwise.proof.evaluate import evaluate
from headwise.proof.perplexity import text_losses
from headwise.texts.text_sets import TextSet
from headwise.triaging.settings import TriageSettings
from headwise.triaging.triage import triage
from planned import random_ids, small_texts

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
    assert close(found.document_loss_sums, expected.document_loss_sums)
    assert found.document_tokens == expected.document_tokens


@pytest.fixture
def reads(monkeypatch):
    """The places in files that are read, one entry for each number's first reading and again."""
    found = Counter()
    read = StoredTensor.read

    def counted(self, start, stop):
        found[self.file, self.offset, start] += 1
        return read(self, start, stop)

    monkeypatch.setattr(StoredTensor, "read", counted)
    return found


def times_read(loaded, reads, part):
    """How often each tensor was read whose name holds `part`, by its first piece."""
    stored = stored_weights(loaded.model).tensors
    places = {(one.file, one.offset) for name, one in stored.items() if part in name}
    return {reads[(*place, 0)] for place in places}


def test_each_layer_is_read_once_for_all_texts(folder, reads):
    streamed = load_model(folder, bos=False, stream=True)
    text_losses(streamed, TEXTS, batch_size=1)
    assert times_read(streamed, reads, ".0.") == {1}


def test_the_output_head_is_read_once_for_all_batches(tmp_path, reads):
    streamed = load_model(saved("llama", tmp_path), bos=False, stream=True)
    text_losses(streamed, TEXTS, batch_size=1)
    assert times_read(streamed, reads, "lm_head.weight") == {1}


SETS = [TEXTS, TextSet("more", small_texts(12).texts[4:])]


def evaluated(loaded, **options):
    return evaluate(loaded, SETS, batch_size=3, max_length=48, **options)


def same_evaluation(found, expected):
    for name, losses in expected.text_sets.items():
        assert close(found.text_sets[name].document_loss_sums, losses.document_loss_sums), name
    for name, values in expected.diagnosis.maps.items():
        assert close(found.diagnosis.maps[name], values), name
    assert found.diagnosis.model == expected.diagnosis.model
    assert found.mlp_dormancy == expected.mlp_dormancy
    for kind in ("ablation_zero", "ablation_mean"):
        costs, wanted = getattr(found.heads, kind), getattr(expected.heads, kind)
        assert list(costs) == list(wanted)
        assert all(close(costs[name].value, wanted[name].value) for name in wanted), kind
    assert found.alarms == expected.alarms


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_streamed_evaluation_is_that_of_the_loaded_model(folder, adaptive):
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    layer = geometry_of(plain.model).layers[-1]
    joint = {"two": [Head(geometry_of(plain.model).layers[0], 1), Head(layer, 0)]}
    options = {"heads": [Head(layer, 0), Head(layer, 1)], "joint": joint, "adaptive": adaptive}
    found, expected = (evaluated(one, **options) for one in (streamed, plain))
    same_evaluation(found, expected)
    assert found.heads.first_order is None


def test_a_streamed_evaluation_reads_a_layer_once_and_once_for_the_fingerprint(folder, reads):
    streamed = load_model(folder, bos=False, stream=True)
    evaluated(streamed, heads="none")
    assert times_read(streamed, reads, ".1.") == {2}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_patch_lies_over_what_is_streamed(name, tmp_path):
    folder = saved(name, tmp_path)
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    spans = spans_of(plain.model, [Head(1, 0)])
    slices = {
        n: Slice(s, s.of(plain.model).clone(), s.of(plain.model) + 0.3) for n, s in spans.items()
    }
    patch = Patch(slices, PatchInfo())
    before = weight_fingerprint(streamed.model)
    options = {"patches": [patch], "heads": "none"}
    found, expected = (evaluated(one, **options) for one in (streamed, plain))
    same_evaluation(found, expected)
    assert weight_fingerprint(streamed.model) == before == weight_fingerprint(plain.model)
    unpatched = evaluated(plain, heads="none")
    assert not close(
        unpatched.diagnosis.maps["first_token_mass"], found.diagnosis.maps["first_token_mass"]
    )


def captured(loaded, out, **options):
    """All vectors of a capture by file."""
    capture(loaded, TEXTS, out=out, batch_size=3, **options)
    found = {}
    for path in sorted(out.glob("*/data.parquet")):
        table = pq.read_table(path)
        vectors = np.stack(table["vector"].to_numpy(zero_copy_only=False))
        rows = table.select(["bucket", "example_id", "position"]).to_pydict()
        found[path.parent.name] = rows, vectors
    return found


@pytest.mark.parametrize("pre_rope", [False, True])
def test_a_streamed_capture_is_that_of_the_loaded_model(folder, tmp_path, pre_rope):
    settings = CaptureSettings(max_length=32, base_rate=8.0, pre_rope=pre_rope)
    plain, streamed = (
        captured(load_model(folder, bos=False, stream=way), tmp_path / str(way), settings=settings)
        for way in (False, True)
    )
    assert list(streamed) == list(plain)
    for name, (rows, vectors) in plain.items():
        assert streamed[name][0] == rows, name
        assert close(streamed[name][1], vectors), name


def test_a_streamed_capture_reads_no_layer_above_the_last_one_it_needs(tmp_path, reads):
    streamed = load_model(saved("llama", tmp_path / "model"), bos=False, stream=True)
    streamed.describe()
    reads.clear()
    captured(streamed, tmp_path / "qk", heads=[Head(0, 0)])
    assert times_read(streamed, reads, "layers.0.") == {1}
    assert times_read(streamed, reads, "layers.1.") == {0}


def test_variants_that_do_not_fit_together_go_up_one_after_the_other(tmp_path, reads, monkeypatch):
    streamed = load_model(saved("llama", tmp_path), bos=False, stream=True)
    heads = [Head(1, 0), Head(0, 1), Head(0, 0), Head(1, 1)]
    variants = [Variant((head,), ZERO) for head in heads]

    def run(room):
        reads.clear()
        monkeypatch.setattr("headwise.forward.variant_sweeps.free_memory", lambda: 4 * room)
        return variant_losses(streamed.model, [random_ids(20)], variants).losses

    at_once = run(10**9)
    assert times_read(streamed, reads, "layers.1.") == {1}
    two_by_two = run(2 * 20 * 32 * 4)
    assert times_read(streamed, reads, "layers.0.") == {1}  # the second pair begins above it
    assert times_read(streamed, reads, "layers.1.") == {2}
    assert close(two_by_two, at_once)
    assert len(set(at_once[:, 0].round(5))) == 4


def test_variants_cost_the_same_from_disk_and_in_memory(folder):
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    layers = geometry_of(plain.model).layers
    sets = [
        (Head(layers[0], 1),),
        (Head(layers[0], 0), Head(layers[-1], 1)),
        (Head(layers[-1], 0),),
    ]
    variants = [Variant(heads, kind) for kind in (UNSINK, ZERO) for heads in sets]
    documents = [random_ids(n) for n in (20, 9)]
    found, expected = (variant_losses(one.model, documents, variants) for one in (streamed, plain))
    assert close(found.base, expected.base)
    assert close(found.losses, expected.losses)


def test_triage_of_a_streamed_model_is_that_of_the_loaded_one(folder):
    plain, streamed = (load_model(folder, bos=False, stream=way) for way in (False, True))
    diagnosis = diagnose(plain, TEXTS)
    settings = TriageSettings(max_texts=5, max_length=32)
    layer = geometry_of(plain.model).layers[-1]
    found, expected = (
        triage(one, diagnosis, TEXTS, heads=f"L{layer}H0-1", settings=settings)
        for one in (streamed, plain)
    )
    assert expected.heads
    for head, row in expected.heads.items():
        for kind in ("zero", "mean", "unsink", "release"):
            one, other = getattr(found.heads[head], kind), getattr(row, kind)
            assert (one is None) == (other is None)
            assert one is None or close(one.value, other.value), (head, kind)
        assert found.heads[head].class_ == row.class_


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


def test_a_model_is_made_without_room_for_its_largest_weight(tmp_path, monkeypatch):
    folder = saved("llama", tmp_path)
    made = []
    empty = torch.empty

    def watched(*sizes, **options):
        found = empty(*sizes, **options)
        made.append(found)
        return found

    monkeypatch.setattr(torch.nn.modules.linear.torch, "empty", watched)
    model = load_model(folder, bos=False, stream=True).model
    assert made
    assert all(one.is_meta for one in made if one.numel() > 1000)
    assert not any(buffer.is_meta for buffer in model.buffers())


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
    own = tap.attend

    def louder(scores, v):
        out, lse = own(scores, v)
        return out * 1.1, lse

    monkeypatch.setattr(tap, "attend", louder)
    loaded = load_model(saved("llama", tmp_path), bos=False, stream=True)
    with pytest.raises(UnknownArchitectureError, match="output of layer 0 differs"):
        diagnose(loaded, TEXTS)
