"""The tap against transformers' own eager attention, on every row, with and without padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from conftest import TINY, sharp_model, tiny_model
from eager import eager_measures, split_heads, watched
from headwise.diagnosis.measures import MEASURES, measure_heads
from headwise.errors import HeadwiseError
from headwise.forward.attention import mass_at, moments
from headwise.forward.tap import NAME, tapped
from headwise.models.architectures import architecture_of
from headwise.texts.batches import batches

LENGTHS = (300, 131, 40, 2)  # longer and shorter than every window (40 and 64)
TOLERANCE = dict.fromkeys(MEASURES, 2e-4) | {
    "first_token_mass": 1e-5,
    "local_mass": 1e-5,
    "previous_token_mass": 1e-5,
    "entropy": 1e-4,
    "normalized_entropy": 1e-4,
    "mean_distance": 2e-3,
    "output_norm_ratio": 1e-5,
    "constant_share": 1e-5,
}
# one row for each way into the model, where a whole grid would only repeat itself
WAYS = ("llama", "gemma2", "bloom", "mpt", "falcon-alibi", "falcon-gqa", "gptj")


def token_ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


TEXTS = [token_ids(length, seed) for seed, length in enumerate(LENGTHS)]


def relative(left, right):
    return float((left - right).abs().max() / right.abs().max())


@torch.inference_mode()
def logits(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


def padded(texts, side):
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(width - len(text), None)
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    return ids, mask.long()


def test_every_measure_of_every_head_equals_the_dense_one(model):
    measured = measure_heads(model, batches(TEXTS, 3))
    for number, text in enumerate(TEXTS):
        expected, _ = eager_measures(model, text)
        assert set(expected) >= set(MEASURES) - {
            "max_logit",
            "max_logit_upper",
        }
        for name, value in expected.items():
            error = np.abs(measured.values[name][number] - value).max()
            assert error < TOLERANCE[name], f"{name} of a text of {len(text)}: off by {error:.1e}"


def test_heads_of_the_tiny_models_are_sharp_and_differ(model):
    """Otherwise the comparisons above would compare uniform attention with itself."""
    measures, _ = eager_measures(model, TEXTS[0])
    assert measures["normalized_entropy"].min() < 0.75
    assert np.ptp(measures["entropy"]) > 0.02


def test_the_tap_leaves_the_logits_alone(model):
    ids = torch.tensor([TEXTS[0]])
    plain = logits(model, ids)
    with tapped(model):
        seen = logits(model, ids)
    assert relative(seen, plain) < 1e-5
    assert torch.equal(logits(model, ids), plain)  # and afterwards the model is itself again


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_sees_what_eager_sees(model, side):
    texts = TEXTS[1:3]
    ids, mask = padded(texts, side)
    real = mask.bool()
    with torch.inference_mode(), watched(model) as seen:
        plain = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
    shown = {}

    def read(attention):
        offset = mass_at(attention.scores, attention.lse, 1)
        first = mass_at(attention.scores, attention.lse, None)
        shown[attention.layer] = (
            attention.out,
            moments(attention.scores, attention.lse),
            first,
            offset,
        )

    with tapped(model, read):
        after = logits(model, ids, attention_mask=mask)
    assert relative(after[real], plain.logits[real]) < 1e-5
    for layer, (out, moment, first, previous) in shown.items():
        p = plain.attentions[layer].double()
        at = real[:, None].expand(p.shape[:3])
        out_error = (out - split_heads(model, seen["out"][layer]))[at].abs().max()
        assert out_error < 1e-4
        assert (first - p[..., 0])[at].abs().max() < 2e-5
        assert (previous[..., 1:] - p.diagonal(-1, 2, 3))[at[..., 1:]].abs().max() < 2e-5
        entropy = torch.special.entr(p).sum(-1)
        assert (moment.entropy - entropy)[at].abs().max() < 1e-3  # a single query, not a mean


@pytest.mark.parametrize("name", [name for name in TINY if name.startswith("falcon")])
def test_falcon_is_followed_in_sdpa_as_in_eager(name):
    model = tiny_model(name, implementation="sdpa")
    ids, mask = padded(TEXTS[:2], "right")
    with torch.inference_mode(), watched(model) as seen:
        plain = model(ids, attention_mask=mask, use_cache=False).logits
    outs = {}
    with tapped(model, lambda attention: outs.update({attention.layer: attention.out})):
        after = logits(model, ids, attention_mask=mask)
    real = mask.bool()
    assert relative(after[real], plain[real]) < 1e-5
    for layer, out in outs.items():
        expected = split_heads(model, seen["out"][layer])
        assert relative(out.transpose(1, 2)[real], expected.transpose(1, 2)[real]) < 1e-5


def test_falcons_eager_code_adds_its_bias_twice():
    """Why `own_implementation` matters: delete the factor 2 in families.py when this fails."""
    ids = torch.tensor([TEXTS[2]])
    eager, sdpa = (tiny_model("falcon-alibi", implementation=name) for name in ("eager", "sdpa"))
    assert relative(logits(eager, ids), logits(sdpa, ids)) > 1e-3


@pytest.mark.parametrize("name", WAYS)
def test_a_reader_can_replace_a_heads_output(name):
    model = tiny_model(name)
    ids = torch.tensor([TEXTS[2]])

    def silence(attention):
        return torch.zeros_like(attention.out) if attention.layer == 1 else None

    with tapped(model, silence), watched(model) as seen:
        changed = logits(model, ids)
    assert not seen["out"][1].any()
    assert seen["out"][0].any()
    assert relative(changed, logits(model, ids)) > 1e-3


@pytest.mark.parametrize("name", WAYS)
def test_a_tap_inside_a_tap_leaves_the_outer_one_open(name):
    model = tiny_model(name)
    ids = torch.tensor([TEXTS[2]])
    plain = logits(model, ids)
    outer, inner = [], []
    with tapped(model, lambda attention: outer.append(attention.layer)):
        with tapped(model, lambda attention: inner.append(attention.layer)):
            assert relative(logits(model, ids), plain) < 1e-5
        assert relative(logits(model, ids), plain) < 1e-5
    assert inner == [0, 1]
    assert outer == [0, 1]
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("name", WAYS)
def test_two_taps_without_readers_are_two(name):
    model = tiny_model(name)
    ids = torch.tensor([TEXTS[2]])
    plain = logits(model, ids)
    with tapped(model):
        with tapped(model):
            logits(model, ids)
        assert relative(logits(model, ids), plain) < 1e-5


@pytest.mark.parametrize("name", WAYS)
def test_an_exception_in_a_reader_leaves_the_model_as_it_was(name):
    model = tiny_model(name)
    ids = torch.tensor([TEXTS[2]])
    plain = logits(model, ids)
    modules = [module for module in model.modules() if "forward" in vars(module)]

    def fail(attention):
        raise ZeroDivisionError("reader")

    with pytest.raises(ZeroDivisionError, match="reader"), tapped(model, fail):
        logits(model, ids)
    assert model.config._attn_implementation == "eager"
    assert [module for module in model.modules() if "forward" in vars(module)] == modules
    assert torch.equal(logits(model, ids), plain)


def test_a_forward_that_someone_else_put_on_the_module_survives():
    """accelerate's hooks live there."""
    model = tiny_model("bloom")
    module = model.transformer.h[0].self_attention
    own = vars(module)["forward"] = module.forward
    with tapped(model):
        logits(model, torch.tensor([TEXTS[2]]))
    assert vars(module)["forward"] is own


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_tap_that_sees_nothing_is_an_error(name):
    model = tiny_model(name)
    with pytest.raises(HeadwiseError, match="the tap saw no layer"), tapped(model):
        pass


