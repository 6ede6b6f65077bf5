"""Slice training against the naive way, bits outside the patch, runs that cannot be lost."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import signal
from dataclasses import replace

import pytest
import torch

from conftest import SENTENCES, tiny_model
from headwise.errors import SettingsError, TextError, TrainingError
from headwise.forward import losses as losses_module
from headwise.forward.losses import shifted_targets, summed_loss, token_losses
from headwise.forward.tap import tapped
from headwise.models.architectures import layers_of
from headwise.models.loaded_model import LoadedModel
from headwise.surgery import checkpoints, training
from headwise.surgery.checkpoints import load_best, save_checkpoint
from headwise.surgery.probes import mean_loss
from headwise.surgery.recipe import RECIPES, Recipe, learning_rate, recipe_named
from headwise.surgery.run_state import RunState, read_trace
from headwise.surgery.slice_training import master_slices
from headwise.surgery.training import step_blocks, train
from headwise.texts.batches import batches
from headwise.texts.corpus import block_at, block_order, build_corpus, in_validation
from headwise.texts.text_sets import TextSet
from planned import (
    TINY_RECIPE,
    opened,
    plan_for,
    random_batch,
    random_corpus,
    small_texts,
    weight_bits,
)

ONE_STEP = TINY_RECIPE.model_copy(update={"batch_size": 2, "accumulation": 2})


def rows(batch):
    """The texts of a batch, alone and unpadded."""
    return [batch.ids[i : i + 1, :n] for i, n in enumerate(batch.lengths.tolist())]


def hf_loss_sum(model, batch):
    """Sum of transformers' own loss over texts, each run alone."""
    total = 0
    for ids in rows(batch):
        total = total + model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1)
    return total


def tokens_of(blocks):
    return sum(int((block.lengths - 1).sum()) for _, block in blocks)


def our_gradients(job):
    blocks = step_blocks(job.corpus, job.run.recipe, job.run.seed, 0)
    loss = training.backward_step(job, blocks, tokens_of(blocks))
    found = {}
    for master in job.masters:
        sizes = [span.stop - span.start for span in master.spans]
        parts = master.value.grad.split(sizes, master.axis)
        found |= dict(zip(master.names, parts, strict=True))
        master.value.grad = None
    return loss, found


def naive_gradients(job):
    """Gradients of whole parameters with transformers' own attention and loss, then cut."""
    blocks = step_blocks(job.corpus, job.run.recipe, job.run.seed, 0)
    loss = sum(hf_loss_sum(job.model, block) for _, block in blocks) / tokens_of(blocks)
    loss.backward()
    found = {}
    for name, (span, _) in master_slices(list(job.masters)).items():
        found[name] = span.within(job.model.get_parameter(span.parameter).grad).clone()
    job.model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def largest_error(left, right):
    """Relative to the largest gradient of the run: OPT's key biases have none to speak of."""
    scale = max(float(value.abs().max()) for value in right.values())
    assert set(left) == set(right)
    return max(float((left[name] - right[name]).abs().max()) for name in right) / scale


def test_the_loss_is_transformers_own(model):
    batch = random_batch()
    targets = shifted_targets(batch.ids, batch.lengths)
    with torch.inference_mode():
        expected = [
            float(hf_loss_sum(model, next(batches([r[0].tolist()], 1)))) for r in rows(batch)
        ]
        with tapped(model):
            hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
        losses = token_losses(model, hidden, targets)
        total = summed_loss(model, hidden, targets)
    assert losses.sum(1).tolist() == pytest.approx(expected, rel=1e-5)
    assert float(total) == pytest.approx(sum(expected), rel=1e-5)


