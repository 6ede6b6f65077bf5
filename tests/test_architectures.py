"""The gate for every row of the table: behaviour, not names.

Noise in one head's weights must move that head (or exactly its key/value group) and no other;
zeroed output weights must equal ablation. A wrong row, or a family with coupled heads, fails.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from conftest import _COMMON, MORE, TINY, sharp_model, tiny_model
from headwise.errors import ModelError, UnknownArchitectureError
from headwise.forward.guard import guard
from headwise.forward.separability import check as check_heads
from headwise.heads import Head, all_heads
from headwise.models import architectures
from headwise.models.architectures import (
    alibi_slopes,
    architecture_of,
    geometry_of,
    positions_of,
)
from headwise.models.families.known_families import ARCHITECTURES, NOT_SEPARABLE
from headwise.models.slices import head_spans, output_bias_span, spans_of

REQUIRED = {
    "bloom",
    "mpt",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "phi3",
    "stablelm",
    "olmo",
    "granite",
    "starcoder2",
}


@pytest.mark.parametrize("name", ["falcon-alibi", "falcon-mqa", "falcon-gqa"])
def test_a_falcon_passes_the_check_as_sdpa_too(name):
    """Its sdpa code shows attention that is not the one it computes with."""
    found = check_heads(tiny_model(name, implementation="sdpa"))
    assert found.passed, found.reason()
    assert found.difference.attention is None


def test_a_model_in_training_mode_is_told_to_be_put_into_eval_mode():
    model = tiny_model("gpt2").train()
    for refused in (check_heads, guard):
        with pytest.raises(ModelError, match=r"its dropout makes every run(.|\n)*model.eval\(\)"):
            refused(model)
    assert check_heads(tiny_model("llama").train()).passed  # it has no dropout


def test_layers_of_different_numbers_of_heads_are_refused():
    family, extra = MORE["laguna"]
    extra = {**_COMMON, **extra, "num_attention_heads_per_layer": [4, 8]}
    model = sharp_model(AutoConfig.for_model(family, **extra))
    with pytest.raises(UnknownArchitectureError, match=r"different numbers of heads \(4, 8\)"):
        check_heads(model)


def test_the_table_holds_the_families_we_promise_and_each_is_tried():
    assert set(ARCHITECTURES) >= REQUIRED
    assert {family for family, _ in (TINY | MORE).values()} == set(ARCHITECTURES)


def test_noise_in_one_head_moves_that_head_or_its_group_and_no_other(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check = check_heads(model)
    assert check.passed, check.reason()
    geometry = geometry_of(model)
    # three roles, the first, middle and last of two layers and of the heads
    assert len(check.probes) == 3 * 2 * 3
    assert check.silencing_error < 1e-5
    assert check.logit_change < 1e-5
    for probe in check.probes:
        assert len(probe.moved) == (1 if probe.role == "q" else geometry.group)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_with_pruned_heads_is_separable_and_stays_as_it_was(name):
    model = tiny_model(name)
    for role in "qkvo":
        for span in head_spans(model, Head(1, 0), role).values():
            span.of(model).data.zero_()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = check_heads(model)
    assert found.passed, found.reason()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_heads_weights_are_views_and_tile_the_projections(model):
    geometry = geometry_of(model)
    heads = all_heads(geometry.num_layers, geometry.num_heads)
    spans = spans_of(model, heads)
    for span in spans.values():
        view, whole = span.of(model), model.get_parameter(span.parameter)
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert view.shape[span.axis] == geometry.head_dim
    covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for span in spans.values():
        covered.setdefault((span.parameter, span.axis), []).append((span.start, span.stop))
    for (name, axis), parts in covered.items():
        parts.sort()
        edges = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == edges[:-1], f"gap or overlap in {name}"
        assert edges[-1] == model.get_parameter(name).shape[axis]


def test_keys_and_values_are_named_after_the_group_that_shares_them():
    llama, bloom = tiny_model("llama"), tiny_model("bloom")
    assert list(spans_of(llama, [Head(1, 2), Head(1, 3)])) == [
        "L1H2.q",
        "L1KV1.k",
        "L1KV1.v",
        "L1H2.o",
        "L1H3.q",
        "L1H3.o",
    ]
    assert list(spans_of(bloom, [Head(0, 3)])) == [
        "L0H3.q",
        "L0H3.q_bias",
        "L0H3.k",
        "L0H3.k_bias",
        "L0H3.v",
        "L0H3.v_bias",
        "L0H3.o",
    ]
    assert list(output_bias_span(bloom, 1)) == ["L1.o_bias"]
    assert output_bias_span(llama, 1) == {}


def test_a_transposed_projection_has_its_heads_in_columns():
    model = tiny_model("gpt2")
    [weight, bias] = head_spans(model, Head(0, 1), "k").values()
    assert (weight.axis, weight.start, weight.stop) == (1, 32 + 8, 32 + 16)
    assert (bias.axis, bias.start, bias.stop) == (0, 32 + 8, 32 + 16)
    [output] = head_spans(model, Head(0, 1), "o").values()
    assert (output.axis, output.start, output.stop) == (0, 8, 16)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("bloom", "concat"),
        ("gpt_neox", "concat"),
        ("gpt2", "grouped"),
        ("mpt", "grouped"),
        ("phi3", "grouped"),
        ("falcon-gqa", "concat"),
    ],
)
def test_a_row_with_the_wrong_order_fails_the_gate(name, order, monkeypatch):
    family = TINY[name][0]
    monkeypatch.setitem(ARCHITECTURES, family, replace(ARCHITECTURES[family], order=order))
    check = check_heads(tiny_model(name))
    assert not check.passed
    assert "moved heads" in check.reason()


def olmo2():
    config = AutoConfig.for_model("olmo2", **_COMMON, num_key_value_heads=2)
    return sharp_model(config)


def test_coupled_heads_are_refused_by_name_with_the_reason():
    model = olmo2()
    with pytest.raises(UnknownArchitectureError, match="norm runs across all heads"):
        check_heads(model)
    assert set(NOT_SEPARABLE) >= {"olmo2", "olmo3", "flex_olmo"}


def test_coupled_heads_are_refused_by_behaviour_even_if_someone_adds_a_row(monkeypatch):
    monkeypatch.setattr(architectures, "NOT_SEPARABLE", {})
    monkeypatch.setitem(ARCHITECTURES, "olmo2", ARCHITECTURES["llama"])
    check = check_heads(olmo2())
    assert not check.passed
    assert "noise in the q weights of L0H0 moved heads [0, 1, 2, 3]" in check.reason()


def test_an_unknown_family_is_refused_and_the_known_ones_are_named():
    model = sharp_model(AutoConfig.for_model("mamba", **{**_COMMON, "state_size": 4}))
    with pytest.raises(UnknownArchitectureError, match="model_type='mamba'") as caught:
        architecture_of(model)
    assert "bloom, cohere" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bloom", (4, 4, 8)),
        ("falcon-mqa", (4, 1, 8)),
        ("falcon-gqa", (4, 2, 8)),
        ("falcon-alibi", (4, 4, 8)),
        ("qwen3", (4, 2, 16)),
        ("gemma", (4, 1, 16)),
        ("mpt-6h", (6, 6, 8)),
        ("gpt2", (4, 4, 8)),
    ],
)
def test_geometry_is_read_from_the_model(name, expected):
    geometry = geometry_of(tiny_model(name))
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == expected
    assert geometry.num_layers == 2


def test_a_row_says_whether_the_family_takes_position_ids(model):
    taken = "position_ids" in inspect.signature(type(model).forward).parameters
    assert architecture_of(model).takes_position_ids == taken


def published_slopes(count):
    """The ALiBi paper's recipe, written out: a power of two, then every other slope of twice it."""
    power = 2 ** math.floor(math.log2(count))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (count - power), 2)]
    return slopes + extra


@pytest.mark.parametrize("name", ["bloom", "bloom-6h", "falcon-alibi"])
def test_slopes_follow_the_paper_for_any_number_of_heads(name):
    slopes = alibi_slopes(tiny_model(name))
    tolerance = 4e-3 if name.startswith("falcon") else 1e-6  # Falcon rounds to bfloat16
    expected = torch.tensor(published_slopes(len(slopes)))
    torch.testing.assert_close(slopes, expected, rtol=tolerance, atol=0)


def test_mpt_orders_the_same_slopes_in_its_own_way():
    slopes = alibi_slopes(tiny_model("mpt-6h")).tolist()
    # slopes of 8 heads, the odd ones first, cut at 6 (modeling_mpt.py)
    eight = [2.0**-i for i in range(1, 9)]
    assert slopes == pytest.approx((eight[1::2] + eight[::2])[:6])


def test_only_alibi_models_have_slopes():
    assert alibi_slopes(tiny_model("llama")) is None
    assert positions_of(tiny_model("falcon-alibi")) == "alibi"
    assert positions_of(tiny_model("falcon-mqa")) == "rope"
    assert positions_of(tiny_model("gpt2")) == "learned"
