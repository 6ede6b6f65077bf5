"""The watch: a film of every head while a model trains, and training as if nobody looked."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headwise
from collapsing import LENGTH, PROBE, arguments, blooming, rows, watched_run
from conftest import tiny_language_model, tiny_tokenizer
from filmed import film_in
from headwise.cli import app
from headwise.errors import ArtefactError, HeadwiseError
from headwise.models.description import weight_fingerprint
from headwise.watch.checkpoints import watch_checkpoints
from headwise.watch.film import FILM, Film, film_settings, resumed_film
from headwise.watch.head_watch import HeadWatch
from headwise.watch.overhead import Overhead
from headwise.watch.probe import undisturbed
from headwise.watch.trend import TrendRule, drift_of, rule_alarms, scaled

pytestmark = pytest.mark.filterwarnings("ignore")  # of the Trainer's own


def watch_of(out, **options):
    return HeadWatch(
        out, tokenizer=tiny_tokenizer(), texts=PROBE, max_length=LENGTH, bos=True, **options
    )


def trained(tmp_path, *callbacks, model=None, seed=3, steps=4, **extra):
    """A Trainer run with dropout, so that every random number counts."""
    from transformers import Trainer

    model = model or blooming(seed, hidden_dropout=0.1, attention_dropout=0.1)
    args = arguments(tmp_path / "run", steps, 1e-3, seed, **extra)
    trainer = Trainer(model, args, train_dataset=rows(seed, 60), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=extra.get("resume_from_checkpoint"))
    return model, trainer


def test_a_watched_model_trains_to_the_same_bits(tmp_path):
    watch = watch_of(tmp_path / "watch", every=1)
    watched, _ = trained(tmp_path, watch)
    state = torch.get_rng_state()
    alone, _ = trained(tmp_path)
    assert watch.film.steps == tuple(range(5))
    assert weight_fingerprint(watched) == weight_fingerprint(alone)
    assert torch.equal(state, torch.get_rng_state())
    assert watched.training


def test_nothing_that_steers_training_is_left_changed():
    model = blooming(0).train()
    model.transformer.h[1].eval()  # a frozen part of a model that trains
    model.register_buffer("counter", torch.zeros(2))
    kept, modes = model.counter, [module.training for module in model.modules()]

    def drawn():
        return torch.rand(3).tolist(), np.random.rand(), random.random()  # noqa: NPY002

    def seeded():
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)

    seeded()
    expected = drawn()
    seeded()
    with undisturbed(model):
        drawn()
        assert not model.training
        assert not torch.is_grad_enabled()
        model.counter = torch.ones(2)
        kept.add_(1)
    assert drawn() == expected
    assert [module.training for module in model.modules()] == modes
    assert model.counter is kept
    assert kept.tolist() == [0, 0]


def test_the_film_says_what_a_diagnosis_says(tmp_path):
    watch = watch_of(tmp_path / "watch", every=2)
    model, _ = trained(tmp_path, watch)
    film = Film.load(tmp_path / "watch")
    assert film.steps == (0, 2, 4)
    told = headwise.diagnose(model.eval(), tiny_tokenizer(), PROBE, max_length=LENGTH, bos=True)
    for name in ("first_token_mass", "entropy", "output_norm", "max_logit"):
        np.testing.assert_allclose(film.readings[-1].maps[name], told.maps[name], rtol=1e-6)
    assert film.readings[-1].scalars["sink_rate"] == pytest.approx(told.sink_rate.value)
    line = json.loads((tmp_path / "watch" / FILM).read_text().splitlines()[1])
    assert line["step"] == 2
    assert np.shape(line["maps"]["sink_rate"]) == (2, 4)
    assert {"sick_heads", "sink_rate", "median_entropy", "max_logit"} <= set(line)
    frame = film.to_frame()
    assert len(frame) == 3 * 8
    assert film.trajectory("L1H2").shape == (3,)


def test_the_same_run_gives_the_same_film(tmp_path):
    for name in ("a", "b"):
        trained(tmp_path / name, watch_of(tmp_path / name / "watch", every=2))
    films = [(tmp_path / name / "watch" / FILM).read_bytes() for name in ("a", "b")]
    assert films[0] == films[1]


def test_a_film_that_was_killed_between_a_row_and_its_count_counts_it_when_it_goes_on(tmp_path):
    film = film_in(tmp_path)
    film.save(tmp_path, 9)  # as a kill leaves it
    assert len(resumed_film(tmp_path, film, until=10**9).readings) == 10
    lines = (tmp_path / FILM).read_bytes().splitlines(True)
    (tmp_path / FILM).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ArtefactError, match="1 readings are missing"):
        Film.load(tmp_path)


def test_a_resumed_run_goes_on_with_its_film(tmp_path):
    whole = watch_of(tmp_path / "whole", every=1)
    trained(tmp_path / "one", whole, save_strategy="steps", save_steps=2)
    half = watch_of(tmp_path / "half", every=1)
    trained(tmp_path / "two", half, save_strategy="steps", save_steps=2)
    film = tmp_path / "half" / FILM
    film.write_bytes(film.read_bytes()[:-40])  # as a kill would leave it
    again = watch_of(tmp_path / "half", every=1)
    last = tmp_path / "two" / "run" / "checkpoint-2"
    trained(tmp_path / "two", again, resume_from_checkpoint=str(last))
    assert again.film.steps == tuple(range(5))
    assert film.read_bytes() == (tmp_path / "whole" / FILM).read_bytes()
    with pytest.raises(ArtefactError, match="there is a film already"):
        trained(tmp_path / "three", watch_of(tmp_path / "half", every=1))
    other = HeadWatch(tmp_path / "half", tokenizer=tiny_tokenizer(), texts=PROBE[:2], resume=True)
    with pytest.raises(ArtefactError, match="other texts or lengths"):
        trained(tmp_path / "four", other)


def plain_loop(model, watch=None, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        ids = torch.tensor([row["input_ids"] for row in rows(0, 60)[step * 4 : step * 4 + 4]])
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        if watch is not None and watch.after_step(step):
            break


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_plain_loop_is_watched_to_the_same_bits(tmp_path, family):
    options = {"num_hidden_layers": 2} | ({"resid_pdrop": 0.2} if family == "gpt2" else {})
    models = [tiny_language_model(family, **options).train() for _ in range(2)]
    torch.manual_seed(1)
    with HeadWatch(
        tmp_path, model=models[0], tokenizer=tiny_tokenizer(), texts=PROBE, every=2, bos=True
    ) as watch:
        plain_loop(models[0], watch)
    torch.manual_seed(1)
    plain_loop(models[1])
    assert watch.film.steps == (0, 2, 4)
    assert weight_fingerprint(models[0]) == weight_fingerprint(models[1])
    assert json.loads((tmp_path / "overhead.json").read_text())["readings"] == 3


def test_a_peft_model_is_watched(tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_language_model("llama"), config)
    with HeadWatch(tmp_path, model=model, tokenizer=tiny_tokenizer(), texts=PROBE, bos=True) as w:
        pass
    merged = model.merge_and_unload()
    told = headwise.diagnose(merged, tiny_tokenizer(), PROBE, max_length=128, bos=True)
    mass = w.film.readings[0].maps["first_token_mass"]
    np.testing.assert_allclose(mass, told.maps["first_token_mass"], atol=1e-5)


def test_a_watch_without_a_tokenizer_says_so(tmp_path):
    with (
        pytest.raises(HeadwiseError, match="has no tokenizer"),
        HeadWatch(tmp_path, model=blooming(0)),
    ):
        pass


# --- the budget --------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("cost", [0.05, 0.5, 3.0])
def test_the_budget_spaces_readings_out(cost):
    clock = Clock()
    budget = Overhead(None, 0.02, 2000, clock)
    taken = []
    for step in range(2001):
        clock.now += 0.1  # a step of training
        if budget.allows(step):
            with budget.spending():
                clock.now += cost
            budget.readings += 1
            taken.append(step)
    share = budget.share
    assert share <= max(0.02, 1.01 * cost / 200)  # the first reading is made whatever it costs
    assert len(taken) == min(201, max(1, int(0.02 * 200.1 / cost)))


def test_every_n_steps_means_every_n_steps():
    budget = Overhead(7, 0.02)
    assert [step for step in range(30) if budget.allows(step)] == [0, 7, 14, 21, 28]


# --- alarms ------------------------------------------------------------------------------------

RULE = TrendRule("collapse", "first_token_mass", "log-odds", limit=0.5)


def called(rule, steps, series):
    values = np.array(series)[:, None, None]
    return rule_alarms(rule, steps, values, [["L0H0"]])


def test_a_rise_is_called_with_its_slope_and_the_step_it_crosses():
    steps = list(range(0, 80, 10))
    odds = -2.5 + 0.02 * np.array(steps) + 0.003 * np.sin(np.arange(8))
    (alarm,) = called(RULE, steps, 1 / (1 + np.exp(-odds)))
    assert alarm.head == "L0H0"
    assert alarm.step == 70
    assert alarm.confidence > 0.99
    assert alarm.expected_step == pytest.approx(125, abs=8)
    assert alarm.slope == pytest.approx(100 * (alarm.value - 1 / (1 + np.exp(2.5))) / 70, rel=0.02)
    assert "over 0.5 by step" in str(alarm.alarm)


def test_one_jump_a_slow_rise_and_a_sick_head_are_not_called():
    steps = list(range(0, 80, 10))
    assert not called(RULE, steps, [0.05] * 7 + [0.45])
    assert not called(RULE, steps, np.linspace(0.05, 0.06, 8))
    assert not called(RULE, steps, np.linspace(0.8, 0.95, 8))
    assert not called(RULE, steps[:7], np.linspace(0.05, 0.45, 7))


def test_logits_that_grow_are_called_near_the_limit_only():
    rule = TrendRule("runaway-max-logit", "max_logit", "log", limit=100.0, floor=20.0)
    steps = list(range(0, 80, 10))
    growing = np.exp(0.02 * np.array(steps) + 0.002 * np.cos(np.arange(8)))
    assert not called(rule, steps, growing)
    assert called(rule, steps, 10 * growing)


def test_driftless_walks_are_rarely_called():
    """The confidence is of a drift: walks without one pass at its rate, whatever their steps."""
    rng = np.random.default_rng(0)
    steps = np.cumsum([0, *rng.integers(1, 20, 7)])
    moves = rng.normal(size=(7, 100, 200)) * np.sqrt(np.diff(steps))[:, None, None]
    walk = np.concatenate([np.zeros((1, 100, 200)), moves.cumsum(0)])
    share = (drift_of(steps.tolist(), walk)[2] < 0.01).mean()
    assert share == pytest.approx(0.01, abs=0.003)
    assert scaled(np.array(0.5), "log-odds") == 0


def test_an_alarm_can_stop_training(tmp_path):
    loose = TrendRule("collapse", "first_token_mass", "log-odds", 0.5, readings=4, confidence=0.5)
    options = {"every": 2, "stop": True, "rules": [loose]}
    watch = watched_run(tmp_path, seed=0, weight=1.0, steps=60, lr=1e-3, **options)
    assert watch.alarms
    assert watch.film.steps[-1] == watch.alarms[-1].step < 60
    again = Film.load(tmp_path / "watch")
    assert again.alarms == watch.alarms


def test_a_film_that_lost_its_end_is_told_and_one_that_goes_on_earlier_is_not(tmp_path):
    folder = tmp_path / "watch"
    film = watched_run(tmp_path, seed=0, weight=0.0, steps=6, lr=1e-3, every=2).film
    assert film_settings(folder)[1] == len(film.readings) == 4
    path = folder / "watch.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(True)[:-1]))
    with pytest.raises(ArtefactError, match="1 readings are missing"):
        Film.load(folder)
    path.write_bytes(whole)
    assert resumed_film(folder, film, until=2).steps == (0, 2)
    assert Film.load(folder).steps == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_collapse_is_called_twenty_steps_ahead_and_a_healthy_run_is_not(tmp_path, seed):
    options = {"seed": seed, "steps": 300, "lr": 2e-4, "every": 5}
    sick = watched_run(tmp_path / "sick", weight=0.02, **options).film
    healthy = watched_run(tmp_path / "healthy", weight=0.0, **options).film
    assert set(sick.first_sick) == {"L1H2", "L1H3"}
    calls = {alarm.head: alarm.step for alarm in sick.alarms if alarm.kind == "collapse"}
    assert all(calls[head] <= step - 20 for head, step in sick.first_sick.items())
    assert not healthy.alarms


# --- checkpoints -------------------------------------------------------------------------------


def test_checkpoints_are_filmed_in_order_and_only_new_ones_again(tmp_path):
    tokenizer = tiny_tokenizer()
    watch = watch_of(tmp_path / "live", every=2)
    extra = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trained(tmp_path, watch, steps=6, **extra)
    run = tmp_path / "run"
    tokenizer.save_pretrained(run)
    texts = tmp_path / "probe.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROBE))
    last = run / "checkpoint-6"
    last.rename(tmp_path / "later")
    verb = ["watch", str(run), "--texts", str(texts), "--max-length", str(LENGTH), "--bos"]
    verb += ["--out", str(tmp_path / "film"), "--no-figures"]
    done = CliRunner().invoke(app, verb)
    assert done.exit_code == 0, done.output
    (tmp_path / "later").rename(last)
    assert CliRunner().invoke(app, verb).exit_code == 1  # a film is there
    done = CliRunner().invoke(app, [*verb, "--resume"])
    assert done.exit_code == 0, done.output
    film = Film.load(tmp_path / "film")
    assert film.steps == (2, 4, 6)
    for ours, live in zip(film.readings, watch.film.readings[1:], strict=True):
        np.testing.assert_allclose(ours.maps["entropy"], live.maps["entropy"], atol=1e-6)


def test_a_folder_without_checkpoints_is_told(tmp_path):
    with pytest.raises(ArtefactError, match="no checkpoints here"):
        headwise.watch_checkpoints(tmp_path, out=tmp_path / "film")


# --- trackers ----------------------------------------------------------------------------------


def test_the_trainers_tensorboard_gets_scalars_a_picture_and_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch = watch_of(tmp_path / "watch", every=2)
    trained(tmp_path, watch, report_to="tensorboard", logging_strategy="steps", logging_steps=2)
    folders = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    assert len(folders) == 1  # one run for TensorBoard
    found = EventAccumulator(str(folders.pop()), size_guidance={"images": 0}).Reload()
    assert {"train/loss", "heads/sick_heads", "heads/median_entropy"} <= set(
        found.Tags()["scalars"]
    )
    assert [event.step for event in found.Scalars("heads/sink_rate")] == [0, 2, 4]
    assert [event.step for event in found.Images("heads/grid")] == [0, 2, 4]
    assert "heads/first_token_mass" in found.Tags()["histograms"]


def test_a_folder_of_two_models_checkpoints_is_refused(tmp_path):
    for step, family in enumerate(("llama", "bloom"), start=1):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        tiny_language_model(family).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(ArtefactError, match=r"different models: llama of .* and bloom of"):
        watch_checkpoints(tmp_path / "run", ["A lighthouse."], out=tmp_path / "film", bos=False)