def test_the_chunks_of_a_loss_do_not_change_it(monkeypatch):
    model = tiny_model("gemma2")
    batch = random_batch()
    targets = shifted_targets(batch.ids, batch.lengths)
    found = []
    for numbers in (2**23, 7 * 97):
        monkeypatch.setattr("headwise.forward.losses._CHUNK_LOGITS", numbers)
        hidden = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(0))
        hidden.requires_grad_(True)
        loss = summed_loss(model, hidden, targets)
        (loss * 3).backward()
        found.append((float(loss.detach()), hidden.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["bloom", "gptj", "gemma2"])  # plain, with a bias, with a cap
def test_the_tiles_of_an_output_head_do_not_change_the_losses(family, monkeypatch):
    model = tiny_model(family)
    batch = random_batch()
    targets = shifted_targets(batch.ids, batch.lengths)
    hidden = 3 * torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
        logits = losses_module.logits_of(model, hidden).double().transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    for rows, tokens, cached in ((1024, 4096, 2**16), (7, 4096, 300), (7, 40, 90), (50, 97, 1)):
        monkeypatch.setattr(losses_module, "_TILE_ROWS", rows)
        monkeypatch.setattr(losses_module, "_TILE_TOKENS", tokens)
        monkeypatch.setattr(losses_module, "_CACHED_LOGITS", cached)
        found = token_losses(model, hidden, targets)
        assert torch.allclose(found.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("reinit", [True, False], ids=["reinitialised", "as-is"])
def test_slice_gradients_equal_the_naive_ones(model, tmp_path, reinit):
    with opened(model, plan_for(model), tmp_path, recipe=ONE_STEP, reinit=reinit) as job:
        loss, found = our_gradients(job)
        naive_loss, expected = naive_gradients(job)
    assert loss == pytest.approx(naive_loss, rel=1e-5)
    assert largest_error(found, expected) < 1e-5


def test_nothing_but_the_masters_gets_a_gradient(model, tmp_path):
    with opened(model, plan_for(model), tmp_path) as job:
        blocks = step_blocks(job.corpus, job.run.recipe, job.run.seed, 0)
        training.backward_step(job, blocks, tokens_of(blocks))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())  # given back
        for master in job.masters:
            assert master.value.grad.shape == master.value.shape
            width = sum(span.stop - span.start for span in master.spans)
            assert master.value.shape[master.axis] == width
            master.value.grad = None


def test_layers_below_the_lowest_operated_one_have_no_graph(model, tmp_path):
    seen = {}

    def watch(name):
        def hook(_, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[name] = hidden.requires_grad

        return hook

    layers = layers_of(model)
    handles = [
        b.register_forward_pre_hook(watch(i), with_kwargs=True) for i, b in enumerate(layers)
    ]
    try:
        with opened(model, plan_for(model, "L1H0-1"), tmp_path, recipe=ONE_STEP) as job:
            batch = job.corpus.train[0]
            with job.forward():
                hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    assert seen == {0: False, 1: False}
    assert hidden.requires_grad


@pytest.mark.parametrize("option", ["checkpoint_layers", "cache_prefix"])
def test_options_that_save_memory_or_time_do_not_change_the_gradients(model, tmp_path, option):
    plan = plan_for(model, "L1H0-1")
    with opened(model, plan, tmp_path, recipe=ONE_STEP) as job:
        loss, expected = our_gradients(job)
        run = replace(job.run, recipe=ONE_STEP.model_copy(update={option: True}))
        job = replace(job, run=run)
        for _ in range(2):  # the second time from the cache
            again, found = our_gradients(job)
            assert again == pytest.approx(loss, rel=1e-6)
            assert largest_error(found, expected) < 1e-6
    assert (tmp_path / ".headwise-prefix").exists() == (option == "cache_prefix")


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_runs_with_and_without_the_prefix_cache_agree(tmp_path, name):
    model = tiny_model(name)
    plan = plan_for(model, "L1H0-1")
    found = []
    for cached in (False, True):
        recipe = TINY_RECIPE.model_copy(update={"cache_prefix": cached})
        with opened(model, plan, tmp_path / str(cached), recipe=recipe) as job:
            state = train(job)
            found.append((state, [m.value.detach().clone() for m in job.masters]))
    (plain, left), (cached, right) = found
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(left, right, strict=True))
    assert list(plain.maps) == list(cached.maps)
    for step, mass in plain.maps.items():
        assert torch.allclose(torch.tensor(mass), torch.tensor(cached.maps[step]), atol=1e-4)


def test_maps_are_first_token_masses_of_the_probe_and_heads_below_never_move(tmp_path):
    model = tiny_model("llama")
    with opened(model, plan_for(model, "L1H0"), tmp_path, recipe=ONE_STEP) as job:
        blocks = job.corpus.validation[:4]
        with torch.inference_mode():
            attention = [
                torch.stack(model(ids, output_attentions=True).attentions)[:, 0, :, :, 0].mean(-1)
                for block in blocks
                for ids in rows(block)
            ]
        state = train(job)
    expected = torch.stack(attention).mean(0)
    maps = state.maps
    assert torch.allclose(torch.tensor(maps[0]), expected, atol=1e-5)
    assert list(maps) == [0, 2, 4, 6]
    assert all(found[0] == maps[0][0] for found in maps.values())
    assert maps[6][1] != maps[0][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_run_every_weight_outside_the_patch_has_its_bits(tmp_path, model, dtype):
    model = copy.deepcopy(model).to(dtype)
    before = weight_bits(model)
    recipe = TINY_RECIPE.model_copy(
        update={"steps": 1, "weight_decay": 0.5, "validation_blocks": 0}
    )
    with opened(model, plan_for(model), tmp_path, recipe=recipe) as job:
        starts = {n: v.clone() for n, (_, v) in master_slices(list(job.masters)).items()}
        train(job)
        trained = master_slices(list(job.masters))
        for name, (span, value) in trained.items():
            assert torch.equal(span.of(model), value.to(dtype)), name
            if name.rsplit(".", 1)[1] in "qvo":  # OPT's keys may stand still
                assert not torch.equal(value, starts[name]), name
        touched = {span.parameter for span, _ in trained.values()}
        during = weight_bits(model)
        assert {name for name in before if before[name] != during[name]} <= touched
    assert weight_bits(model) == before  # with the slices put back the rest must be as it was


def test_bfloat16_masters_move_where_bfloat16_weights_stand_still(tmp_path):
    """At lr 5e-5 a bfloat16 weight above 2^-6 cannot move; its float32 master does."""
    model = tiny_model("bloom").to(torch.bfloat16)
    recipe = TINY_RECIPE.model_copy(update={"steps": 8, "lr": 5e-5, "warmup": 0})
    with opened(model, plan_for(model), tmp_path, recipe=recipe, reinit=False) as job:
        starts = [master.value.detach().clone() for master in job.masters]
        train(job)
        for master, start in zip(job.masters, starts, strict=True):
            assert master.value.dtype == torch.float32
            if not master.parameter.endswith("weight"):
                continue
            moved = (master.value.detach() - start).abs()
            assert (moved > 0).float().mean() > 0.99, master.parameter
            large = start.abs() > 2**-6
            rounded = master.value.detach().to(torch.bfloat16) != start.to(torch.bfloat16)
            assert large.any()
            assert rounded[large].float().mean() < 0.5  # one bfloat16 step would show nothing


def test_the_rate_warms_up_and_falls_to_zero():
    recipe = Recipe(steps=100, lr=1.0, warmup=10)
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 1e-3
    assert learning_rate(Recipe(steps=8, lr=1.0, warmup=100), 1) == 1.0  # a quarter at most


def test_the_papers_settings_are_the_recipe():
    recipe = RECIPES["bloom-1b7-pass1"]
    assert (recipe.lr, recipe.weight_decay, recipe.clip) == (5e-5, 0.0, 1.0)
    assert (recipe.batch_size, recipe.accumulation, recipe.block) == (1, 8, 512)
    assert recipe.warmup == 100


def test_recipes_come_from_files_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: patient\nlr: 0.5\n")
    assert recipe_named(str(path)) == RECIPES["patient"].model_copy(
        update={"name": "mine", "lr": 0.5}
    )
    path.write_text("acumulation: 4\n")
    with pytest.raises(SettingsError, match="did you mean 'accumulation'"):
        recipe_named(str(path))
    with pytest.raises(SettingsError, match="no recipe is called 'none'"):
        recipe_named("none")


def scripted(monkeypatch, losses):
    values = iter(losses)
    monkeypatch.setattr(training, "mean_loss", lambda model, blocks: next(values))


def test_the_best_validated_slices_are_kept_and_named(tmp_path, monkeypatch):
    scripted(monkeypatch, [5.0, 4.0, 4.5])
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path) as job:
        middle = []

        def progress(title, done, total, note):
            middle.append([p.detach().clone() for p in job.trained])

        state = train(job, progress=progress)
        assert (state.best_loss, state.best_step) == (4.0, 3)
        assert load_best(job)
        for kept, value in zip(middle[3], job.trained, strict=True):  # told: start, 1, 2, 3 ...
            assert torch.equal(kept, value)
        assert torch.equal(job.masters[0].spans[0].of(model), _first_part(job.masters[0]))
    assert state.validations == {0: 5.0, 3: 4.0, 6: 4.5}


def _first_part(master):
    size = master.spans[0].stop - master.spans[0].start
    return master.value.detach().narrow(master.axis, 0, size)


def test_training_stops_when_validation_does_not_improve(tmp_path, monkeypatch):
    scripted(monkeypatch, [5.0, 6.0, 5.5])
    recipe = TINY_RECIPE.model_copy(update={"steps": 50, "validate_every": 2, "patience": 2})
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path, recipe=recipe) as job:
        state = train(job)
        assert state.step == 4
        assert state.stopped == "no better validation loss in 2 validations"
        assert state.best_step == 0
        again = train(job, resume=True)  # a stopped run stays stopped
    assert (again.step, again.stopped) == (4, state.stopped)


