"""Perplexity, ablation, recovery, dormancy and intervals, each against its plain definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conftest import SENTENCES, tiny_language_model, tiny_model, tiny_tokenizer
from headwise.diagnosis.values import Diagnosis, Thresholds, diagnosis_from
from headwise.errors import ArtefactError, TextError
from headwise.forward.first_order import first_order_costs, first_order_importance
from headwise.forward.hooked_pass import HookedPass, shared_batches
from headwise.forward.interventions import ZERO, Variant, mean_output, patched_queries
from headwise.forward.mean_outputs import measure_means
from headwise.forward.variant_losses import head_costs, variant_losses
from headwise.heads import Head, all_heads
from headwise.intervals import DRAWS, Interval, draw_documents, mean_interval, mean_intervals
from headwise.models.architectures import (
    architecture_of,
    backbone_of,
    geometry_of,
    layers_of,
    projection_of,
)
from headwise.models.loaded_model import LoadedModel
from headwise.proof.compare import paired_losses
from headwise.proof.evaluate import ablated_sets, evaluate, paper_prompts
from headwise.proof.perplexity import make_windows, text_losses
from headwise.proof.values import Evaluation, HeadCost, HeadCosts, recovery_of
from headwise.surgery.operation import operate
from headwise.surgery.plan import operated_heads
from headwise.surgery.treatments import Dose, treat
from headwise.texts import batches as batches_module
from headwise.texts.batches import batches
from headwise.texts.text_sets import TextSet
from neurons import activation_dormancy, weight_dormancy
from planned import (
    ablate_sets,
    made_model,
    patched_with,
    plan_for,
    random_ids,
    small_texts,
    weight_bits,
)

THREE = ("llama", "bloom", "gpt2")
TEXTS = TextSet("five", SENTENCES)
ENCODED = [random_ids(n, seed) for seed, n in enumerate((30, 24, 24, 11))]


@pytest.fixture(scope="module", params=THREE)
def speaker(request):
    return tiny_language_model(request.param)


@pytest.fixture(scope="module", params=["bloom", "llama", "gpt_neox"])
def ablated(request):
    return tiny_model(request.param)


@torch.inference_mode()
def hf_loss(model, ids):
    ids = torch.tensor([ids])
    return float(model(ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1)


def test_perplexity_equals_a_plain_loop_with_transformers_loss(speaker, tokenizer):
    encoded = [tokenizer(text)["input_ids"] for text in SENTENCES]
    expected = [hf_loss(speaker, ids) for ids in encoded]
    found = text_losses(speaker, tokenizer, TEXTS, max_length=512, batch_size=3)
    assert found.document_loss_sums == pytest.approx(expected, rel=1e-5)
    assert list(found.document_tokens) == [len(ids) - 1 for ids in encoded]
    total = sum(len(ids) - 1 for ids in encoded)
    assert found.predicted_tokens == total
    assert found.loss.value == pytest.approx(sum(expected) / total, rel=1e-5)
    assert found.perplexity.value == pytest.approx(math.exp(sum(expected) / total), rel=1e-5)
    assert found.loss.low < found.loss.value < found.loss.high


@pytest.mark.parametrize("batch_size", [1, 4])
def test_batching_does_not_change_perplexity(tokenizer, batch_size):
    model = tiny_language_model("bloom")
    one = text_losses(model, tokenizer, TEXTS, batch_size=5)
    other = text_losses(model, tokenizer, TEXTS, batch_size=batch_size)
    assert one.document_loss_sums == pytest.approx(other.document_loss_sums, rel=1e-5)


def strided_loss(model, ids, window, stride):
    """Every token once, in the first window that holds it, with HF logits."""
    total, scored, start = 0.0, 1, 0
    while scored < len(ids):
        part = torch.tensor([ids[start : start + window]])
        with torch.inference_mode():
            log_p = model(part, use_cache=False).logits[0].log_softmax(-1)
        for target in range(scored, min(start + window, len(ids))):
            total -= float(log_p[target - start - 1, ids[target]])
        scored = min(start + window, len(ids))
        start += stride
    return total


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 4), (10, 9)])
def test_long_texts_are_scored_with_a_stride(speaker, tokenizer, window, stride):
    found = text_losses(speaker, tokenizer, TEXTS, max_length=window, stride=stride, batch_size=3)
    encoded = [tokenizer(text)["input_ids"] for text in SENTENCES]
    expected = [strided_loss(speaker, ids, window, stride) for ids in encoded]
    assert found.document_loss_sums == pytest.approx(expected, rel=1e-5)
    assert list(found.document_tokens) == [len(ids) - 1 for ids in encoded]


def test_whole_texts_are_evaluated_in_windows_and_heads_on_the_first(speaker, tokenizer):
    options = {"max_length": 16, "heads": "none", "paper": False}
    cut = evaluate(speaker, tokenizer, [TEXTS], **options)
    whole = evaluate(speaker, tokenizer, [TEXTS], whole=True, **options)
    encoded = [tokenizer(text)["input_ids"] for text in SENTENCES]
    expected = [strided_loss(speaker, ids, 16, 8) for ids in encoded]
    found = whole.text_sets["five"]
    assert found.document_loss_sums == pytest.approx(expected, rel=1e-5)
    assert found.document_tokens == tuple(len(ids) - 1 for ids in encoded)
    assert cut.text_sets["five"].document_tokens == (15,) * len(encoded)
    assert np.array_equal(whole.diagnosis.maps["entropy"], cut.diagnosis.maps["entropy"])
    with pytest.raises(ArtefactError, match="other parts of the text set"):
        paired_losses(cut, whole)


def test_windows_share_the_forward_passes_of_the_heads(tokenizer):
    model = tiny_language_model("llama")
    passes = []
    for length in (16, 512):  # 16: every text has a second window, 512: none has
        count = []
        with model.model.register_forward_pre_hook(lambda *_, seen=count: seen.append(1)):
            options = {"max_length": length, "heads": "none", "batch_size": len(SENTENCES)}
            evaluate(model, tokenizer, [TEXTS], whole=True, paper=False, **options)
        passes.append(len(count))
    windows = make_windows([tokenizer(text)["input_ids"] for text in SENTENCES], 16, 8)
    assert passes[0] - passes[1] == -(-(len(windows) - len(SENTENCES)) // len(SENTENCES))


@pytest.mark.parametrize("window", [2, 5, 8])
@pytest.mark.parametrize("stride", [1, 2, 4, 5, 8, 11])
def test_each_token_is_predicted_exactly_once(window, stride):
    encoded = [list(range(n)) for n in (2, 3, 7, 8, 9, 16, 17, 40)]
    windows = make_windows(encoded, window, stride)
    predicted = {number: [] for number in range(len(encoded))}
    for piece, number, ignored in windows:
        assert 0 <= ignored < len(piece)
        assert len(piece) <= window
        predicted[number] += piece[1 + ignored :]
    assert all(predicted[i] == ids[1:] for i, ids in enumerate(encoded))


def test_paired_differences_are_of_the_same_tokens(tokenizer):
    model = tiny_language_model("bloom")
    before = text_losses(model, tokenizer, TEXTS)
    patch = operate(model, plan_for(model))
    patch.apply(model)
    after = text_losses(model, tokenizer, TEXTS)
    patch.undo(model)
    found = after.minus(before)
    expected = after.loss.value - before.loss.value
    assert found.value == pytest.approx(expected)
    assert found.low <= found.value <= found.high
    assert before.minus(before) == Interval(0.0, 0.0, 0.0)


def brute_force(model, encoded, heads, means=None):
    """Loss sums of each text by a full forward pass, the heads' outputs replaced by hand."""
    dim, handles = geometry_of(model).head_dim, []
    for head in heads:

        def swap(_, inputs, head=head):
            out = inputs[0].clone()
            value = 0 if means is None else means[head.layer, head.index]
            out[..., head.index * dim : (head.index + 1) * dim] = value
            return (out, *inputs[1:])

        handles.append(projection_of(model, head.layer, "o").register_forward_pre_hook(swap))
    try:
        return np.array([hf_loss(model, ids) for ids in encoded])
    finally:
        for handle in handles:
            handle.remove()