def test_a_row_that_wrongly_claims_the_interface_is_an_error(monkeypatch):
    """BLOOM bypasses the interface: without its own forward nothing would be seen."""
    model = tiny_model("bloom")
    row = architecture_of(model)
    monkeypatch.setattr(
        "headwise.forward.tap.architecture_of",
        lambda _: replace(row, attention_call=None),
    )
    with pytest.raises(HeadwiseError, match="bypasses the tap"), tapped(model):
        logits(model, torch.tensor([TEXTS[2]]))


@pytest.mark.parametrize("name", WAYS)
def test_a_cache_is_refused(name):
    model = tiny_model(name)
    ids = torch.tensor([TEXTS[2]])
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(HeadwiseError, match="cannot use a key/value cache"), tapped(model):
            model(ids[:, :1], past_key_values=cache, use_cache=True)


def test_a_packed_batch_keeps_its_dense_mask():
    """Two texts in one row, told apart by position ids: nothing may leak across."""
    model = tiny_model("llama")
    ids = torch.tensor([TEXTS[2] + TEXTS[1]])
    positions = torch.cat([torch.arange(len(text)) for text in (TEXTS[2], TEXTS[1])])[None]
    plain = logits(model, ids, position_ids=positions)
    masks = []
    with tapped(model, lambda attention: masks.append(attention.scores.mask)):
        seen = logits(model, ids, position_ids=positions)
    assert relative(seen, plain) < 1e-5
    assert masks[0] is not None
    apart = logits(model, torch.tensor([TEXTS[1]]))
    assert relative(seen[:, len(TEXTS[2]) :], apart) < 1e-5


def test_learned_sinks_of_a_future_row_are_followed(monkeypatch):
    """gpt-oss passes `s_aux` through the interface; its row is not in the table yet."""
    from headwise.models.families.known_families import ARCHITECTURES

    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=40,
        max_position_embeddings=512,
    )
    monkeypatch.setitem(ARCHITECTURES, "gpt_oss", ARCHITECTURES["llama"])
    model = sharp_model(config)
    ids = torch.tensor([TEXTS[1]])
    with torch.inference_mode():
        plain = model(ids, output_attentions=True, use_cache=False)
    masses = {}

    def read(attention):
        assert attention.scores.sinks is not None
        masses[attention.layer] = mass_at(attention.scores, attention.lse, None)

    with tapped(model, read):
        assert relative(logits(model, ids), plain.logits) < 1e-5
    for layer, mass in masses.items():
        assert (mass - plain.attentions[layer][..., 0]).abs().max() < 1e-5


def test_the_registered_name_has_a_mask_function():
    """Without one transformers 5 silently drops the causal mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert NAME in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    assert NAME in ALL_ATTENTION_FUNCTIONS.valid_keys()
