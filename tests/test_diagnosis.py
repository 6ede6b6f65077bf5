"""Diagnosis: equal to a slow loop over dense attention, the same every time, honest on classes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import SENTENCES, tiny_language_model, tiny_model
from eager import eager_measures
from headwise import Diagnosis, diagnose
from headwise.cli.show import head_grid, rich_table
from headwise.diagnosis.bimodality import _density
from headwise.diagnosis.measures import MEASURES, measure_heads, positional_baseline
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.survey import rank_correlation
from headwise.diagnosis.values import classify, diagnosis_from, threshold_sweep
from headwise.diagnosis.view import diagnosis_table, grid_html
from headwise.errors import ArtefactError, ModelError, TextError
from headwise.heads import Head, select_heads
from headwise.models.architectures import alibi_slopes
from headwise.models.slices import head_spans
from headwise.surgery.plan import make_plan
from headwise.texts.batches import batches, encode_texts
from headwise.texts.text_sets import TextSet
from neurons import activation_dormancy, weight_dormancy
from planned import made_model

TEXTS = [*SENTENCES, " ".join(SENTENCES) * 3]


@pytest.fixture(scope="module")
def language_model():
    return tiny_language_model("llama")


@pytest.fixture(scope="module")
def diagnosis(language_model, tokenizer):
    return diagnose(language_model, tokenizer, TEXTS, name="tiny/llama", max_length=200)


def slow(model, tokenizer, *, skip=0, bos=False, max_length=200):
    """(text, layer, head) of every measure, and the first-token mass of every query."""
    encoded = encode_texts(tokenizer, TEXTS, max_length=max_length, bos=bos)
    pairs = [eager_measures(model, ids, skip=skip) for ids in encoded]
    return {name: np.stack([m[name] for m, _ in pairs]) for name in MEASURES}, [m for _, m in pairs]


def assert_maps_close(left, right, names=("first_token_mass", "entropy"), tolerance=1e-5):
    for name in names:
        np.testing.assert_allclose(left[name], right[name], atol=tolerance, rtol=0, err_msg=name)


def test_a_map_is_the_mean_over_texts_of_each_texts_own_mean(diagnosis, language_model, tokenizer):
    values, _ = slow(language_model, tokenizer)
    for name in MEASURES:
        atol = 1e-5 if name.endswith("mass") else 1e-4 if "entropy" in name else 2e-3
        np.testing.assert_allclose(
            diagnosis.maps[name], values[name].mean(0), atol=atol, rtol=0, err_msg=name
        )
        np.testing.assert_allclose(
            diagnosis.spread[name], values[name].std(0, ddof=1), atol=atol, rtol=0, err_msg=name
        )


def test_the_profile_is_the_mean_mass_of_the_queries_in_a_bucket(
    diagnosis, language_model, tokenizer
):
    _, masses = slow(language_model, tokenizer)
    profile = diagnosis.profile
    assert profile.bucket_start[:4] == (0, 1, 2, 4)
    assert profile.bucket_stop[:4] == (1, 2, 4, 8)
    assert sum(profile.num_queries) == sum(mass.shape[-1] for mass in masses)
    got = profile.first_token_mass  # (layer, head, bucket)
    for bucket, (start, stop) in enumerate(
        zip(profile.bucket_start, profile.bucket_stop, strict=True)
    ):
        queries = np.concatenate([mass[..., start:stop] for mass in masses], -1)
        assert queries.shape[-1] == profile.num_queries[bucket]
        np.testing.assert_allclose(got[..., bucket], queries.mean(-1), atol=1e-5)
    np.testing.assert_allclose(got[..., 0], 1, atol=1e-6)  # query 0 sees only itself


def test_the_batch_size_does_not_matter(diagnosis, language_model, tokenizer):
    for size in (1, 6):
        again = diagnose(
            language_model, tokenizer, TEXTS, name="tiny/llama", max_length=200, batch_size=size
        )
        assert_maps_close(again.maps, diagnosis.maps, MEASURES, 2e-5)
        assert_maps_close(again.spread, diagnosis.spread, MEASURES, 2e-5)
        assert again.classes == diagnosis.classes


def test_one_text_has_no_spread(language_model, tokenizer):
    result = diagnose(language_model, tokenizer, TEXTS[:1])
    assert not any(value.any() for value in result.spread.values())


def test_the_same_inputs_give_the_same_bytes(diagnosis, language_model, tokenizer, tmp_path):
    again = diagnose(language_model, tokenizer, TEXTS, name="tiny/llama", max_length=200)
    first, second = diagnosis.save(tmp_path / "1.json"), again.save(tmp_path / "2.json")
    assert first.read_bytes() == second.read_bytes()


def test_a_saved_diagnosis_is_read_back_whole(diagnosis, tmp_path):
    path = diagnosis.save(tmp_path / "diagnosis.json")
    loaded = Diagnosis.load(path)
    assert loaded.to_json() == diagnosis.to_json()
    assert loaded.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    for name, value in diagnosis.maps.items():
        assert np.array_equal(loaded.maps[name], value)
    assert loaded.counts == diagnosis.counts
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ArtefactError, match="not a complete JSON file"):
        Diagnosis.load(path)


def test_the_artefact_holds_what_the_contract_promises(diagnosis, tmp_path):
    body = json.loads(diagnosis.save(tmp_path / "diagnosis.json").read_text())
    assert body["schema"] == "headwise.diagnosis/1"
    promised = {
        "first_token_mass",
        "entropy",
        "normalized_entropy",
        "local_mass",
        "output_norm",
        "output_norm_ratio",
        "constant_share",
        "value_norm_ratio",
    }
    assert promised <= set(body["maps"])
    assert promised <= set(body["spread"])
    for key in (
        "id",
        "fingerprint",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "positions",
        "num_parameters",
    ):
        assert key in body["model"], key
    for key in (
        "profile",
        "classes",
        "counts",
        "thresholds",
        "threshold_sweep",
        "sink_rate",
        "max_logit",
        "band",
        "mlp_dormancy",
        "provenance",
    ):
        assert key in body, key
    assert body["provenance"]["texts"]["sha256"] == TextSet("", tuple(TEXTS)).sha256
    assert set(body["provenance"]["versions"]) == {
        "headwise",
        "torch",
        "transformers",
        "numpy",
        "scipy",
    }
    assert body["provenance"]["settings"]["max_length"] == 200


def test_skipped_queries_are_left_out(language_model, tokenizer):
    values, masses = slow(language_model, tokenizer, skip=3)
    result = diagnose(language_model, tokenizer, TEXTS, max_length=200, skip_queries=3)
    for name in MEASURES:
        atol = 1e-5 if name.endswith("mass") else 1e-4 if "entropy" in name else 2e-3
        expected = values[name].mean(0)
        np.testing.assert_allclose(result.maps[name], expected, atol=atol, rtol=0, err_msg=name)
    assert result.profile.bucket_start == (2, 4, 8, 16, 32, 64, 128)
    assert result.profile.num_queries[0] == len(masses)  # query 3 of each text, not query 2
    with pytest.raises(TextError, match="at least 201 are needed"):
        diagnose(language_model, tokenizer, TEXTS, skip_queries=200)


def test_a_forced_bos_is_the_first_token(language_model, tokenizer):
    values, _ = slow(language_model, tokenizer, bos=True)
    result = diagnose(language_model, tokenizer, TEXTS, max_length=200, bos=True)
    expected = {name: value.mean(0) for name, value in values.items()}
    assert_maps_close(result.maps, expected, tolerance=1e-4)
    assert result.provenance.settings.bos is True


def test_a_bfloat16_model_is_measured_in_float32(language_model, tokenizer):
    """Two bf16 copies of one model agree to bf16's own error; entropy stays sane with ALiBi."""
    for name in ("llama", "bloom"):
        exact = tiny_language_model(name)
        half = tiny_language_model(name).to(torch.bfloat16)
        exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
        options = {"max_length": 200, "texts": TEXTS}
        left, right = (diagnose(m, tokenizer, **options) for m in (half, exact))
        assert left.model.dtype == "bfloat16"
        assert_maps_close(left.maps, right.maps, ("first_token_mass",), 0.02)
        assert_maps_close(left.maps, right.maps, ("entropy",), 0.05)


