"""Treatments: every row does what it says, to its own slices, and can be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import tiny_model
from headwise.errors import SelectionError
from headwise.forward.interventions import ZERO, mean_output
from headwise.forward.mean_outputs import measure_means
from headwise.forward.tap import tapped
from headwise.heads import Head
from headwise.models.patch import Patch, Slice
from headwise.models.slices import head_spans, read_slices
from headwise.models.values import PatchInfo
from headwise.surgery.operation import healthy_std, operate, plan_spans
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import (
    TREATMENTS,
    Dose,
    head_slices,
    retire,
    treat,
    treatment_named,
    with_slopes,
)
from headwise.texts.batches import batches
from planned import ablate_sets, plan_for, random_batch, random_ids, weight_bits

FAMILIES = ("bloom", "llama", "gpt2", "qwen3")
HEADS = "L0H1,L1H0-1"  # in the grouped families L1H0-1 is a whole group, L0H1 is not
BLOCKS = [random_batch(seed=seed) for seed in range(4)]


@pytest.fixture(scope="module", params=FAMILIES)
def patient(request):
    model = tiny_model(request.param)
    directions = measure_directions(model, BLOCKS, (0, 1))
    return model, plan_for(model, HEADS), with_slopes(directions, model, BLOCKS, (0, 1))


def treated(patient, name, amount=None):
    model, plan, directions = patient
    dose = Dose(name, treatment_named(name).dose if amount is None else amount)
    return treat(model, plan, dict.fromkeys(plan.target_heads, dose), directions=directions)


def queries(model, head, blocks=BLOCKS):
    """The queries of a head as the projection gives them, all but the first of each text."""
    found = []
    span = next(iter(head_spans(model, head, "q").values()))
    module = model.get_submodule(span.parameter.rpartition(".")[0])

    def keep(_, args, output):
        found.append(output)

    handle = module.register_forward_hook(keep)
    with torch.no_grad():
        for block in blocks:
            model.base_model(input_ids=block.ids, use_cache=False)
    handle.remove()
    rows = [
        out[i, 1:n, span.start : span.stop]
        for out, block in zip(found, blocks, strict=True)
        for i, n in enumerate(block.lengths)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("name", sorted(TREATMENTS))
def test_a_treatment_writes_only_the_slices_of_its_row_and_is_undone_bit_for_bit(patient, name):
    model, plan, _ = patient
    patch = treated(patient, name)
    before = weight_bits(model)
    changed = {n for n, part in patch.slices.items() if not torch.equal(part.before, part.after)}
    roles = {n.rsplit(".", 1)[1][0] for n in changed}
    assert roles <= set(TREATMENTS[name].writes)
    idle = TREATMENTS[name].preserves_function or name == "regrow"  # nothing decayed here
    assert bool(changed) != idle
    biases = {n for n in patch.slices if n.endswith(".o_bias")}
    assert set(patch.slices) - biases == set(plan_spans(model, plan))
    patch.apply(model)
    patch.undo(model)
    assert weight_bits(model) == before


def test_release_leaves_queries_no_part_along_the_pull_of_the_first_key(patient):
    model, _, directions = patient
    head = Head(1, 0)
    u = directions[1].sink[0]
    whole = queries(model, head) @ u
    with treated(patient, "release", 1.0).applied(model):
        assert (queries(model, head) @ u).abs().max() < 1e-4 * whole.abs().max()
    part = treat(
        model,
        patient[1],
        {head: Dose("release", 0.25)},
        directions=directions,
    )
    with part.applied(model):
        torch.testing.assert_close(queries(model, head) @ u, 0.75 * whole, rtol=1e-3, atol=1e-4)


def test_centre_takes_away_the_mean_query_and_keeps_what_varies(patient):
    model, plan, directions = patient
    head = plan.target_heads[0]  # in the lowest layer: its inputs stay what they were
    before = queries(model, head)
    with treated(patient, "centre").applied(model):
        after = queries(model, head)
    assert after.mean(0).norm() < 0.02 * before.mean(0).norm()
    assert (after - after.mean(0)).norm() > 0.5 * (before - before.mean(0)).norm()
    u = directions[0].sink[head.index]
    with treated(patient, "centre-sink").applied(model):
        along = queries(model, head) @ u
    assert along.mean().abs() < 0.02 * (before @ u).mean().abs() + 1e-4


def test_evict_makes_the_first_key_like_the_others_and_only_in_whole_groups(patient):
    model, _, directions = patient
    patch = treated(patient, "evict")
    keys = [n for n, part in patch.slices.items() if not torch.equal(part.before, part.after)]
    assert all(n.rsplit(".", 1)[1][0] == "k" for n in keys)
    assert not any(n.startswith("L0KV") for n in keys)  # L0H1 shares its group with L0H0
    head, found = Head(1, 0), directions[1]
    with patch.applied(model):
        slices = head_slices(model, head, "k")
    bias = slices.get("k_bias", torch.zeros(()))
    first = slices["k"] @ found.sink_input[0] + bias
    other = slices["k"] @ found.mean_input + bias
    gap = found.key_gap[0]
    assert (first - other).norm() < 0.02 * gap.norm()


def test_temper_scales_queries_and_none_leaves_the_function_alone(patient):
    model = patient[0]
    head = Head(0, 1)
    before = queries(model, head)
    with treated(patient, "temper", 0.5).applied(model):
        torch.testing.assert_close(queries(model, head), before * 0.5)
    with treated(patient, "none").applied(model):
        assert torch.equal(queries(model, head), before)


def test_donor_gives_the_queries_of_the_nearest_healthy_head(patient):
    model, plan, _ = patient
    patch = treated(patient, "donor", 0.0)
    with patch.applied(model):
        given = head_slices(model, Head(0, 1), "q")
    assert torch.equal(given["q"], head_slices(model, Head(0, 0), "q")["q"])
    assert Head(0, 0) in plan.healthy_heads


def test_shrink_perturb_keeps_its_dose_of_the_weight(patient):
    model = patient[0]
    before = head_slices(model, Head(0, 1), "q")["q"]
    with treated(patient, "shrink-perturb", 1.0).applied(model):
        assert torch.equal(head_slices(model, Head(0, 1), "q")["q"], before)
    with treated(patient, "shrink-perturb", 0.5).applied(model):
        after = head_slices(model, Head(0, 1), "q")["q"]
    kept = float((after * before).sum() / before.square().sum())
    assert 0.3 < kept < 0.7


def test_reinitialise_is_the_surgery(patient):
    model, plan, _ = patient
    left, right = treated(patient, "reinitialise"), operate(model, plan)
    assert left.slices.keys() == right.slices.keys()
    assert all(torch.equal(left.slices[n].after, right.slices[n].after) for n in left.slices)


def test_a_head_is_treated_the_same_whichever_heads_are_treated_with_it(patient):
    model, plan, directions = patient
    head = Head(0, 1)
    for name in sorted(TREATMENTS):
        alone = treat(model, plan, {head: Dose(name, 0.7)}, directions=directions)
        assert torch.equal(
            alone.slices["L0H1.q"].after, treated(patient, name, 0.7).slices["L0H1.q"].after
        ), name


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("family", ["bloom", "gpt2", "mpt", "falcon-alibi"])
def test_without_rotation_the_pull_is_the_key_of_the_sink_minus_the_others(family, at):
    model = tiny_model(family)
    seen = {}
    block = random_batch(lengths=(24,))
    with (
        torch.no_grad(),
        tapped(model, lambda attention: seen.update({attention.layer: attention.scores.k})),
    ):
        model.base_model(input_ids=block.ids, use_cache=False)
    k = seen[0][0].double()
    gaps = torch.zeros_like(k[:, 0])
    for query in range(at + 1, 24):
        others = [key for key in range(query + 1) if key != at]
        gaps += k[:, at] - k[:, others].mean(1)
    expected = torch.nn.functional.normalize(gaps, dim=1).float()
    sinks = {Head(0, index): at for index in range(4)}
    found = measure_directions(model, [block], (0,), sinks)[0]
    torch.testing.assert_close(found.sink, expected, rtol=1e-3, atol=1e-4)
    elsewhere = measure_directions(model, [block], (0,))[0]
    assert torch.equal(found.parked_query, elsewhere.parked_query)  # parked at the first token


def test_seek_goes_down_the_slope_of_the_loss_by_the_queries(patient):
    """The slope is autograd's own, and a small step down lowers the loss by as much as it says."""
    model, plan, directions = patient
    head = plan.target_heads[-1]
    spans = {n: s for n, s in head_spans(model, head, "q").items() if n.endswith(".q")}
    [span] = spans.values()

    def loss():
        return sum(
            model(block.ids, labels=labels(block)).loss * (block.lengths - 1).sum()
            for block in BLOCKS
        )

    parameter = model.get_parameter(span.parameter)
    with torch.enable_grad():
        parameter.requires_grad_(True)
        [slope] = torch.autograd.grad(loss(), parameter)
        parameter.requires_grad_(False)
    own = slope.narrow(span.axis, span.start, span.stop - span.start)
    measured = directions[head.layer].query_slope[head.index]
    assert torch.allclose(measured if own.shape == measured.shape else measured.T, own, atol=1e-4)
    patch = treat(model, plan, {head: Dose("seek", 0.001)}, directions=directions)
    step = next(p.after - p.before for n, p in patch.slices.items() if n in spans)
    with torch.no_grad():
        before = float(loss())
        with patch.applied(model):
            after = float(loss())
    assert float((step * own).sum()) < 0
    assert after - before < 0.5 * float((step * own).sum())