SETS = [[head] for head in all_heads(2, 4)] + [
    [Head(0, 1), Head(0, 3)],
    [Head(0, 0), Head(1, 2)],
    all_heads(2, 4),
]


@pytest.mark.parametrize("replacement", ["zero", "mean"])
def test_ablation_equals_brute_force(ablated, replacement):
    means = measure_means(ablated, batches(ENCODED, 4)) if replacement == "mean" else None
    kind = ZERO if means is None else mean_output(ablated, means)
    found = ablate_sets(ablated, ENCODED, SETS, kind, batch_size=3, stack=3)
    base = brute_force(ablated, ENCODED, [])
    assert found.base == pytest.approx(base, rel=1e-5)
    assert found.tokens.tolist() == [len(ids) - 1 for ids in ENCODED]
    for heads, deltas in zip(SETS, found.deltas, strict=True):
        expected = brute_force(ablated, ENCODED, heads, means) - base
        a_token = np.abs(deltas - expected).max() / max(map(len, ENCODED))
        assert a_token < 1e-5, heads
    assert np.abs(found.deltas).max() > 0.1


def test_neither_stack_nor_batch_size_changes_an_ablation(ablated):
    small = ablate_sets(ablated, ENCODED, SETS[:6], batch_size=1, stack=1)
    large = ablate_sets(ablated, ENCODED, SETS[:6], batch_size=4, stack=8)
    assert small.deltas == pytest.approx(large.deltas, abs=1e-4)