def test_without_validation_blocks_nothing_is_validated(tmp_path):
    recipe = TINY_RECIPE.model_copy(update={"validation_blocks": 0})
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path, recipe=recipe) as job:
        state = train(job)
        assert not load_best(job)
    assert state.step == 6
    assert not state.validations


def test_the_validation_loss_is_transformers_mean(tmp_path):
    model = tiny_model("gpt_neox")
    blocks = random_corpus().validation
    with torch.inference_mode():
        expected = sum(float(hf_loss_sum(model, b)) for b in blocks)
    expected /= sum(int((b.lengths - 1).sum()) for b in blocks)
    assert mean_loss(model, blocks) == pytest.approx(expected, rel=1e-5)


class Stop(Exception):
    """Stands for a kill."""


def stopping_at(step):
    def progress(title, done, total, note):
        if done == step:
            raise Stop

    return progress


def run(tmp_path, name, recipe, kills=(), monkeypatch=None):
    """Masters, rows and maps of a run that was stopped at each of `kills`, then finished."""
    model = tiny_model(name)
    corpus = random_corpus()
    for number, kill in enumerate([*kills, None]):
        torch.manual_seed(number)  # the state around a run must not matter
        with opened(model, plan_for(model), tmp_path, recipe=recipe, corpus=corpus) as job:
            if kill is None:
                state = train(job, resume=bool(kills))
                masters = [p.detach().clone() for p in job.trained]
            else:
                with pytest.raises(Stop):
                    kill(job, number > 0)
    assert read_trace(tmp_path) == (state.rows, state.validations)
    rows = [replace(row, tokens_per_second=0) for row in state.rows]
    return masters, rows, state.validations, state.maps, _checkpoint(tmp_path)


