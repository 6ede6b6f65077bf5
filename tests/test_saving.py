"""How a run saves memory and time: chosen from what is there, kept for the run, no bit changed."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import tiny_language_model, tiny_model
from headwise.errors import ArtefactError
from headwise.models.architectures import layers_of
from headwise.models.loaded_model import LoadedModel
from headwise.surgery import job as jobs
from headwise.surgery.job import PREFIX, _bytes_a_token, choose_saving
from headwise.surgery.recipe import Saving
from headwise.surgery.training import train
from headwise.surgery.values import RunSettings, is_finished
from headwise.texts.batches import join_batches
from headwise.therapy.repair import repair
from planned import TINY_RECIPE, opened, plan_for, random_corpus

ALONE = TINY_RECIPE.with_changes(batch_size=1, accumulation=4)  # one block a pass
WAYS = [Saving(1), Saving(2), Saving(0, cached=True), Saving(1, cached=True)]


@pytest.mark.parametrize("name", ["bloom", "llama", "gpt2"])
def test_no_way_of_saving_changes_a_bit_of_what_is_trained(tmp_path, name):
    model = tiny_model(name)
    plan = plan_for(model, "L1H0-1")
    found = []
    for number, saving in enumerate([Saving(), *WAYS]):
        with opened(model, plan, tmp_path / str(number), recipe=ALONE) as job:
            train(replace(job, run=replace(job.run, saving=saving)))
            found.append([master.value.detach().clone() for master in job.masters])
        assert (tmp_path / str(number) / PREFIX).exists() == saving.cached
    plain, *others = found
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def choice(model, tmp_path, lowest=1, **changes):
    recipe = ALONE.with_changes(steps=60, **changes)
    return choose_saving(model, recipe, random_corpus(), lowest, tmp_path / "not-yet-there")


def test_what_is_chosen_follows_from_memory_disk_and_epochs(tmp_path, monkeypatch):
    model = tiny_model("llama")
    above = len(layers_of(model)) - 1
    easy, reason = choice(model, tmp_path)
    assert easy == Saving(0, cached=True)
    assert f"0 of {above} trained layers are run twice" in reason
    assert "the 1 below are kept on disk" in reason
    assert not choice(model, tmp_path, lowest=0)[0].cached
    assert not choice(model, tmp_path, batch_size=2)[0].cached
    monkeypatch.setattr(jobs, "free_memory", lambda: 1000)
    assert choice(model, tmp_path)[0].recomputed == above
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    full, reason = choice(model, tmp_path)
    assert not full.cached
    assert "too many for the disk" in reason


def test_a_block_that_is_seen_once_is_not_kept(tmp_path):
    recipe = ALONE.with_changes(steps=1, accumulation=2)
    saving, reason = choose_saving(tiny_model("llama"), recipe, random_corpus(), 1, tmp_path)
    assert not saving.cached
    assert "seen 1.0 times" in reason


def test_no_more_layers_are_run_twice_than_the_room_asks_for(tmp_path, monkeypatch):
    model = tiny_model("bloom")
    above = len(layers_of(model))
    layer, entering = _bytes_a_token(model, random_corpus(), 0)
    room = ALONE.block * ((above - 1) * layer + entering)
    for have, expected in ((room * 1.01, 1), (room * 0.99, 2)):
        monkeypatch.setattr(jobs, "free_memory", lambda have=have: int(2 * have))
        assert choice(model, tmp_path, lowest=0)[0].recomputed == expected


@pytest.mark.parametrize("name", ["bloom", "llama", "gpt2"])
def test_the_short_pass_counts_what_training_keeps(tmp_path, name):
    model = tiny_model(name)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with opened(model, plan_for(model, "L1H0-1"), tmp_path, recipe=ALONE) as job:
        guess, _ = _bytes_a_token(model, job.corpus, 1)
        batch = join_batches(list(job.corpus.train[:1]))
        counted = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with job.forward(), counted:
            last = jobs.last_hidden(job, batch, [(0, job.corpus.train[0])])
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(size for place, size in kept.items() if place not in own)
    assert last.requires_grad
    found = total / batch.ids.numel() / (len(layers_of(model)) - 1)
    assert guess == pytest.approx(found, rel=0.35)


@pytest.fixture
def patient(tokenizer):
    return LoadedModel("tiny", tiny_language_model("llama"), tokenizer)


def run(patient, out, recipe=ALONE, **options):
    told = []
    plan = plan_for(patient.model, "L1H0-1")
    options = {"progress": lambda *said: told.append(said[0]), **options}
    repair(patient, plan, random_corpus(), recipe, out=out, **options)
    return [line for line in told if line.startswith("saving:")]


def test_a_resumed_run_keeps_the_choice_of_its_start(patient, tmp_path, monkeypatch):
    def stop(title, done, total, note):
        if done == 4:
            raise KeyboardInterrupt

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert len(run(patient, whole)) == 1
    with pytest.raises(KeyboardInterrupt):
        run(patient, cut, progress=stop)
    before = json.loads((cut / "run.json").read_text())["saving"]
    assert before == {"recomputed": 0, "cached": True}
    monkeypatch.setattr(jobs, "free_memory", lambda: 1000)
    assert run(patient, cut, resume=True) == []
    assert (cut / "run.json").read_bytes() == (whole / "run.json").read_bytes()
    names = ("patch.safetensors", "maps.jsonl")
    assert all((cut / n).read_bytes() == (whole / n).read_bytes() for n in names)


def test_what_the_recipe_says_wins(patient, tmp_path):
    recipe = ALONE.with_changes(checkpoint_layers=True, cache_prefix=False)
    (line,) = run(patient, tmp_path, recipe)
    assert line.count("as the recipe says") == 2
    above = len(layers_of(patient.model)) - 1
    assert RunSettings.load(tmp_path).saving == Saving(above, cached=False)


def test_a_run_from_before_there_was_a_choice_can_go_on(patient, tmp_path):
    run(patient, tmp_path)
    new = RunSettings.load(tmp_path)
    old = new.recipe.with_changes(checkpoint_layers=False, cache_prefix=False)
    former = replace(new, recipe=old, saving=None)
    assert former.identity == new.identity
    former.save(tmp_path)
    assert is_finished(new, tmp_path, resume=True)
    other = replace(new, recipe=new.recipe.with_changes(checkpoint_layers=True))
    with pytest.raises(ArtefactError, match="recipe differs"):
        is_finished(other, tmp_path, resume=True)
