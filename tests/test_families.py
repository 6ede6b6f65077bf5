"""The long tail of families: the check, every measure against dense attention, and what follows.

`test_tap.py` and `test_architectures.py` do more with fewer families; here each has its odd shape.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from conftest import tiny_model
from eager import eager_measures
from headwise.diagnosis.measures import MEASURES, measure_heads
from headwise.forward.partial_run import layer_input, run_from
from headwise.forward.separability import check
from headwise.heads import Head
from headwise.models.architectures import (
    architecture_of,
    attention_layers,
    backbone_of,
    geometry_of,
    layers_of,
)
from headwise.texts.batches import batches
from neurons import activation_dormancy, weight_dormancy
from planned import ablate_sets
from test_tap import TOLERANCE, token_ids
from tiny import MORE, UNEVEN

TEXTS = [token_ids(131, 1), token_ids(20, 2)]  # past every window and chunk, and short of them


@pytest.fixture(scope="module", params=sorted(MORE))
def model(request):
    """Each family of the long tail, loaded once."""
    return tiny_model(request.param)


def test_a_family_passes_the_check(model):
    found = check(model)
    assert found.passed, found.reason()
    assert found.difference.length >= 104  # the windows are 40, the chunks 32
    assert found.difference.logits < 1e-5
    assert found.difference.losses < 1e-5
    assert found.silencing_error < 1e-5
    assert found.difference.contributions < 1e-5
    assert found.difference.attention is None or found.difference.attention < 1e-3


def test_every_measure_equals_the_dense_one(model):
    measured = measure_heads(model, batches(TEXTS, 2))
    for number, text in enumerate(TEXTS):
        expected, _ = eager_measures(model, text)
        assert set(expected) >= set(MEASURES) - {"max_logit", "max_logit_upper"}
        for name, value in expected.items():
            error = np.abs(measured.values[name][number] - value).max()
            assert error < TOLERANCE[name], f"{name} of a text of {len(text)}: off by {error:.1e}"


def test_a_model_runs_on_from_any_layer_and_ablation_follows_it(model):
    ids = torch.tensor([TEXTS[1]])
    with torch.inference_mode():
        last = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        for layer in attention_layers(model):
            again = run_from(model, ids, layer, layer_input(model, ids, layer))
            assert (again - last).abs().max() < 1e-5 * last.abs().max()
    heads = [Head(attention_layers(model)[-1], 1), Head(attention_layers(model)[0], 0)]
    found = ablate_sets(model, [TEXTS[1]], [[head] for head in heads])
    assert found.base == pytest.approx(model_loss(model, ids), rel=1e-4)
    assert np.isfinite(found.deltas).all()
    assert found.deltas.any()


@torch.inference_mode()
def model_loss(model, ids):
    logits = model(ids, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))


def test_dormancy_is_an_optional_part_of_a_row(model):
    weights = weight_dormancy(model)
    activations = activation_dormancy(model, batches(TEXTS, 2))
    has_mlp = bool(architecture_of(model).mlp_in)
    assert (weights is not None, activations is not None) == (has_mlp, has_mlp)
    if weights is not None:
        assert weights.num_neurons == activations.num_neurons > 0


def test_heads_bear_the_models_own_layer_numbers(model):
    geometry = geometry_of(model)
    seen = measure_heads(model, batches(TEXTS[1:], 1))
    assert seen.values["entropy"].shape == (1, geometry.num_layers, geometry.num_heads)


def test_a_row_knows_whether_its_layers_return_a_tuple(model):
    returned = []
    with ExitStack() as stack:
        for layer in layers_of(model):
            hook = layer.register_forward_hook(lambda _, inputs, output: returned.append(output))
            stack.callback(hook.remove)
        with torch.inference_mode():
            model(torch.tensor([TEXTS[1]]), use_cache=False)
    kinds = {isinstance(output, tuple) for output in returned}
    assert kinds == {architecture_of(model).layer_returns_tuple}


def test_only_uneven_layers_stand_in_the_way_of_surgery(model):
    shapes = {geometry_of(model, layer) for layer in attention_layers(model)}
    assert (len(shapes) > 1) == (str(model.config.model_type) in UNEVEN)