def _checkpoint(path):
    folder = path / "checkpoints"
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name == "best.safetensors"}


def same_run(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert left[1:] == right[1:]


@pytest.mark.parametrize(
    ("name", "steps"),
    [("bloom", (1,)), ("bloom", (2,)), ("bloom", (5,)), ("bloom", (1, 3, 5)), ("llama", (3,))],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, name, steps):
    kills = [
        lambda job, resume, step=step: train(job, resume=resume, progress=stopping_at(step))
        for step in steps
    ]
    recipe = TINY_RECIPE.model_copy(update={"weight_decay": 0.1})
    whole = run(tmp_path / "whole", name, recipe)
    same_run(run(tmp_path / "killed", name, recipe, kills), whole)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_kill_between_trace_and_checkpoint_changes_nothing(tmp_path, monkeypatch, call):
    """The trace is already longer than the newest checkpoint; its tail is dropped on resume."""
    write, calls = checkpoints.write_safetensors, []

    def failing(path, *rest):
        if path.name.startswith("step-"):
            calls.append(path)
            if len(calls) == call:
                raise Stop
        return write(path, *rest)

    monkeypatch.setattr(checkpoints, "write_safetensors", failing)
    whole = run_unpatched(tmp_path / "whole", write, monkeypatch)
    calls.clear()
    monkeypatch.setattr(checkpoints, "write_safetensors", failing)
    killed = run(
        tmp_path / "killed", "bloom", TINY_RECIPE, [lambda job, resume: train(job, resume=resume)]
    )
    same_run(killed, whole)


def run_unpatched(path, write, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_safetensors", write)
    return run(path, "bloom", TINY_RECIPE)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    model = tiny_model("bloom")
    recipe = TINY_RECIPE.model_copy(update={"save_every": 1, "keep": 2})
    with opened(model, plan_for(model), tmp_path, recipe=recipe) as job:
        train(job)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-0000005.safetensors", "step-0000006.safetensors"]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_at_its_step_and_keeps_the_checkpoint(
    tmp_path, monkeypatch, what
):
    backward, steps = training.backward_step, []

    def broken(job, blocks, tokens):
        loss = backward(job, blocks, tokens)
        steps.append(loss)
        if len(steps) == 6:
            if what == "loss":
                return math.nan
            job.trained[0].grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(training, "backward_step", broken)
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path) as job:
        with pytest.raises(TrainingError, match="not a number at step 5") as caught:
            train(job)
        assert all(bool(p.isfinite().all()) for p in job.trained)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert "step-0000004.safetensors" in str(caught.value)
        monkeypatch.setattr(training, "backward_step", backward)
        assert train(job, resume=True).step == 6  # the checkpoint is good
    assert "NaN" not in (tmp_path / "trace.jsonl").read_text()