def test_classes_are_decided_in_order():
    mass = np.array([[0.951, 0.95, 0.501, 0.50], [0.50, 0.0, 0.96, 0.6]])
    entropy = np.array([[0.01, 0.01, 0.01, 0.499], [0.5, 3.0, 3.0, 3.0]])
    assert classify(mass, entropy, Thresholds()) == (
        ("dead", "sink", "sink", "low_entropy"),
        ("healthy", "healthy", "dead", "sink"),
    )
    assert classify(mass, None, Thresholds())[0][3] == "healthy"
    moved = classify(mass, entropy, Thresholds(dead=0.5, sink=0.4, low_entropy=5.0))
    assert moved == (("dead", "dead", "dead", "sink"), ("sink", "low_entropy", "dead", "dead"))


def synthetic(mass, **options):
    return diagnosis_from(
        model=made_model(*mass.shape),
        maps={"first_token_mass": mass},
        thresholds=Thresholds(),
        **options,
    )


def test_the_band_is_the_indices_sick_in_more_than_three_layers_of_ten():
    mass = np.zeros((10, 4))
    mass[2:5, 1] = 0.9  # 3 of 10: not more than 30%
    mass[2:6, 2] = 0.9
    mass[8, 3] = 0.99
    diagnosis = synthetic(mass)
    assert diagnosis.band == (2,)
    assert diagnosis.sick_share_by_index == (0, 0.3, 0.4, 0.1)
    assert diagnosis.counts == {
        "healthy": 32,
        "low_entropy": 0,
        "sink": 7,
        "dead": 1,
        "sick": 8,
        "total": 40,
    }
    assert diagnosis.band_heads == [Head(layer, 2) for layer in range(2, 9)]
    sets = diagnosis.head_sets()
    assert sets["dead"] == [Head(8, 3)]
    chosen = select_heads("sick - band", num_layers=10, num_heads=4, sets=sets)
    assert chosen == [Head(2, 1), Head(3, 1), Head(4, 1), Head(8, 3)]


