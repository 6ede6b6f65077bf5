"""Stream: heads that see the first and the recent tokens only, against transformers' attention."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from conftest import tiny_model
from eager import head_values, watched
from headwise.errors import ModelError, SettingsError
from headwise.forward.attention import attend_ends
from headwise.forward.interventions import Variant, first_and_recent
from headwise.forward.tap import tapped
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head
from headwise.pruning.search import deal_documents
from headwise.pruning.settings import SearchSettings, StreamSettings
from headwise.pruning.stream import cache_bytes, stream
from headwise.pruning.values import NestedSets
from test_prune import TEXTS, loaded_tiny
from test_triage import document_losses, documents, output_of

# ALiBi, RoPE, learned positions, a window, soft caps, learned sinks, chunks
FAMILIES = ("bloom", "llama", "gpt2", "qwen2-window", "gemma2", "gpt_oss", "llama4-chunks")
FIRST, RECENT = 3, 9


def seen_at_ends(length):
    """Which keys a query keeps: the first and the recent ones."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    return (key <= query) & ((key < FIRST) | (query - key < RECENT))


def dense_attention(model, ids):
    with watched(model) as seen, torch.inference_mode():
        weights = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    return weights, seen["value"]


def restricted_output(model, ids, head):
    """From transformers' own attention weights: what lies between goes, the rest is rescaled.

    A learned sink keeps its share of what is left.
    """
    weights, values = dense_attention(model, ids)
    p = weights[head.layer][0, head.index].double()
    sink = 1 - p.sum(-1, keepdim=True)  # of gpt-oss; 0 elsewhere
    kept = p * seen_at_ends(len(ids))
    kept = kept / (kept.sum(-1, keepdim=True) + sink.clamp_min(0) * (sink > 1e-6))
    return kept @ head_values(model, head.layer, values[head.layer])[0, head.index]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_set_of_heads_without_the_middle_is_that_of_brute_force(family):
    model, encoded = tiny_model(family, sharpen=8.0), documents(length=60)
    sets = [(Head(0, 1),), (Head(0, 0), Head(0, 1), Head(1, 2))]
    restricted = first_and_recent(FIRST, RECENT)
    found = variant_losses(model, encoded, [Variant(heads, restricted) for heads in sets])
    exact = np.array([[brute_force(model, ids, heads) for ids in encoded] for heads in sets])
    exact -= document_losses(model, encoded)
    assert np.abs(exact).max(1).min() > 1e-4  # the middle matters
    assert np.abs(found.deltas - exact).sum(1).max() / found.tokens.sum() < 1e-6


def brute_force(model, ids, heads):
    """The loss of one document, head by head from the lowest: each answers to those below."""
    if not heads:
        return document_losses(model, [ids])[0]
    first, *rest = heads
    new = restricted_output(model, ids, first).to(model.dtype)
    with output_of(model, first, lambda out: new):
        return brute_force(model, ids, rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_on_both_ends_is_that_of_dense_attention(family):
    model, ids = tiny_model(family, sharpen=8.0), documents(count=1, length=60)[0]
    masses = {}

    def read(attention):
        _, lse = attend_ends(attention.scores, attention.v, FIRST, RECENT)
        masses[attention.layer] = (lse - attention.lse).exp()[0]

    with tapped(model, read), torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    weights, _ = dense_attention(model, ids)
    for layer, mass in masses.items():
        p = weights[layer][0].double()
        lost = (p * ~seen_at_ends(len(ids))).sum(-1)
        assert (1 - mass - lost).abs().max() < 1e-5
        assert lost.max() > 0.05


def asked(**options):
    search = SearchSettings(max_loss=0.3, max_texts=24, curve=1)
    return StreamSettings(search, first=2, recent=6, max_length=32, **options)


def test_restricted_groups_and_their_cost_are_those_of_brute_force(tmp_path):
    loaded = loaded_tiny()
    found = stream(loaded, TEXTS, out=tmp_path, settings=asked())
    again = NestedSets.load(tmp_path / "stream.json")
    assert again.costs == found.costs
    assert (again.settings, again.order, again.groups) == (asked(), found.order, found.groups)
    assert found.units == 4
    documents = deal_documents(loaded, TEXTS, None, asked().search, length=32, minimum=9)
    encoded, restricted = documents.encoded["held_out"], first_and_recent(2, 6)
    for count in (1, found.chosen):
        heads = tuple(h for name in found.order[:count] for h in group_heads(name))
        exact = variant_losses(loaded.model, encoded, [Variant(heads, restricted)])
        change = exact.deltas.sum() / exact.tokens.sum()
        assert abs(found.cost(count, "held_out").value - change) < 1e-6


def group_heads(name):
    layer, group = name[1:].split("KV")
    return [Head(int(layer), 2 * int(group) + i) for i in range(2)]


def test_the_pattern_is_read_as_duo_attention_reads_it(tmp_path):
    """Its loader: loadtxt with tabs, clipped to 0..1, and a threshold or a quantile."""
    found = stream(loaded_tiny(), TEXTS, out=tmp_path, settings=asked())
    scores = np.loadtxt(tmp_path / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    config = json.loads((tmp_path / "config.json").read_text())
    assert scores.shape == (2, 2)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert (config["sink_size"], config["recent_size"]) == (2, 6)
    wanted = {tuple(map(int, name[1:].split("KV"))) for name in found.groups}
    assert wanted
    assert set(map(tuple, np.argwhere(scores < config["threshold"]).tolist())) == wanted
    limit = np.quantile(scores, config["sparsity"])
    assert set(map(tuple, np.argwhere(scores < limit).tolist())) == wanted
    order = [tuple(map(int, name[1:].split("KV"))) for name in found.order]
    assert sorted(order, key=lambda place: scores[place]) == order


def test_saved_bytes_are_those_of_a_counted_cache(tmp_path):
    """Against the tensors of transformers' own cache."""
    loaded = loaded_tiny()
    found = stream(loaded, TEXTS, out=tmp_path, settings=asked(context=20))
    with torch.inference_mode():
        cache = loaded.model(torch.ones(1, 20, dtype=torch.long), use_cache=True).past_key_values
    sizes = [t.numel() * t.element_size() for one in cache.layers for t in (one.keys, one.values)]
    assert found.full_bytes == sum(sizes)
    per_group = sum(sizes) / 4
    assert found.saved_bytes == len(found.groups) * per_group * (20 - 8) / 20


def test_a_sliding_layer_saves_no_more_than_it_holds():
    loaded = loaded_tiny("qwen2-window")
    how = StreamSettings(first=4, recent=6, context=1000)
    per_token, full, saved = cache_bytes(loaded, ["L0KV0", "L1KV0"], how)
    each = per_token // 4
    assert full == 2 * each * (40 + 1000)
    assert saved == each * (30 + 990)


def test_texts_without_a_middle_and_shared_caches_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="nothing between"):
        stream(loaded_tiny(), TEXTS, out=tmp_path, settings=StreamSettings(max_length=300))
    with pytest.raises(ModelError, match="one compressed vector"):
        stream(loaded_tiny("deepseek_v3"), TEXTS, out=tmp_path, settings=asked())