def test_a_model_that_overflows_stops_at_step_0(tmp_path):
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path) as job:
        with torch.no_grad():
            model.transformer.ln_f.weight.fill_(math.inf)
        with pytest.raises(TrainingError, match="at step 0") as caught:
            train(job)
    assert "nothing was saved" in str(caught.value)


def test_the_trace_says_what_happened(tmp_path):
    tracked = []
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path) as job:
        job = replace(job, track=lambda values, step: tracked.append((step, values)))
        train(job)
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(6))
    assert all(
        {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= set(row) for row in steps
    )
    assert all(row["tokens"] == 4 * (15 + 12) for row in steps)
    assert len(tracked) == len(rows)


def test_training_lowers_the_loss(tmp_path):
    model = tiny_model("bloom", sharpen=5.0)
    corpus = random_corpus(train=2)
    recipe = TINY_RECIPE.model_copy(update={"steps": 24, "lr": 3e-2, "validation_blocks": 0})
    with opened(model, plan_for(model, "all"), tmp_path, recipe=recipe, corpus=corpus) as job:
        losses = [row.loss for row in train(job).rows]
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


def test_every_epoch_shows_every_block_once_in_another_order():
    first, second = block_order(7, 0, 0), block_order(7, 0, 1)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first != block_order(7, 1, 0)
    assert [block_at(7, 0, i) for i in range(14)] == first + second


def test_all_arms_of_a_seed_see_the_same_blocks():
    corpus = random_corpus()
    places = [[p for p, _ in step_blocks(corpus, TINY_RECIPE, 3, step)] for step in range(4)]
    assert places == [[p for p, _ in step_blocks(corpus, TINY_RECIPE, 3, s)] for s in range(4)]
    assert sorted(places[0] + places[1]) == list(range(8))  # 4 blocks a step, 8 blocks


def corpus_of(texts, tokenizer, **options):
    loaded = LoadedModel("tiny", tiny_model("llama"), tokenizer)
    return build_corpus(loaded, TextSet("made", tuple(texts)), **{"block": 24, **options})


def decoded(blocks, tokenizer):
    return {tokenizer.decode(ids[0].tolist()) for block in blocks for ids in rows(block)}


def test_documents_are_split_by_their_content(tokenizer):
    texts = small_texts(300).texts
    corpus = corpus_of(texts, tokenizer, block=400)
    train_texts, held = (decoded(b, tokenizer) for b in (corpus.train, corpus.validation))
    assert train_texts.isdisjoint(held)
    assert train_texts | held == set(texts)
    assert held == {text for text in texts if in_validation(text)}
    assert 3 <= len(held) <= 30  # 5% of 300
    other = corpus_of(texts[::-1][:150], tokenizer, block=400)
    assert decoded(other.validation, tokenizer) <= held  # whatever else is in the corpus


def test_duplicates_and_evaluation_texts_are_left_out(tokenizer):
    texts = small_texts(60).texts
    corpus = corpus_of([*texts, *texts[:5]], tokenizer, excluded=[texts[0], texts[1], "other"])
    info = corpus.info
    assert (info.documents, info.duplicates, info.excluded) == (65, 5, 2)
    assert info.train_documents + info.validation_documents == 58
    joined = " ".join(decoded(corpus.train, tokenizer) | decoded(corpus.validation, tokenizer))
    assert texts[0] not in joined
    total = sum(len(tokenizer(text)["input_ids"]) for text in texts[2:])
    assert info.train_tokens + info.validation_tokens <= total
    assert info.train_tokens == sum(int(b.lengths.sum()) for b in corpus.train)


def test_blocks_hold_whole_pieces_and_at_most_their_size(tokenizer):
    corpus = corpus_of(small_texts(50).texts, tokenizer, block=128)
    assert all(int(block.lengths.sum()) <= 128 for block in corpus.train)
    assert any(len(block.lengths) > 1 for block in corpus.train)
    assert all(int(block.lengths.min()) >= 2 for block in corpus.train)


@pytest.mark.parametrize("name", ["bloom", "gpt2", "mistral"])
def test_a_token_in_a_block_has_the_loss_it_has_alone(name):
    """No token sees or predicts across a document boundary."""
    model = tiny_model(name)
    batch = random_batch((20, 12, 5))
    with torch.inference_mode(), tapped(model):
        hidden = model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
        together = token_losses(model, hidden, shifted_targets(batch.ids, batch.lengths))
    for row, ids in enumerate(rows(batch)):
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, :-1]
        alone = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        length = ids.shape[1] - 1
        assert torch.allclose(together[row, :length], alone, rtol=1e-4, atol=1e-4)
        assert not together[row, length:].any()