def test_a_model_without_sick_heads_has_an_empty_band():
    diagnosis = synthetic(np.full((2, 3), 0.1))
    assert diagnosis.band == ()
    assert diagnosis.band_heads == []
    assert diagnosis.threshold_sweep.depth == 0


def test_densities_and_rank_correlations_are_those_of_scipy():
    values = np.random.default_rng(0).beta(0.4, 0.6, 48)
    grid = np.linspace(0, 1, 201)
    expected = stats.gaussian_kde(values)(grid)
    np.testing.assert_allclose(_density(values, grid), expected, rtol=1e-10)
    slopes, tied = np.geomspace(0.5, 0.004, 48), values.round(1)
    rho = stats.spearmanr(slopes, tied).statistic
    assert rank_correlation(slopes, tied) == pytest.approx(rho, abs=1e-12)


def test_the_sweep_counts_and_sees_a_valley_only_where_there_is_one():
    rng = np.random.default_rng(0)
    two = np.r_[rng.normal(0.1, 0.03, 200), rng.normal(0.9, 0.03, 200)].clip(0, 1).reshape(20, 20)
    sweep = threshold_sweep(two)
    assert sweep.counts == {"0.40": 200, "0.50": 200, "0.60": 200}
    assert sweep.share_between == 0
    assert sweep.depth > 0.9
    assert 0.3 < sweep.position < 0.7
    one = rng.normal(0.5, 0.1, 400).clip(0, 1).reshape(20, 20)
    assert threshold_sweep(one).depth < 0.3
    edges = threshold_sweep(np.array([[0.4, 0.41, 0.6, 0.61]]))
    assert edges.counts == {"0.40": 3, "0.50": 2, "0.60": 1}
    assert edges.share_between == 0.5


