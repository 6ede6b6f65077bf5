"""Roles of heads against brute force on eager attention, and on heads whose role is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from eager import eager_roles
from headwise import diagnose, make_plan
from headwise.diagnosis.measures import measure_heads
from headwise.diagnosis.role_measures import role_reader
from headwise.diagnosis.roles import PROBE, ROLES, role_grid
from headwise.diagnosis.token_rows import SEEN
from headwise.forward.tap import tapped
from headwise.models.architectures import alibi_slopes
from headwise.models.first_token import FirstToken
from headwise.models.loaded_model import LoadedModel
from headwise.texts.batches import batches, encode_for
from headwise.texts.token_kinds import token_text
from test_tap import WAYS

TEXTS = (
    "The keeper wrote. The keeper slept; the lake froze!\n" * 9,
    "A small model learns small things, and forgets them. " * 2,
    SENTENCES[1],
    "cat",
)


def loaded_tiny(name):
    model = tiny_language_model(name)
    return LoadedModel(name, model, tiny_tokenizer(), FirstToken(False, "a test"))


@pytest.mark.parametrize("name", [*WAYS, "gpt_oss"])
def test_roles_equal_brute_force_on_eager_attention(name):
    loaded = loaded_tiny(name)
    encoded = encode_for(loaded, TEXTS, max_length=120)
    work = list(batches(encoded, 3))  # padded
    measured = measure_heads(loaded.model, work, roles=role_reader(loaded, work)).values
    compared = set()
    for number, ids in enumerate(encoded):
        words = [token_text(loaded.tokenizer, one) for one in ids]
        expected = eager_roles(loaded.model, ids, words)
        for role in (role.name for role in ROLES if role.name != "fixed_position"):
            for layer in range(2):
                value = measured[role][number, layer]
                if layer not in expected.get(role, {}):
                    assert np.isnan(value).all(), f"{role}: no query of text {number} has a choice"
                    continue
                compared.add(role)
                assert np.abs(value - expected[role][layer]).max() < 1e-5, (role, number, layer)
        for column in range(15):
            for layer, value in expected.get(f"fixed_position {column + 1}", {}).items():
                found = measured["fixed_position"][number, layer, :, column]
                assert np.abs(found - value).max() < 1e-5
    assert compared == {role.name for role in ROLES} - {"fixed_position"}


def circuit(*, positions=40, words=24, sharp=8.0):
    """GPT-2 weights by hand: L0H0 looks one token back and notes it, L1H0 looks for the note.

    Channels: the token, the position, and the token before, each one-hot. L1H1 looks for copies.
    """
    width = 2 * words + positions
    config = GPT2Config(
        vocab_size=words, n_positions=positions, n_embd=width, n_layer=2, n_head=2, n_inner=4
    )
    model = GPT2LMHeadModel(config).eval()
    token, place, note = range(words), range(words, words + positions), range(width - words, width)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" not in name:
                parameter.zero_()
        model.transformer.wte.weight[:, list(token)] = torch.eye(words)
        model.transformer.wpe.weight[:, list(place)] = torch.eye(positions)
        first, second = (block.attn for block in model.transformer.h)
        head_dim = width // 2
        for at in range(1, positions):
            first.c_attn.weight[place[at], at - 1] = sharp
        for at in range(positions):
            first.c_attn.weight[place[at], width + at] = 1.0
        for at in range(words):
            first.c_attn.weight[token[at], 2 * width + at] = 1.0
            first.c_proj.weight[at, note[at]] = 1.0
            second.c_attn.weight[token[at], at] = sharp
            second.c_attn.weight[note[at], width + at] = 1.0
            second.c_attn.weight[token[at], head_dim + at] = sharp
            second.c_attn.weight[token[at], width + head_dim + at] = 1.0
    return model


def word_tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {f"w{number}": number for number in range(words)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_hand_made_induction_circuit_is_named():
    loaded = LoadedModel("circuit", circuit(), word_tokenizer(24), FirstToken(False, "a test"))
    draws = np.random.default_rng(1).integers(0, 24, (6, 40))
    texts = [" ".join(f"w{number}" for number in row) for row in draws]
    diagnosis = diagnose(loaded, texts)
    assert diagnosis.roles[0][0] == "previous_token"
    assert diagnosis.roles[1][0] == "induction"
    assert diagnosis.roles[1][1] == "duplicate_token"
    assert diagnosis.roles[0][1] == "none"  # it looks everywhere alike
    assert diagnosis.maps["previous_token"][0, 0] > 0.9
    assert diagnosis.maps["induction"][1, 0] > 0.8
    assert diagnosis.maps[PROBE][1, 0] > 0.3  # 24 words: many have other copies too
    assert abs(diagnosis.maps["induction"][0, 1]) < 1e-6
    chosen = make_plan(diagnosis, heads="induction > 0.5").target_heads
    assert [str(head) for head in chosen] == ["L1H0"]
    assert make_plan(diagnosis, heads="induction").target_heads == chosen


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_head_whose_queries_say_nothing_plays_no_role(name):
    loaded = loaded_tiny(name)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    maps = diagnose(loaded, TEXTS[:3]).maps
    for role in (*(role.name for role in ROLES), PROBE):
        assert np.abs(maps[role]).max() < 1e-6, role


def test_an_alibi_head_has_beside_its_role_what_its_bias_alone_gives():
    loaded = loaded_tiny("bloom")
    slopes = alibi_slopes(loaded.model).double().numpy()
    maps = diagnose(loaded, TEXTS[:1], max_length=50).maps
    for head, slope in enumerate(slopes):
        excess = []
        for query in range(3, 50):
            weights = np.exp(-slope * np.arange(query + 1))  # by distance
            excess.append(weights[:3].sum() / weights.sum() - 3 / (query + 1))
        found = maps["local_positional_baseline"][:, head]
        np.testing.assert_allclose(found, np.mean(excess), atol=1e-6)


def test_other_roles_come_before_the_first_token_and_previous_token_before_local():
    def grid(**values):
        maps = {role.name: np.zeros((1, 1)) for role in ROLES}
        return role_grid({**maps, **{n: np.array([[v]]) for n, v in values.items()}}, 0.2)[0][0]

    assert grid(first_token=0.6, delimiter=0.3) == "delimiter"
    assert grid(first_token=0.6, delimiter=0.1) == "first_token"
    assert grid(previous_token=0.5, local=0.7) == "previous_token"
    assert grid(previous_token=0.25, local=0.9) == "local"
    assert grid(induction=0.1, induction_probe=0.8) == "induction"
    assert grid() == "none"


def test_what_wakes_a_head_is_the_share_of_its_output_that_is_not_the_first_value():
    """o_t = (1 - g) v_0 + g c, with c what attention on the other keys alone would give."""
    loaded = loaded_tiny("llama")
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(0.2)
    thresholds = {"sink": 0.01, "dead": 0.99}
    from headwise.diagnosis.settings import Thresholds

    diagnosis = diagnose(loaded, TEXTS[:1], max_length=60, thresholds=Thresholds(**thresholds))
    ids = encode_for(loaded, TEXTS[:1], max_length=60)[0]
    assert "".join(diagnosis.waking.tokens) == loaded.tokenizer.decode(ids)
    output = loaded.model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    seen = {}
    with tapped(loaded.model, lambda a: seen.update({a.layer: (a.out[0], a.v[0])})):
        loaded.model(torch.tensor([ids]), use_cache=False)
    assert diagnosis.waking.heads
    for name, wakers in diagnosis.waking.heads.items():
        layer, head = int(name[1]), int(name[3])
        p = output.attentions[layer][0, head].detach().double()
        out, value = seen[layer][0][head].double(), seen[layer][1][head // 2].double()
        g = torch.tensor(wakers.text, dtype=torch.float64)
        np.testing.assert_allclose(g[1:], 1 - p[1:, 0], atol=6e-4)  # stored with three digits
        exact = 1 - p[:, :1]
        others = (p[:, 1:] @ value[1:]) / exact.clamp_min(1e-30)
        assert ((1 - exact) * value[0] + exact * others - out)[1:].abs().max() < 1e-4
        assert abs(wakers.base - float(exact[1:].mean())) < 1e-6
        for token, mean, count in wakers.tokens:
            at = [t for t in range(1, 60) if diagnosis.waking.tokens[t] == token]
            assert len(at) == count >= SEEN
            assert abs(float(exact[at].mean()) - mean) < 1e-6