def test_ablation_on_every_row_equals_brute_force(model):
    heads = [Head(0, 1)], [Head(1, 2)]
    found = ablate_sets(model, ENCODED[:2], heads)
    base = brute_force(model, ENCODED[:2], [])
    for index, chosen in enumerate(heads):
        expected = brute_force(model, ENCODED[:2], chosen) - base
        assert np.abs(found.deltas[index] - expected).max() / 30 < 2e-5


def test_half_precision_does_not_subtract_near_equal_numbers(monkeypatch):
    """A dominant head's share is all of a rounded sum: the rest would be rounding alone."""
    import headwise.forward.variant_losses as engine

    def subtracted(*_):
        raise AssertionError("a difference was taken in bfloat16")

    monkeypatch.setattr(engine, "corrected_attention", subtracted)
    model = tiny_model("gemma2").to(torch.bfloat16)
    try:
        assert np.isfinite(ablate_sets(model, ENCODED[:2], SETS[:2]).deltas).all()
    finally:
        model.to(torch.float32)
    with pytest.raises(AssertionError, match="bfloat16"):
        ablate_sets(model, ENCODED[:2], SETS[:2])


def test_the_first_order_estimate_is_the_derivative_by_each_heads_gate(ablated):
    model = ablated.double()
    try:
        found = first_order_importance(model, ENCODED, batch_size=3)
        tokens = sum(len(ids) - 1 for ids in ENCODED)
        for head in (Head(0, 0), Head(0, 3), Head(1, 1)):
            losses = [gated_loss(model, head, 1 + step) for step in (-1e-2, 1e-2)]
            expected = (losses[0] - losses[1]) / 2e-2 / tokens  # minus the derivative
            assert found[head.layer, head.index] == pytest.approx(expected, rel=1e-2, abs=1e-5)
    finally:
        ablated.float()


def gated_loss(model, head, gate):
    dim = geometry_of(model).head_dim

    def scale(_, inputs):
        out = inputs[0].clone()
        out[..., head.index * dim : (head.index + 1) * dim] *= gate
        return (out, *inputs[1:])

    handle = projection_of(model, head.layer, "o").register_forward_pre_hook(scale)
    try:
        return sum(hf_loss(model, ids) for ids in ENCODED)
    finally:
        handle.remove()


def simulated_coverage(lengths, cases=1000, draws=600, seed=0):
    """Share of cases whose 95% interval of the paired mean difference holds the true value."""
    rng = np.random.default_rng(seed)
    truth, documents = 0.02, len(lengths)
    effects = truth + 0.1 * rng.standard_normal((cases, documents))  # a document's own difference
    noise = rng.standard_normal((cases, documents)) / np.sqrt(lengths)
    sums = (effects + noise) * lengths
    inside = 0
    weights = draw_documents(documents, seed=seed, draws=draws)
    ratios = sums @ weights.T / (weights @ lengths)
    low, high = np.quantile(ratios, [0.025, 0.975], axis=1)
    inside = ((low <= truth) & (truth <= high)).mean()
    found = mean_interval(sums[0], lengths, seed=seed, draws=draws)
    assert (found.low, found.high) == pytest.approx((low[0], high[0]))  # it is our interval
    return inside


@pytest.mark.parametrize("equal", [True, False], ids=["equal-lengths", "unequal-lengths"])
def test_the_paired_bootstrap_covers_the_truth(equal):
    rng = np.random.default_rng(1)
    lengths = np.full(100, 200) if equal else rng.integers(20, 500, size=100)
    assert 0.93 <= simulated_coverage(lengths) <= 0.97