def test_the_sink_rate_counts_text_and_head_pairs(diagnosis, language_model, tokenizer):
    values, _ = slow(language_model, tokenizer)
    expected = (values["first_token_mass"] > 0.3).mean()
    assert diagnosis.sink_rate.epsilon == 0.3
    assert diagnosis.sink_rate.value == pytest.approx(expected)


@pytest.mark.parametrize("skip", [0, 4])
def test_the_positional_baseline_is_the_softmax_of_the_bias_alone(skip):
    slopes = alibi_slopes(tiny_model("bloom-6h")).double()
    lengths = [5, 60, 128]
    got = positional_baseline(slopes.numpy(), lengths, skip)
    masses, entropies = [], []
    for length in lengths:
        t = torch.arange(length)
        bias = (slopes[:, None] * t)[:, None].repeat(1, length, 1)
        p = bias.masked_fill(t[None, :] > t[:, None], -torch.inf).softmax(-1)
        masses.append(p[:, skip:, 0].mean(-1))
        entropies.append(torch.special.entr(p).sum(-1)[:, skip:].mean(-1))
    expected = {"first_token_mass": masses, "entropy": entropies}
    for name, values in expected.items():
        mean = torch.stack(values).mean(0).numpy()
        np.testing.assert_allclose(got[f"{name}_positional_baseline"], mean, rtol=1e-12)


def test_uniform_attention_has_the_harmonic_baseline():
    got = positional_baseline(np.zeros(1), [512])["first_token_mass_positional_baseline"]
    assert got == pytest.approx(np.mean(1 / np.arange(1, 513)))
    assert got == pytest.approx(0.013, abs=5e-4)  # the table in docs/method.md


def test_alibi_models_carry_slopes_and_others_the_uniform_baseline(diagnosis, tokenizer):
    bloom = diagnose(tiny_language_model("bloom-6h"), tokenizer, TEXTS[:2])
    assert bloom.maps["slope"].shape == (2, 6)
    assert (np.ptp(bloom.maps["slope"], axis=0) == 0).all()
    assert np.ptp(bloom.maps["first_token_mass_positional_baseline"][0]) > 0
    assert "slope" not in diagnosis.maps
    assert np.ptp(diagnosis.maps["first_token_mass_positional_baseline"]) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "opt", "bloom"])
def test_weight_dormancy_equals_a_naive_loop(name):
    model = tiny_model(name)
    reads, writes = {
        "llama": (["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj"),
        "gpt2": (["mlp.c_fc"], "mlp.c_proj"),
        "phi3": (["mlp.gate_up_proj"], "mlp.down_proj"),
        "opt": (["fc1"], "fc2"),
        "bloom": (["mlp.dense_h_to_4h"], "mlp.dense_4h_to_h"),
    }[name]
    layers = {"llama": "model.layers", "phi3": "model.layers", "opt": "model.decoder.layers"}
    blocks = model.get_submodule(layers.get(name, "transformer.h"))
    importances = []
    for block in blocks:
        ins = [block.get_submodule(path).weight.detach() for path in reads]
        out = block.get_submodule(writes).weight.detach()
        if name == "gpt2":
            ins, out = [weight.T for weight in ins], out.T
        width = out.shape[1]
        if name == "phi3":
            ins = [ins[0][:width], ins[0][width:]]
        for neuron in range(width):
            norms = [float(weight[neuron].norm()) for weight in ins]
            geometric = float(np.prod(norms)) ** (1 / len(norms))
            importances.append(geometric * float(out[:, neuron].norm()))
    cut = float(np.median(importances))
    result = weight_dormancy(model, cut)
    assert result.num_neurons == len(importances)
    assert result.num_dormant == sum(value < cut for value in importances)
    assert result.share == pytest.approx(result.num_dormant / len(importances))


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_activation_dormancy_equals_a_naive_loop_and_ignores_padding(name):
    model = tiny_model(name)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (50, 9)]
    blocks = {"llama": "model.layers", "opt": "model.decoder.layers", "gpt2": "transformer.h"}
    down = {"llama": "mlp.down_proj", "opt": "fc2", "gpt2": "mlp.c_proj"}
    totals = [torch.zeros(48) for _ in range(2)]
    handles = []
    for layer, block in enumerate(model.get_submodule(blocks[name])):

        def hook(_, inputs, layer=layer):
            totals[layer] += inputs[0].detach().abs().reshape(-1, 48).sum(0)

        handles.append(block.get_submodule(down[name]).register_forward_pre_hook(hook))
    for ids in texts:
        with torch.inference_mode():
            model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    tau = 0.8
    dormant = [(total <= tau * total.mean()).float().mean().item() for total in totals]
    result = activation_dormancy(model, batches(texts, 2), tau)
    assert result.share_by_layer == pytest.approx(dormant)
    assert 0 < result.share < 1


