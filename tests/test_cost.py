"""What work will cost is said before it starts, and the absurd is refused."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from conftest import tiny_language_model, tiny_tokenizer
from headwise import cost, evaluate
from headwise.cli import app
from headwise.cost import Cost, estimate_cost, require_affordable
from headwise.errors import ModelError, SettingsError
from headwise.forward import first_order
from headwise.heads import Head
from headwise.models.architectures import geometry_of
from headwise.models.loading import load_model
from headwise.plasticity.writer import vector_bytes
from headwise.progress import Work
from planned import small_texts
from reader import saved
from test_story import sick_gpt2, write_texts


def test_more_work_costs_more_and_memory_counts_what_is_kept():
    model = tiny_language_model("bloom")
    small = estimate_cost(model, Work(tokens=1e3, batch=64))
    large = estimate_cost(model, Work(tokens=1e6, batch=64, kept=10**6, trained=10**6))
    assert 0 < small.minutes < large.minutes
    assert large.gigabytes > small.gigabytes + 0.016
    cheaper = replace(small, less="--heads")
    assert str(cheaper).startswith("estimate: at most about")
    assert str(cheaper).endswith("(less: --heads)")


def test_other_work_on_the_machine_does_not_count():
    """A probe that waits: by the clock on the wall it would cost hours."""
    model = tiny_language_model("bloom")
    waiting = model.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    found = estimate_cost(model, Work(tokens=128e3, batch=64))
    waiting.remove()
    assert found.minutes < 128e3 / 128 * 0.25 / 60


def test_vectors_that_are_written_cost_time_too():
    model = tiny_language_model("llama")
    shape = geometry_of(model)
    size = vector_bytes(10**6, None, shape)
    each = shape.num_heads + shape.num_kv_heads
    assert size == 4e6 * shape.num_layers * each * shape.head_dim
    group = [Head(0, index) for index in range(shape.group)]
    assert vector_bytes(10**6, group, shape) == 4e6 * (shape.group + 1) * shape.head_dim
    found = estimate_cost(model, Work(tokens=0, batch=64, written=size))
    assert found.minutes == pytest.approx(size / 45e6 / 60)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Cost(60 * 25, 1.0, 8.0), "more than 24 hours"),
        (Cost(1.0, 9.0, 8.0), "more than the 8.0 GB"),
    ],
)
def test_an_absurd_cost_is_refused_without_yes(found, reason):
    work = Work(1.0, 1, less="--heads")
    with pytest.raises(SettingsError, match=f"{reason}[\\s\\S]*ask for less \\(--heads\\)"):
        require_affordable(found, work, yes=False)
    require_affordable(found, work, yes=True)
    require_affordable(Cost(5.0, 1.0, 8.0), work, yes=False)


@pytest.fixture
def story_of_verbs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(saved(sick_gpt2(), tmp_path / "m"))
    write_texts(tmp_path / "few.jsonl", small_texts(12).texts)
    run = CliRunner().invoke
    short = ["--texts", "few.jsonl", "--max-length", "16"]
    assert run(app, ["diagnose", model, *short, "--no-figures", "--out", "d"]).exit_code == 0
    assert run(app, ["plan", "d", "--heads", "L0H1", "--out", "plan.yaml"]).exit_code == 0
    train = ["--corpus", "few.jsonl", "--steps", "1", "--block", "16"]
    return {
        "evaluate": [model, *short, "--heads", "L0H1"],
        "triage": [model, *short, "--diagnosis", "d/diagnosis.json"],
        "capture": [model, *short, "--buckets", "uniform:4"],
        "repair": [model, "--plan", "plan.yaml", *train],
    }


def test_four_verbs_say_what_they_will_cost_and_refuse_a_day_of_work(story_of_verbs, monkeypatch):
    for verb, words in story_of_verbs.items():
        with monkeypatch.context() as patched:
            patched.setattr(cost, "seconds_per_token", lambda *_: 1e9)
            done = CliRunner().invoke(app, [verb, *words, "--out", verb])
        assert done.exit_code == 1, f"{verb}: {done.output}"
        assert "estimate: at most about" in done.output
        assert "more than 24 hours" in str(done.exception)
    done = CliRunner().invoke(app, ["evaluate", *story_of_verbs["evaluate"], "--out", "e"])
    assert done.exit_code == 0, done.output
    assert done.output.index("estimate: at most about") < done.output.index("wrote evaluation.json")


def test_the_probe_leaves_an_evaluation_as_it_is():
    model, tokenizer = tiny_language_model("bloom"), tiny_tokenizer()
    plain = evaluate(model, tokenizer, [small_texts(3)], heads="L0H0", max_length=16)
    minded = evaluate(
        model,
        tokenizer,
        [small_texts(3)],
        heads="L0H0",
        max_length=16,
        budget=lambda model, work: str(estimate_cost(model, work)),
    )
    assert plain.to_json() == minded.to_json()


def test_recomputed_activations_give_the_same_first_order_estimate(monkeypatch):
    model = tiny_language_model("llama")
    encoded = [[3, 5, 8, 13, 21, 34], [4, 9, 16, 25]]
    recomputed = first_order.first_order_importance(model, encoded)
    monkeypatch.setattr(first_order, "checkpointed", lambda model, first: nullcontext())
    np.testing.assert_allclose(
        recomputed, first_order.first_order_importance(model, encoded), atol=1e-9
    )
    assert np.abs(recomputed).max() > 0


def test_ctrl_c_says_what_was_written(story_of_verbs, monkeypatch):
    def interrupted(model, work):
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.cost.estimate_cost", interrupted)
    for verb, told in (("evaluate", "nothing was written"), ("repair", "add --resume to go on")):
        done = CliRunner().invoke(app, [verb, *story_of_verbs[verb], "--out", verb])
        assert done.exit_code == 130
        assert f"headwise: stopped; {told}" in done.output


def test_a_hub_id_without_a_network_is_refused_at_once_as_offline(monkeypatch):
    monkeypatch.setattr("headwise.models.loading._answers", lambda endpoint: False)
    with pytest.raises(ModelError, match=r"offline: .* not in the cache"):
        load_model("nobody/no-such-model")
    with pytest.raises(ModelError, match="nor a hub id"):
        load_model("no such model!")