@pytest.mark.parametrize("texts", [[SENTENCES[0]], ["a b"]])
def test_too_little_text_is_an_error_that_counts(tokenizer, texts):
    with pytest.raises(TextError, match=r"has \d+ training tokens, one batch needs 9000"):
        corpus_of(texts, tokenizer, batch_tokens=9000)


def test_checkpoints_of_equal_states_are_equal_files(tmp_path):
    model = tiny_model("bloom")
    with opened(model, plan_for(model), tmp_path) as job:
        optimizer = torch.optim.AdamW(job.trained)
        files = []
        for _ in range(2):
            torch.manual_seed(0)
            save_checkpoint(job, RunState(step=1), optimizer)
            files.append((tmp_path / "checkpoints" / "step-0000001.safetensors").read_bytes())
    assert files[0] == files[1]


def test_the_fast_gelu_is_blooms_gelu_forward_and_backward():
    from transformers.models.bloom.modeling_bloom import BloomGelu

    from headwise.forward.replaced_forward import fused_gelu

    model = tiny_model("bloom")
    gelus = [module for module in model.modules() if isinstance(module, BloomGelu)]
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    found = []
    for context in (contextlib.nullcontext(), fused_gelu(model)):
        leaf = x.clone().requires_grad_(True)
        with context:
            out = gelus[0](leaf)
            (slope,) = torch.autograd.grad(out.sum(), leaf)
        found.append(torch.stack([out.detach(), slope]))
    # transformers writes sqrt(2 / pi) as 0.79788456
    assert torch.allclose(*found, atol=1e-7)
    half = torch.tensor([-300.0, -70.0, 70.0, 300.0], dtype=torch.float16, requires_grad=True)
    with fused_gelu(model):
        (slope,) = torch.autograd.grad(gelus[0](half).sum(), half)
    assert slope.tolist() == [0.0, 0.0, 1.0, 1.0]  # x^3 would overflow
    assert "forward" not in vars(gelus[0])


def test_a_checkpoint_does_not_depend_on_what_ran_before(tmp_path):
    model = tiny_model("llama")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with opened(model, plan_for(model), tmp_path / str(seed), recipe=ONE_STEP) as job:
            train(job)
        assert torch.equal(torch.get_rng_state(), before)  # and leaves no trace itself
        files = sorted((tmp_path / str(seed) / "checkpoints").iterdir())
        found.append([path.read_bytes() for path in files])
    assert found[0] == found[1]


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint_to_go_on_from(tmp_path):
    recipe = TINY_RECIPE.model_copy(update={"save_every": 100})
    whole = run(tmp_path / "whole", "llama", recipe)
    before = signal.getsignal(signal.SIGINT)

    def interrupted(job, resume):
        def press(title, done, total, note):
            if note and not list((tmp_path / "cut" / "checkpoints").glob("step-*")):
                signal.raise_signal(signal.SIGINT)

        with contextlib.suppress(KeyboardInterrupt):
            train(job, resume=resume, progress=press)
        (found,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
        assert found.name == "step-0000002.safetensors"  # pressed after step 1, heard after 2
        assert signal.getsignal(signal.SIGINT) is before
        raise Stop

    left, right = run(tmp_path / "cut", "llama", recipe, [interrupted]), whole
    assert all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
    assert left[1:3] == right[1:3]


def test_a_ruinous_rate_says_what_is_kept_and_advises_what_helps(tmp_path):
    model = tiny_model("bloom")
    ruinous = TINY_RECIPE.model_copy(
        update={"lr": 1e30, "warmup": 0, "clip": 1e30, "validate_every": 1, "save_every": 100}
    )
    with (
        opened(model, plan_for(model), tmp_path, recipe=ruinous) as job,
        pytest.raises(TrainingError, match="not a number") as caught,
    ):
        train(job)
    assert (tmp_path / "checkpoints" / "best.safetensors").exists()
    assert "best.safetensors" in str(caught.value)
    assert "nothing was saved" not in str(caught.value)
    assert "float32" not in str(caught.value)