def labels(block):
    ids = block.ids.clone()
    ids[torch.arange(ids.shape[1])[None] >= block.lengths[:, None]] = -100
    return ids


def test_measuring_directions_leaves_the_model_and_the_grad_mode_as_they_were():
    model = tiny_model("llama")
    before = weight_bits(model)
    first = measure_directions(model, BLOCKS, (1,))
    again = measure_directions(model, BLOCKS, (1,))
    assert torch.equal(first[1].sink, again[1].sink)
    assert weight_bits(model) == before
    assert torch.is_grad_enabled()
    assert all(p.requires_grad for p in model.parameters())


def test_an_unknown_treatment_is_named_with_the_known_ones():
    with pytest.raises(SelectionError, match="release"):
        treatment_named("relase")


def test_the_page_lists_every_treatment_with_its_formula():
    page = (Path(__file__).parent.parent / "docs" / "treatments.md").read_text()
    for row in TREATMENTS.values():
        told = " ".join(["|", f"`{row.name}`", "|", *row.writes, "|", row.says, "|"])
        assert told in page


def decayed(model, plan, roles="vo", factor=0.01):
    """The plan's value and output slices at a hundredth, as weight decay leaves them."""
    spans = {n: s for n, s in plan_spans(model, plan).items() if n.rsplit(".", 1)[1][0] in roles}
    before = read_slices(model, spans)
    return Patch(
        {n: Slice(span, before[n], before[n] * factor) for n, span in spans.items()},
        PatchInfo("tiny", plan.model_dump(mode="json")),
    )


