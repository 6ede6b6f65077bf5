"""What must hold whatever the weights are: positions alone, and heads in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import tiny_model
from headwise.diagnosis.measures import measure_heads, positional_baseline
from headwise.forward.tap import tapped
from headwise.heads import Head
from headwise.models.architectures import alibi_slopes, attention_of, geometry_of
from headwise.models.slices import head_spans, read_slices, write_slices
from headwise.texts.batches import batches
from test_tap import logits, token_ids

LENGTH = 90
REPEATED = [7] * LENGTH


def measured(model, text):
    return measure_heads(model, batches([text], 1)).means()


@pytest.mark.parametrize("name", ["bloom", "bloom-6h", "mpt", "falcon-alibi"])
def test_with_alibi_and_one_token_repeated_attention_is_the_positional_baseline(name):
    """Every q.k is the same, so only the bias is left; falcon's eager code adds it twice."""
    model = tiny_model(name, implementation="sdpa" if name.startswith("falcon") else "eager")
    slopes = alibi_slopes(model).double().numpy()
    if name.startswith("falcon"):  # it scales the bias with the scores
        slopes = slopes / np.sqrt(geometry_of(model).head_dim)
    found = measured(model, REPEATED)
    for measure in ("first_token_mass", "entropy"):
        expected = positional_baseline(slopes, [LENGTH])[f"{measure}_positional_baseline"]
        np.testing.assert_allclose(found[measure], np.tile(expected, (2, 1)), atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gptj", "phi3", "deepseek_v3"])
def test_with_rope_and_one_token_repeated_logits_follow_distance_alone(name):
    model = tiny_model(name)

    def read(attention):
        q, k = attention.scores.q.double(), attention.scores.k.double()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = q @ k.transpose(-1, -2) * attention.scores.scale
        shifted = (s[..., 1:, 1:] - s[..., :-1, :-1]).tril().abs().max()
        assert shifted < 1e-3 * s.abs().max(), f"layer {attention.layer}"

    with tapped(model, read):
        logits(model, torch.tensor([REPEATED]))


def test_without_positions_one_token_repeated_is_attended_evenly():
    """A NoPE layer cannot tell equal tokens apart: its attention is uniform."""
    found = measured(tiny_model("smollm3"), REPEATED)
    expected = positional_baseline(np.zeros(1), [LENGTH])
    np.testing.assert_allclose(
        found["first_token_mass"][1], expected["first_token_mass_positional_baseline"][0], atol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "phi3", "opt", "qwen3", "deepseek_v3", "lfm2", "mimo"]
)
def test_permuting_heads_permutes_every_map(name):
    model = tiny_model(name)
    text = token_ids(60)
    before, plain = measured(model, text), logits(model, torch.tensor([text]))
    layers = [n for n in geometry_of(model).layers if not has_sinks(model, n)]
    for layer in layers:
        swap_groups(model, layer)
    after = measured(model, text)
    assert (logits(model, torch.tensor([text])) - plain).abs().max() < 1e-4 * plain.abs().max()
    for row, layer in enumerate(geometry_of(model).layers):
        group = geometry_of(model, layer).group if layer in layers else 0
        order = np.roll(np.arange(geometry_of(model).num_heads), group)
        for measure, values in before.items():
            error = np.abs(after[measure][row] - values[row][order]).max()
            assert error < 2e-3, f"{measure} of layer {layer}"


def has_sinks(model, layer):
    """A learned sink belongs to a head's place, and no slice holds it."""
    return getattr(attention_of(model, layer), "sinks", None) is not None


def swap_groups(model, layer):
    """Every head moves on by one key/value group."""
    geometry = geometry_of(model, layer)
    count, group = geometry.num_heads, geometry.group
    for role in "qkvo":
        shared = role in "kv"
        heads = range(0, count, group if shared else 1)
        spans = [head_spans(model, Head(layer, index), role) for index in heads]
        values = [list(read_slices(model, one).values()) for one in spans]
        step = 1 if shared else group
        moved = {}
        for place, one in enumerate(spans):
            source = values[(place - step) % len(spans)]
            moved |= dict(zip(one.values(), source, strict=True))
        write_slices(model, moved)