def test_intervals_are_deterministic_and_rows_share_their_draws():
    rng = np.random.default_rng(0)
    sums, counts = rng.normal(size=(3, 20)), rng.integers(5, 50, size=20)
    rows = mean_intervals(sums, counts)
    assert rows == mean_intervals(sums, counts)
    for row, values in zip(rows, sums, strict=True):
        single = mean_interval(values, counts)
        assert (row.value, row.low, row.high) == pytest.approx(
            (single.value, single.low, single.high)
        )
    weights = draw_documents(20, seed=0)
    assert weights.shape == (DRAWS, 20)
    assert (weights.sum(1) == 20).all()


def diagnosed_as(label):
    maps = {"first_token_mass": np.zeros((1, 2))}
    return Diagnosis(made_model(1, 2), maps, classes=(("healthy", label),))


def recovered(label, low, documents=8, stock="sink"):
    """The recovery of L0H1 with this class, whose zero ablation costs `low` or more."""
    costs = {} if low is None else {"L0H1": HeadCost(low + 1, low, low + 2, ("L0H1",))}
    operated = operated_heads([patched_with(layers=1, heads=2, targets="L0H1")])
    now, before = diagnosed_as(label), diagnosed_as(stock)
    return recovery_of(before, now, HeadCosts(documents, costs, {}), operated)


@pytest.mark.parametrize(
    ("label", "low", "functional"),
    [
        ("healthy", 0.001, True),
        ("low_entropy", 0.001, False),  # not sick, but ill
        ("healthy", -0.001, False),  # it may be worth nothing
        ("healthy", 0.0, False),
        ("sink", 0.5, False),  # useful, but sick
        ("dead", 0.5, False),
        ("healthy", None, False),  # not ablated: nothing is claimed
    ],
)
def test_functional_recovery_needs_both_health_and_use(label, low, functional):
    found = recovered(label, low)
    assert found.operated == 1
    assert found.functional == int(functional)
    assert found.exceptions == (() if functional else ("L0H1",))
    assert found.not_sick == int(label not in ("sink", "dead"))
    assert found.heads["L0H1"].useful == (None if low is None else low > 0)


@pytest.mark.parametrize(("low", "documents"), [(0.5, 1), (None, 8)])
def test_a_head_without_an_interval_is_not_judged(low, documents):
    found = recovered("healthy", low, documents)
    assert (found.judged, found.functional) == (0, 0)
    assert found.heads["L0H1"].useful is None


def test_a_head_that_costs_no_more_than_in_stock_is_not_recovered():
    """It cost 0.147 in stock and 0.119 afterwards, and was called recovered, in green."""
    one = Interval(0.1, 0.05, 0.15)
    found = recovered("healthy", 0.1)
    assert found.candidates == ["L0H1"]
    fell = found.with_rises({"L0H1": Interval(-0.028, -0.05, 0.01)}, (one, one, one))
    assert (fell.functional, fell.exceptions) == (0, ("L0H1",))
    assert fell.heads["L0H1"].outcome == "no more use than in stock"
    rose = found.with_rises({"L0H1": Interval(0.02, 0.01, 0.03)}, (one, one, one))
    assert rose.functional == 1
    assert rose.joint_now == one


def test_without_an_operation_there_is_no_recovery():
    well = diagnosed_as("healthy")
    assert recovery_of(well, well, HeadCosts(8, {}, {}), []) is None


@pytest.mark.parametrize(("label", "outcome"), [("healthy", "unchanged"), ("dead", "harmed")])
def test_a_head_that_was_never_sick_cannot_recover(label, outcome):
    found = recovered(label, 0.5, stock="healthy")
    assert (found.was_sick, found.judged, found.functional) == (0, 0, 0)
    assert found.heads["L0H1"].outcome == outcome
    assert found.harmed == int(outcome == "harmed")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (0.4, 0.1, "recovered"),  # drowsy in stock: ill, though not sick
        (0.4, 0.35, "still ill"),
        (0.9, 0.4, "still ill"),  # not sick any more, but drowsy
        (0.1, 0.4, "harmed"),
        (0.1, 0.1, "unchanged"),
    ],
)
def test_recovery_asks_for_any_symptom_not_for_mass_above_a_half(before, after, outcome):
    def diagnosed(mass):
        maps = {"first_token_mass": np.array([[0.1, mass]])}
        return diagnosis_from(model=made_model(1, 2), maps=maps, thresholds=Thresholds())

    costs = HeadCosts(8, {"L0H1": HeadCost(0.2, 0.1, 0.3, ("L0H1",))}, {})
    found = recovery_of(diagnosed(before), diagnosed(after), costs, [Head(0, 1)])
    row = found.heads["L0H1"]
    assert row.outcome == outcome
    assert found.functional == (outcome == "recovered")
    assert (row.was_sick, row.sick) == (before > 0.5, after > 0.5)
    assert (row.was_ill, row.ill) == (before > 0.3, after > 0.3)


