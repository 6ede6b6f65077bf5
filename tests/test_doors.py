"""`attention` and `ablated`: what a researcher calls on a model of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise
from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from headwise.errors import SelectionError
from headwise.forward.interventions import ZERO, Variant, mean_output
from headwise.forward.mean_outputs import measure_means
from headwise.forward.variant_losses import variant_losses
from headwise.heads import Head
from headwise.models.architectures import is_transposed, projection_of
from headwise.models.loaded_model import LoadedModel
from headwise.texts.batches import batches, encode_for

# one family of each way into a model (tests/test_tap.py)
WAYS = ("llama", "gemma2", "bloom", "mpt", "falcon-alibi", "falcon-gqa", "gptj", "gpt2")
PROMPT = " ".join(SENTENCES)
HEADS = (Head(0, 1), Head(1, 0), Head(1, 3))


@pytest.fixture(params=WAYS)
def loaded(request):
    return LoadedModel(request.param, tiny_language_model(request.param), tiny_tokenizer())


@torch.inference_mode()
def mean_loss(loaded):
    [ids] = encode_for(loaded, [PROMPT])
    ids = torch.tensor([ids])
    logits = loaded.model(ids).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


@torch.inference_mode()
def test_patterns_are_those_of_transformers(loaded):
    patterns = headwise.attention(loaded, PROMPT, "L0H1,L1")
    [ids] = encode_for(loaded, [PROMPT])
    own = loaded.model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    assert [str(head) for head in patterns.heads] == ["L0H1", "L1H0", "L1H1", "L1H2", "L1H3"]
    assert len(patterns.tokens) == len(ids)
    for head in patterns.heads:
        expected = own[head.layer][0, head.index].numpy()
        np.testing.assert_allclose(patterns[head], expected, atol=1e-5)
    np.testing.assert_allclose(patterns["L1H2"].sum(-1), 1.0, atol=1e-5)
    assert "data:image/png" in patterns._repr_html_()


def test_a_pattern_that_was_not_asked_for_is_refused(loaded):
    patterns = headwise.attention(loaded, PROMPT, "L1H2")
    with pytest.raises(SelectionError, match="L0H0 is not among"):
        patterns["L0H0"]


def test_without_heads_is_the_model_whose_output_columns_are_zero(loaded):
    stock = mean_loss(loaded)
    with headwise.ablated(loaded, "L0H1,L1H0,L1H3"):
        without = mean_loss(loaded)
    assert mean_loss(loaded) == stock
    for head in HEADS:
        projection = projection_of(loaded.model, head.layer, "o")
        width = (projection.nx if is_transposed(projection) else projection.in_features) // 4
        columns = slice(head.index * width, (head.index + 1) * width)
        with torch.no_grad():
            weight = projection.weight
            (weight[columns] if is_transposed(projection) else weight[:, columns]).zero_()
    assert without == pytest.approx(mean_loss(loaded), abs=1e-6)
    assert abs(without - stock) > 1e-4


@pytest.mark.parametrize("replacement", ["zero", "mean"])
def test_both_replacements_cost_what_the_engine_says(loaded, replacement):
    encoded = encode_for(loaded, [PROMPT])
    means = measure_means(loaded.model, batches(encoded, 4))
    kind = ZERO if replacement == "zero" else mean_output(loaded.model, means)
    losses = variant_losses(loaded.model, encoded, [Variant(HEADS, kind)])
    with headwise.ablated(loaded, HEADS, replacement, texts=[PROMPT]):
        mine = mean_loss(loaded)
    assert mine == pytest.approx(float(losses.losses[0, 0] / losses.tokens[0]), abs=1e-5)


def test_text_is_generated_without_the_heads_with_and_without_a_cache(loaded):
    [ids] = encode_for(loaded, [SENTENCES[0]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with headwise.ablated(loaded, "L1"):
        texts = [
            loaded.model.generate(torch.tensor([ids]), use_cache=cached, **options).tolist()
            for cached in (True, False)
        ]
    assert texts[0] == texts[1]


def test_hooks_go_when_the_code_inside_fails(loaded):
    stock = mean_loss(loaded)
    with pytest.raises(ZeroDivisionError), headwise.ablated(loaded, "all"):
        1 / 0  # noqa: B018
    assert mean_loss(loaded) == stock