def test_regrow_gives_decayed_values_and_outputs_back_up_to_their_size(patient):
    model, plan, _ = patient
    whole = head_slices(model, Head(1, 0), "vo")
    with decayed(model, plan).applied(model):
        patch = treated(patient, "regrow")
        with patch.applied(model):
            back = head_slices(model, Head(1, 0), "vo")
    for role in ("v", "o"):
        expected = healthy_std(model, plan, 1, role)
        assert float(back[role].std()) == pytest.approx(expected, rel=1e-3)
        along = torch.nn.functional.cosine_similarity(
            back[role].flatten(), whole[role].flatten(), 0
        )
        assert float(along) == pytest.approx(1, abs=1e-5)


def test_regrow_leaves_slices_alone_that_did_not_decay(patient):
    patch = treated(patient, "regrow")
    assert all(torch.equal(part.before, part.after) for part in patch.slices.values())


def test_joined_treatments_do_what_each_of_them_does(patient):
    model, plan, _ = patient
    with decayed(model, plan).applied(model):
        both = treated(patient, "release+regrow", 0.5).slices
        released, regrown = (
            treated(patient, "release", 0.5).slices,
            treated(patient, "regrow").slices,
        )
    for name, part in both.items():
        alone = released if name.rsplit(".", 1)[1][0] in "qk" else regrown
        assert torch.equal(part.after, alone[name].after), name
    assert treatment_named("release+regrow").writes == "qvo"
    with pytest.raises(SelectionError, match="nothing else to treat"):
        treatment_named("release+reinitialise")


