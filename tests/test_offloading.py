"""Every verb on a model that accelerate keeps on the CPU and on disk, beside the plain run."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from conftest import tiny_language_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.settings import Thresholds
from headwise.errors import ModelError
from headwise.forward.separability import check
from headwise.heads import Head
from headwise.models.architectures import architecture_of
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.slices import spans_of, write_slices
from headwise.plasticity.capture import capture
from headwise.proof.completed_texts import Prompt
from headwise.proof.completions import complete_prompts
from headwise.proof.evaluate import evaluate
from headwise.proof.settings import Sampling
from headwise.surgery.plan import make_plan
from headwise.texts.text_sets import TextSet
from headwise.therapy.repair import repair
from headwise.triaging.settings import TriageSettings
from headwise.triaging.triage import triage
from planned import TINY_RECIPE, small_texts

CLOSE = 1e-6
TEXTS = TextSet("offloaded", small_texts(6).texts)
# one family of the AttentionInterface, one with its own forward
FAMILIES = ("llama", "bloom")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """The same saved model, plain and with its layers on the CPU and on disk."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_language_model(request.param, num_hidden_layers=3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    layers = architecture_of(model).layers
    places = {name: "cpu" for name, _ in model.named_children()}
    outer = {f"{layers.rpartition('.')[0]}.{n}": "cpu" for n, _ in _beside(model, layers)}
    places.pop(layers.partition(".")[0], None)
    places |= outer | {f"{layers}.{n}": "disk" if n else "cpu" for n in range(3)}
    return load_model(str(folder)), load_model(str(folder), device_map=places)


def _beside(model, layers):
    parent, _, own = layers.rpartition(".")
    return [(n, m) for n, m in model.get_submodule(parent).named_children() if n != own]


def close(found, expected, tolerance=CLOSE):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    return np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def test_the_pair_is_one_model_of_which_part_is_on_disk(pair):
    plain, placed = pair
    assert any(p.is_meta for p in placed.model.parameters())
    assert weight_fingerprint(placed.model) == weight_fingerprint(plain.model)


def test_diagnosis_triage_and_evaluation_are_those_of_the_plain_model(pair):
    maps = [diagnose(one, TEXTS, bos=False, thresholds=Thresholds(sink=0.2)) for one in pair]
    for name, values in maps[0].maps.items():
        assert close(maps[1].maps[name], values), name
    settings = TriageSettings(max_texts=5, max_length=32)
    found = [triage(one, maps[0], TEXTS, heads="L0-1H1", settings=settings) for one in pair]
    for head, row in found[0].heads.items():
        assert close(found[1].heads[head].zero.value, row.zero.value), head
        assert close(found[1].heads[head].release.value, row.release.value), head
    judged = [evaluate(one, [TEXTS], heads="L0-2H0", bos=False) for one in pair]
    for head, cost in judged[0].heads.ablation_zero.items():
        assert close(judged[1].heads.ablation_zero[head].value, cost.value), head
    losses = [one.text_sets["offloaded"].loss.value for one in judged]
    assert close(*losses)


def test_captured_vectors_and_completions_are_those_of_the_plain_model(pair, tmp_path):
    tables = []
    for name, one in zip(("plain", "placed"), pair, strict=True):
        capture(one, TEXTS, out=tmp_path / name, heads=[Head(0, 0), Head(2, 1)])
        table = pq.read_table(tmp_path / name / "l02h01q" / "data.parquet")
        tables.append(np.stack(table["vector"].to_numpy(zero_copy_only=False)))
    assert close(tables[1], tables[0])
    prompts, few = [Prompt("The lake"), Prompt("def")], Sampling(new_tokens=4)
    plain, placed = (complete_prompts(one, prompts, few) for one in pair)
    assert placed == plain


@pytest.mark.parametrize(("mode", "checkpointed"), [("surgery", True), ("gradient-only", False)])
def test_a_repair_of_offloaded_layers_gives_the_plain_patch(pair, tmp_path, mode, checkpointed):
    plan = make_plan(diagnose(pair[0], TEXTS, bos=False), heads="L0H1,L1-2H0-1")
    recipe = TINY_RECIPE.with_changes(steps=2, checkpoint_layers=checkpointed, lr=1e-3)
    before = weight_fingerprint(pair[1].model)
    patches = []
    for name, one in zip(("plain", "placed"), pair, strict=True):
        run = repair(one, plan, small_texts(), recipe, out=tmp_path / name, mode=mode)
        patches.append(run.patch)
    assert patches[0].slices
    for name, part in patches[0].slices.items():
        assert close(patches[1].slices[name].after, part.after), name
    assert weight_fingerprint(pair[1].model) == before
    patched = [
        evaluate(one, [TEXTS], patches=[patch], heads="none", bos=False)
        for one, patch in zip(pair, patches, strict=True)
    ]
    assert close(*(one.text_sets["offloaded"].loss.value for one in patched))


def test_low_rank_updates_of_offloaded_layers_are_refused(pair, tmp_path):
    plan = make_plan(diagnose(pair[0], TEXTS, bos=False), heads="L2H0")
    with pytest.raises(ModelError, match="lora cannot train offloaded weights"):
        repair(pair[1], plan, small_texts(), TINY_RECIPE, out=tmp_path, mode="lora")


def test_what_is_written_to_an_offloaded_weight_is_there_when_it_runs(pair):
    placed: LoadedModel = pair[1]
    assert check(placed.model).passed  # noise in, noise out again
    span = next(iter(spans_of(placed.model, [Head(2, 0)]).values()))
    before = span.of(placed.model).clone()
    write_slices(placed.model, {span: before + 1})
    assert torch.equal(span.of(placed.model), before + 1)
    write_slices(placed.model, {span: before})
    assert torch.equal(span.of(placed.model), before)