def test_texts_must_be_real_texts(language_model, tokenizer):
    for wrong in ([], "a string", ["fine", " "]):
        with pytest.raises(TextError, match="non-empty list of non-empty strings"):
            diagnose(language_model, tokenizer, wrong)


def test_a_model_that_overflows_is_told_by_head_and_text(tokenizer):
    model = tiny_language_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, 64:].fill_(float("inf"))
    encoded = encode_texts(tokenizer, TEXTS[:1], max_length=32)
    with pytest.raises(ModelError, match=r"of L1H0 on text 0 is not a finite number"):
        measure_heads(model, batches(encoded, 1))
    with pytest.raises(ModelError, match="own logits are NaN or infinite everywhere"):
        diagnose(model, tokenizer, TEXTS[:1])


def test_a_notebook_shows_the_grid_and_nothing_a_name_smuggles_in(diagnosis):
    hostile = replace(diagnosis, model=replace(diagnosis.model, id="<script>alert(1)</script>"))
    page = hostile._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page == grid_html(hostile)
    assert page.count("<td") == 8


def test_the_terminal_shows_every_head_and_every_count(diagnosis):
    grid = head_grid(diagnosis).plain
    assert len([line for line in grid.splitlines() if line.strip()[:1].isdigit()]) == 2
    table = rich_table(diagnosis_table(diagnosis))
    assert table.row_count >= 9


def test_a_pruned_head_has_numbers_like_any_other(tokenizer):
    """Pruned models hold zeros where a head was; its values' ratio would be 0 / 0."""
    model = tiny_language_model("llama")
    for role in "qkvo":
        for span in head_spans(model, Head(1, 0), role).values():
            span.of(model).data.zero_()
    found = diagnose(model, tokenizer, TEXTS, max_length=64)
    assert found.maps["value_norm_ratio"][1][0] == 0
    assert found.maps["output_norm"][1][0] == 0
    assert found.maps["value_norm_ratio"][0][0] > 0


def test_a_sink_on_another_token_is_a_symptom_and_says_where():
    maps = {
        "first_token_mass": np.array([[0.1, 0.6, 0.35, 0.1]]),
        "strongest_mass": np.array([[0.9, 0.6, 0.4, 0.1]]),
        "strongest_position": np.array([[1.0, 0.0, 0.0, 3.0]]),
        "normalized_entropy": np.array([[0.5, 0.4, 0.5, 0.99]]),
        "delimiter": np.array([[-0.1, 0.4, 0.6, 0.1]]),
    }
    found = diagnosis_from(model=made_model(1, 4), maps=maps, thresholds=Thresholds())
    named = {name: [str(head) for head in heads] for name, heads in found.symptoms.items() if heads}
    assert named == {
        "sink": ["L0H1"],
        "fixed sink": ["L0H0"],
        "flat": ["L0H3"],
        "delimiter sink": ["L0H2"],
        "drowsy": ["L0H1", "L0H2"],
    }
    assert found.sinks == {Head(0, 0): 1}
    assert found.head_sets()["ill"] == [Head(0, index) for index in range(4)]
    assert found.head_sets()["sick"] == [Head(0, 1)]
    assert make_plan(found, heads="ill").sink_positions == {Head(0, 0): 1}