def test_activation_dormancy_equals_the_naive_count(model):
    encoded = [random_ids(n, n) for n in (20, 7)]
    row = architecture_of(model)
    seen = {layer: [] for layer in range(2)}
    handles = []
    for layer, module in enumerate(layers_of(model)):

        def keep(_, inputs, layer=layer):
            flat = inputs[0].detach().double().abs()
            seen[layer].append(flat.reshape(-1, flat.shape[-1]))

        handles.append(module.get_submodule(row.mlp_out).register_forward_pre_hook(keep))
    try:
        with torch.inference_mode():
            for ids in encoded:
                model(torch.tensor([ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found = activation_dormancy(model, batches(encoded, 2), tau=0.4)
    shares = []
    for layer in range(2):
        mean = torch.cat(seen[layer]).mean(0)
        shares.append(float((mean <= 0.4 * mean.mean()).double().mean()))
    assert found.share_by_layer == pytest.approx(shares)
    assert found.num_neurons == 2 * mean.numel()


def test_training_attention_cannot_change_weight_dormancy():
    model = tiny_model("bloom")
    before = weight_dormancy(model)
    patch = operate(model, plan_for(model, "all"))
    patch.apply(model)
    assert weight_dormancy(model) == before
    patch.undo(model)


@pytest.fixture(scope="module")
def evaluated(tokenizer):
    model = tiny_language_model("bloom")
    plan = plan_for(model, "L0H1,L1H2")
    before = weight_bits(model)
    done = evaluate(
        model,
        tokenizer,
        [TEXTS, paper_prompts()],
        name="tiny",
        patches=[operate(model, plan)],
        adaptive=False,
        max_length=32,
    )
    assert weight_bits(model) == before  # the patch was on it only while it was evaluated
    return done


def test_an_evaluation_holds_what_compare_needs_and_survives_its_file(evaluated, tmp_path):
    assert set(evaluated.text_sets) == {"five", "paper-appendix-a"}
    assert evaluated.text_sets["paper-appendix-a"].documents == 12
    assert len(evaluated.heads.ablation_zero) == 8 + 1
    assert {"joint:operated", "L0H1"} <= set(evaluated.heads.ablation_mean)
    assert -1 <= evaluated.heads.first_order.spearman_with_exact <= 1
    assert evaluated.recovery.operated == 2
    # silenced heads are worth nothing, so a sham never counts as functional
    assert evaluated.recovery.functional == 0
    # and the same documents say what the two heads were worth in stock, and what the patch costs
    joint = evaluated.recovery
    assert joint.joint_now.value == pytest.approx(0, abs=1e-6)
    assert joint.joint_rise.value == pytest.approx(joint.joint_now.value - joint.joint_stock.value)
    assert set(evaluated.against_stock) == set(evaluated.text_sets)
    assert evaluated.heads.ablation_zero["L0H1"].value == pytest.approx(0, abs=1e-6)
    path = evaluated.save(tmp_path / "evaluation.json")
    again = Evaluation.load(path)
    assert again.text_sets == evaluated.text_sets
    assert again.diagnosis.counts == evaluated.diagnosis.counts
    perplexity = again.text_sets["five"].perplexity
    assert perplexity.low <= perplexity.value
    first = path.read_bytes()
    assert evaluated.save(path).read_bytes() == first
    assert again.save(path).read_bytes() == first


def test_the_seed_of_an_evaluation_is_the_bootstraps(tokenizer):
    model = tiny_language_model("bloom")
    found = [
        evaluate(
            model, tokenizer, [TEXTS], heads=[Head(0, 1)], adaptive=False, max_length=32, seed=seed
        )
        for seed in (0, 7)
    ]
    assert [one.provenance.settings.seed for one in found] == [0, 7]
    for left, right in (
        [one.text_sets["five"].loss for one in found],
        [one.heads.ablation_zero["L0H1"] for one in found],
    ):
        assert left.value == right.value
        assert left.low != right.low


def test_which_heads_are_ablated():
    loaded = LoadedModel("tiny", tiny_model("bloom"), tiny_tokenizer())
    one, operated = [Head(0, 1)], {"joint:operated": (Head(0, 1),)}
    every = {str(head): (head,) for head in all_heads(2, 4)}
    assert ablated_sets(loaded, None, None, one) == every | operated
    assert ablated_sets(loaded, "none", None, one) == operated
    chosen = {"L1H0": (Head(1, 0),), "L1H1": (Head(1, 1),)}
    assert ablated_sets(loaded, "L1H0-1", None, []) == chosen
    assert ablated_sets(loaded, [], {"pair": one, "none": []}, one) == {"joint:pair": tuple(one)}


def test_evaluating_on_nothing_is_an_error(tokenizer):
    with pytest.raises(TextError, match="no text to evaluate on"):
        evaluate(tiny_model("bloom"), tokenizer, [])


def test_a_first_order_cost_is_the_exact_one_where_little_changes(ablated):
    heads, plan = [Head(0, 2), Head(1, 1)], plan_for(ablated, "L0H2,L1H1", kv_policy="queries-only")
    model = ablated.double()
    try:
        given = dict.fromkeys(heads, Dose("temper", 0.98))
        kinds = [ZERO, patched_queries(model, "temper", treat(model, plan, given))]
        estimates = first_order_costs(model, ENCODED, heads, kinds)
        exact = head_costs(model, ENCODED, heads, kinds)
        np.testing.assert_allclose(estimates[:, 1], exact[:, 1], rtol=0.1, atol=1e-4)
        assert np.abs(exact[:, 1]).max() > 3e-4
        gone = estimates[:, 0].sum(1) / sum(len(ids) - 1 for ids in ENCODED)
        expected = first_order_importance(model, ENCODED)
        np.testing.assert_allclose(gone, [expected[h.layer, h.index] for h in heads], rtol=1e-4)
    finally:
        ablated.float()


def counted_passes(model, work):
    """How many batches go through the model, whatever for."""
    sizes = []
    hook = backbone_of(model).register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])),
        with_kwargs=True,
    )
    try:
        work()
    finally:
        hook.remove()
    return len(sizes)