def behind_bos(count, length=24, seed=500):
    return [[1, *random_ids(length, seed + at)] for at in range(count)]


def with_constant_inputs(model):
    """Embeddings that share a large part, as those of trained models do; the BOS stands apart."""
    rows = model.get_input_embeddings().weight.data
    shared = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(3))
    rows += 30 * rows.std() * shared
    rows[1] = -rows[1]
    return model


def losses_of(model, texts):
    return ablate_sets(model, texts, [(Head(0, 0),)]).base


@pytest.mark.parametrize(
    ("family", "way", "heads"),
    [
        ("gpt2", "bias", HEADS),
        ("bloom", "bias", HEADS),
        ("llama-mha-bias", "bias", HEADS),
        ("llama", "parked", "L0H1-2"),  # random keys of its second layer hold no query
        ("qwen2", "parked", "L0H1-2"),
        ("mpt", "parked", HEADS),
    ],
)
def test_a_retired_head_gives_its_mean_output(family, way, heads):
    model = with_constant_inputs(tiny_model(family))
    plan = plan_for(model, heads, bos=True)
    blocks = list(batches(behind_bos(8), 4))
    means = measure_means(model, blocks)
    texts = behind_bos(4, seed=900)
    expected = ablate_sets(model, texts, [tuple(plan.target_heads)], mean_output(model, means))
    before = weight_bits(model)
    patch = retire(model, plan, blocks, means)
    assert patch.info.retired == {way: plan.targets}
    with patch.applied(model):
        found = losses_of(model, texts)
    torch.testing.assert_close(found, expected.losses[0], rtol=1e-5, atol=1e-5)
    assert abs(found - expected.base).max() > 1e-2  # the heads did something
    assert weight_bits(model) == before


@pytest.mark.parametrize("why", ["no bos", "no constant in the inputs"])
def test_a_head_that_cannot_be_parked_is_zeroed_and_the_patch_says_so(why):
    model = tiny_model("llama")
    bos = why != "no bos"
    if not bos:
        with_constant_inputs(model)
    plan = plan_for(model, HEADS, bos=bos)
    patch = retire(model, plan, list(batches(behind_bos(8), 4)))
    assert patch.info.retired == {"zeroed": plan.targets}
    texts = behind_bos(4, seed=900)
    expected = ablate_sets(model, texts, [tuple(plan.target_heads)], ZERO)
    with patch.applied(model):
        torch.testing.assert_close(losses_of(model, texts), expected.losses[0])


def test_a_head_of_a_sliding_window_is_not_parked_on_a_token_that_leaves_it():
    """The blocks are shorter than the window, so that nothing measured on them tells."""
    model = with_constant_inputs(tiny_model("mistral"))
    plan = plan_for(model, "L0H1-2", bos=True)
    patch = retire(model, plan, list(batches(behind_bos(8), 4)))
    assert patch.info.retired == {"zeroed": plan.targets}


def test_a_muted_head_gives_what_the_dose_leaves(patient):
    model = patient[0]
    seen = {}
    with treated(patient, "mute", 0.25).applied(model):
        seen["muted"] = head_slices(model, Head(0, 1), "o")["o"]
    whole = head_slices(model, Head(0, 1), "o")["o"]
    torch.testing.assert_close(seen["muted"], 0.75 * whole)
    assert whole.shape[0] == 32  # (out, in) in every family
