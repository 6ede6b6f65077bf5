"""Prune: joint costs against brute force, the promise of the largest set, and its patch."""

from __future__ import annotations

import json
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headwise
from conftest import tiny_language_model, tiny_tokenizer
from headwise.cli import app
from headwise.errors import ArtefactError, HeadwiseError, SelectionError, SettingsError, TextError
from headwise.forward.mean_outputs import measure_means
from headwise.heads import Head
from headwise.intervals import FEWEST
from headwise.models.loaded_model import LoadedModel
from headwise.models.patch import Patch
from headwise.pruning import search as searching
from headwise.pruning.prune import prune
from headwise.pruning.search import (
    LEAST,
    MEASURED,
    NestedSearch,
    candidates,
    deal_documents,
    sizes_up_to,
)
from headwise.pruning.settings import PruneSettings, SearchSettings
from headwise.pruning.stream import stream
from headwise.pruning.values import OURS, RANDOM, NestedSets
from headwise.texts.batches import batches
from headwise.texts.text_sets import TextSet
from planned import small_texts
from test_triage import document_losses, output_of

TEXTS = small_texts(44)


def loaded_tiny(family="llama", bos=False, **extra):
    model = LoadedModel("tiny", tiny_language_model(family, **extra), tiny_tokenizer())
    return model.reading(bos)


def asked(max_loss=0.3, replacement="mean", **options):
    even = options.pop("even", False)
    search = SearchSettings(max_loss=max_loss, max_texts=24, curve=1, **options)
    return PruneSettings(search, replacement=replacement, even=even, max_length=32)


def mean_change(model, encoded, heads, means):
    """Loss per token without heads, by hooks on the output projections of a plain forward pass."""
    base = document_losses(model, encoded)
    with ExitStack() as stack:
        for head in heads:
            given = 0.0 if means is None else means[head.layer, head.index]
            stack.enter_context(
                output_of(model, head, lambda out, given=given: torch.zeros_like(out) + given)
            )
        changed = document_losses(model, encoded)
    return (changed - base).sum() / sum(len(ids) - 1 for ids in encoded)


@pytest.mark.parametrize(
    ("family", "replacement", "bos"),
    [("llama", "zero", False), ("llama-mha-bias", "mean", False), ("gpt2", "mean", False)],
)
def test_the_costs_of_nested_sets_are_those_of_brute_force(family, replacement, bos, tmp_path):
    loaded = loaded_tiny(family, bos)
    how = asked(replacement=replacement)
    found = prune(loaded, TEXTS, out=tmp_path, settings=how)
    documents = deal_documents(loaded, TEXTS, None, how.search, length=32)
    means = None
    if replacement == "mean":
        means = measure_means(loaded.model, batches(documents.encoded["choosing"], 4))
    order = [Head.parse(name) for name in found.order]
    assert len(order) >= 3
    compared = 0
    for count, costs in found.costs[OURS].items():
        for part, cost in costs.items():
            exact = mean_change(loaded.model, documents.encoded[part], order[:count], means)
            assert abs(cost.value - exact) < 1e-5
            compared += 1
    assert compared >= 8
    assert all(set(costs) == {"held_out", "other"} for costs in found.costs[RANDOM].values())