@pytest.mark.parametrize("more", [0, 4])
def test_losses_diagnosis_means_and_dormancy_share_one_pass_of_every_text(
    tokenizer, monkeypatch, more
):
    """Of 29 passes on twelve texts 17 are left, and the induction probe of the roles is one."""
    model, read = tiny_language_model("bloom"), []
    sets = [small_texts(12), TextSet("more", small_texts(12 + more).texts[8:])]
    token_ids = batches_module.token_ids

    def counted(*args, **options):
        read.append(args[1])
        return token_ids(*args, **options)

    monkeypatch.setattr(batches_module, "token_ids", counted)
    passes = counted_passes(
        model,
        lambda: evaluate(
            model, tokenizer, sets, heads="none", max_length=32, batch_size=4, bos=False
        ),
    )
    guard, batches_of_judged, gradients, probe = 2, 3, 12, 1
    assert passes == guard + batches_of_judged + more // 4 + gradients + probe
    assert sorted(read) == sorted(small_texts(12 + more).texts)  # each text is tokenised once


def test_zero_and_mean_ablation_share_their_base_pass():
    model, kinds = tiny_model("bloom"), [ZERO]
    kinds.append(mean_output(model, measure_means(model, batches(ENCODED, 4))))
    variants = [Variant((Head(1, 0),), kind) for kind in kinds]
    passes = counted_passes(model, lambda: variant_losses(model, ENCODED, variants))
    assert passes == 2 * len(ENCODED)  # the model as it is, then both variants stacked


def test_a_shared_batch_keeps_the_order_of_every_pass():
    ids = [torch.full((1, 2), n) for n in range(4)]
    first = HookedPass([ids[0], ids[1], ids[1]], take=lambda *_: None)
    second = HookedPass([ids[2], ids[1], ids[0], ids[3]], take=lambda *_: None)
    shared = shared_batches([first, second])
    for one in (first, second):
        met = [(n, batch.ids) for batch in shared for owner, n in batch.seen_by if owner is one]
        assert [n for n, _ in met] == list(range(len(one.ids)))
        assert all(torch.equal(found, one.ids[n]) for n, found in met)
    assert len(shared) == 6  # ids[1] once for both; ids[0] again, since it comes after it