@pytest.mark.parametrize("replacement", ["mean", "zero"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_patch_takes_out_what_was_measured(family, replacement, tmp_path):
    loaded = loaded_tiny(family, bos=True)
    how = asked(max_loss=1.0, replacement=replacement)
    found = prune(loaded, TEXTS, out=tmp_path, settings=how)
    assert found.heads
    assert NestedSets.load(tmp_path / "prune.json") == found
    patch = Patch.load(tmp_path / "patch.safetensors")
    documents = deal_documents(loaded, TEXTS, None, how.search, length=32)
    encoded = documents.encoded["held_out"]
    base = document_losses(loaded.model, encoded)
    with patch.applied(loaded.model):
        changed = document_losses(loaded.model, encoded)
    change = (changed - base).sum() / sum(len(ids) - 1 for ids in encoded)
    assert abs(change - found.cost(found.chosen, "held_out").value) < 1e-3
    assert abs(change) > 1e-4


def test_no_document_is_used_twice():
    how = SearchSettings(max_texts=44)
    twice = TextSet("twice", (*TEXTS.texts, *TEXTS.texts[:5], TEXTS.texts[7] + " "))
    also = TextSet(
        "also", (TEXTS.texts[0], "A text of another kind, about nothing else at all. " * 3)
    )
    dealt = deal_documents(loaded_tiny(), twice, also, how, length=32)
    every = [text for one in dealt.texts.values() for text in one.texts]
    assert len(every) == len({" ".join(text.split()) for text in every}) == 45
    assert len(dealt.texts["other"].texts) == 1
    assert min(len(dealt.texts[part].texts) for part in ("validation", "held_out")) >= FEWEST


ANY = LoadedModel("any", tiny_language_model("llama"), tiny_tokenizer())  # is not run


class DrawnCosts(searching.JointCosts):
    """Costs of sets whose truth is known: a document's change is the set's mean plus noise."""

    def __init__(self, seed, each, counts=(30, 80, 8)):
        parts = ("choosing", "validation", "held_out")
        self.draw, self.each = np.random.default_rng(seed), each
        encoded = {part: [[0] * 101] * count for part, count in zip(parts, counts, strict=True)}
        texts = {
            part: TextSet(part, ("x",) * count) for part, count in zip(parts, counts, strict=True)
        }
        super().__init__(ANY, texts, encoded)

    def true_cost(self, heads):
        return sum(self.each[head.index] for head in heads)

    def deltas(self, part, sets, title, most=None):
        count = len(self.encoded[part][:most])
        means = [100 * self.true_cost([head for unit in one for head in unit]) for one in sets]
        noise = self.draw.gamma(1.0, 2.0, (len(sets), count)) - 2.0  # skewed, as losses are
        return np.array(means)[:, None] + noise


def test_the_chosen_set_costs_more_than_the_limit_at_most_as_often_as_promised():
    """The largest of many tested sets: a fixed sequence needs no correction."""
    names = [str(Head(0, i)) for i in range(24)]
    units = {name: (Head.parse(name),) for name in names}
    wrong, sizes = 0, []
    for seed in range(150):
        each = np.random.default_rng([seed, 1]).uniform(-0.0005, 0.003, 24)
        costs = DrawnCosts(seed, each)
        search = NestedSearch(costs, units, SearchSettings(max_loss=0.01, width=2), "head", 24)
        search.measure_singles(names)
        search.grow()
        chosen = search.validate()
        sizes.append(chosen)
        truth = costs.true_cost([Head.parse(name) for name in search.order[:chosen]])
        wrong += truth > 0.01
    assert np.mean(sizes) > 3
    assert wrong / 150 <= 0.05


def test_the_first_set_that_fails_ends_the_test():
    costs = DrawnCosts(0, np.array([0.0, 1.0, -1.0, 0.0]))
    units = {str(Head(0, i)): (Head(0, i),) for i in range(4)}
    search = NestedSearch(costs, units, SearchSettings(max_loss=0.1), "head", 4)
    search.order = ["L0H0", "L0H1", "L0H2", "L0H3"]
    assert search.validate() == 1


def test_greedy_choice_by_joint_loss_beats_the_order_of_single_costs():
    """Two heads that do the same: each alone costs nothing, both together cost a lot."""

    class Twins(DrawnCosts):
        def true_cost(self, heads):
            indices = {head.index for head in heads}
            return 0.001 * len(indices) + (0.5 if {0, 1} <= indices else 0.0)

    units = {str(Head(0, i)): (Head(0, i),) for i in range(8)}
    orders = {}
    for width in (1, 4):
        how = SearchSettings(max_loss=0.05, width=width)
        search = NestedSearch(Twins(0, None), units, how, "head", 8)
        search.singles = {
            n: searching.Interval(0.001 + 1e-6 * i, 0, 1) for i, n in enumerate(units)
        }
        search.grow()
        orders[width] = search.order
    assert orders[1][:2] == ["L0H0", "L0H1"]
    assert not {"L0H0", "L0H1"} <= set(orders[4][:6])


def test_sizes_grow_and_end_at_the_last():
    assert sizes_up_to(0) == []
    assert sizes_up_to(20) == list(range(1, 21))
    assert sizes_up_to(300)[-1] == 300
    assert len(sizes_up_to(300)) < 70


def test_candidates_are_the_smallest_changes_and_a_quarter_of_the_gains():
    names = list("abcdefgh")
    estimates = np.array([5, -9, 0.1, 0.2, -0.3, 4, 3, 2.0])
    assert candidates(names, estimates, 8) == names
    assert candidates(names, estimates, 4) == ["b", "c", "d", "e"]


def test_an_interrupted_search_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    loaded, how = loaded_tiny(), asked()
    prune(loaded, TEXTS, out=tmp_path / "whole", settings=how)
    measured, calls = searching.variant_losses, []

    def stop_after_some(*args, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return measured(*args, **options)

    monkeypatch.setattr(searching, "variant_losses", stop_after_some)
    with pytest.raises(KeyboardInterrupt):
        prune(loaded, TEXTS, out=tmp_path / "cut", settings=how)
    assert (tmp_path / "cut" / MEASURED).exists()
    prune(loaded, TEXTS, out=tmp_path / "cut", settings=how, resume=True)
    for name in ("prune.json", "patch.safetensors", MEASURED):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    before = len(calls)
    prune(loaded, TEXTS, out=tmp_path / "cut", settings=how, resume=True)
    assert len(calls) == before  # nothing is measured twice
    with pytest.raises(ArtefactError, match="another model, text or setting"):
        prune(loaded, TEXTS, out=tmp_path / "cut", settings=asked(replacement="zero"), resume=True)


def test_even_sets_take_as_many_heads_from_every_group(tmp_path):
    found = prune(loaded_tiny(), TEXTS, out=tmp_path, settings=asked(max_loss=5.0, even=True))
    heads = [Head.parse(name) for name in found.heads]
    groups = [(head.layer, head.index // 2) for head in heads]
    assert sorted(groups) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.unit == "row"


def test_an_answer_for_what_cannot_be_asked(tmp_path):
    one = loaded_tiny(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    with pytest.raises(SelectionError, match="the model has 1 head"):
        prune(one, TEXTS, out=tmp_path)
    with pytest.raises(SelectionError, match="the model has 1 group"):
        stream(one, TEXTS, out=tmp_path)
    with pytest.raises(SettingsError, match=r"at most -0\.01 nats"):
        asked(max_loss=-0.01)
    with pytest.raises(TextError, match="too few documents: 12 of 16 tokens or more"):
        prune(loaded_tiny(), out=tmp_path)
    with pytest.raises(TextError, match=f"1 of 16 tokens or more, {LEAST} are"):
        prune(loaded_tiny(), TEXTS.texts[:1], out=tmp_path)
    for words in (["--max-loss", "nan"], ["--max-texts", "0"], ["--most", "0"]):
        done = CliRunner().invoke(app, ["prune", "patient", *words])
        assert done.exit_code in (1, 2)
        assert isinstance(done.exception, (SystemExit, HeadwiseError))


def test_the_least_number_of_documents_is_enough_and_one_less_is_not():
    how, texts = SearchSettings(), TextSet("some", TEXTS.texts[:LEAST])
    deal_documents(loaded_tiny(), texts, None, how, length=32)
    less = TextSet("less", TEXTS.texts[: LEAST - 1])
    with pytest.raises(TextError, match="too few"):
        deal_documents(loaded_tiny(), less, None, how, length=32)


def test_a_limit_below_the_noise_is_called_so(tmp_path):
    found = prune(loaded_tiny("gpt2"), TEXTS, out=tmp_path, settings=asked(max_loss=1e-9))
    assert not found.heads
    assert Patch.load(tmp_path / "patch.safetensors").is_empty
    assert "documents cannot tell" in found.sentences[0]
    assert str(found.texts["validation"].count) in found.sentences[0]


def test_what_falls_by_chance_is_called_chance(tmp_path):
    found = prune(loaded_tiny("gpt2"), TEXTS, out=tmp_path, settings=asked())
    assert found.lowest
    assert found.gain == "chance"
    assert not found.gain_heads
    assert not (tmp_path / "gain.safetensors").exists()


def test_every_order_is_shown_at_the_same_number(tmp_path):
    found = prune(loaded_tiny(), TEXTS, out=tmp_path, settings=asked())
    rows = found.tables()[0].rows
    assert [row[0] for row in rows] == [
        OURS,
        "first-token mass",
        "output norm",
        "first order (Michel)",
        RANDOM,
    ]
    assert all(row[1] is not None for row in rows)
    body = json.loads((tmp_path / "prune.json").read_text())
    assert body["schema"] == "headwise.prune/1"
    assert headwise.prune is prune
