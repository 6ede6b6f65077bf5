"""The operation against brute-force ablation on every row, and the patch as the unit of change."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from conftest import sharp_model, tiny_model
from headwise.errors import ArtefactError, SelectionError
from headwise.forward.mean_outputs import measure_means
from headwise.heads import Head
from headwise.models.architectures import geometry_of, is_transposed, projection_of
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span, head_spans
from headwise.surgery.operation import (
    operate,
    plan_spans,
    require_planned_model,
    silence,
    unchanged,
)
from headwise.texts.batches import batches
from planned import plan_for, random_batch, weight_bits

BATCH = random_batch((40, 40))


@contextmanager
def replaced(model, heads, means=None):
    """Head outputs set to 0 or to their means at the input of the output projections."""
    dim = geometry_of(model).head_dim
    handles = []
    for layer in {head.layer for head in heads}:
        indices = [head.index for head in heads if head.layer == layer]

        def swap(_, inputs, layer=layer, indices=indices):
            out = inputs[0].clone()
            for index in indices:
                value = 0 if means is None else means[layer, index]
                out[..., index * dim : (index + 1) * dim] = value
            return (out, *inputs[1:])

        handles.append(projection_of(model, layer, "o").register_forward_pre_hook(swap))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def logits(model):
    return model(BATCH.ids, use_cache=False).logits


def relative(left, right):
    return float((left - right).abs().max() / right.abs().max())


@contextmanager
def applied(model, patch):
    patch.apply(model)
    try:
        yield
    finally:
        patch.undo(model)


def has_output_bias(model):
    return getattr(projection_of(model, 0, "o"), "bias", None) is not None


def test_at_step_0_the_operated_model_is_the_zero_ablated_one(model):
    stock = logits(model)
    # L1H0-1 is a whole group where keys are shared, L0H1 half of one
    plan = plan_for(model, "L0H1,L1H0-1")
    with applied(model, operate(model, plan)):
        operated = logits(model)
    with replaced(model, plan.target_heads):
        expected = logits(model)
    assert relative(operated, expected) < 1e-5
    assert relative(operated, stock) > 1e-3  # these heads did something
    with applied(model, silence(model, plan)):
        assert relative(logits(model), expected) < 1e-5


def test_with_compensation_it_is_the_mean_ablated_one_or_a_refusal(model):
    plan = plan_for(model, "L0H1,L1H0-1", compensate="mean")
    means = measure_means(model, [BATCH])
    if not has_output_bias(model):
        with pytest.raises(SelectionError, match="needs an output bias, and this family has none"):
            operate(model, plan, mean_outputs=means)
        return
    with applied(model, operate(model, plan, mean_outputs=means)):
        operated = logits(model)
    with replaced(model, plan.target_heads, means):
        expected = logits(model)
    with replaced(model, plan.target_heads):
        zeroed = logits(model)
    assert relative(operated, expected) < 1e-5
    assert relative(operated, zeroed) > 1e-4


def test_mean_outputs_are_means_over_real_tokens(model):
    batch = random_batch((30, 11))
    dim, heads = geometry_of(model).head_dim, geometry_of(model).num_heads
    seen = []
    handle = projection_of(model, 1, "o").register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach()[0])
    )
    try:
        with torch.inference_mode():
            for row, length in enumerate(batch.lengths.tolist()):
                model(batch.ids[row : row + 1, :length], use_cache=False)
    finally:
        handle.remove()
    expected = torch.cat(seen).mean(0).view(heads, dim)
    assert relative(measure_means(model, [batch])[1], expected) < 1e-5


def test_undo_gives_back_the_bits(model):
    before = weight_bits(model)
    patch = operate(model, plan_for(model, "L0H1,L1H0-1"))
    patch.apply(model)
    changed = {name for name, bits in weight_bits(model).items() if bits != before[name]}
    assert changed == {part.span.parameter for part in patch.slices.values()}
    patch.undo(model)
    assert weight_bits(model) == before


def test_the_operation_zeroes_biases_and_output_columns_and_nothing_of_other_heads(model):
    plan = plan_for(model, "L0H1,L1H0-1")
    patch = operate(model, plan)
    for name, part in patch.slices.items():
        role = name.rsplit(".", 1)[1]
        if role == "o" or role.endswith("_bias"):
            assert not part.after.any(), name
        else:
            assert (part.after != part.before).all(), name
    assert set(patch.slices) == set(plan_spans(model, plan))
    dim = geometry_of(model).head_dim
    assert all(p.span.stop - p.span.start == dim for p in patch.slices.values())


def test_operate_and_its_controls_leave_the_model_alone():
    model = tiny_model("bloom")
    before = weight_bits(model)
    plan = plan_for(model)
    operate(model, plan), silence(model, plan), unchanged(model, plan)
    assert weight_bits(model) == before
    same = unchanged(model, plan)
    assert all(torch.equal(part.before, part.after) for part in same.slices.values())
    assert {name.rsplit(".", 1)[1] for name in silence(model, plan).slices} == {"o"}


@pytest.fixture(scope="module")
def wide():
    """A BLOOM with enough numbers a head (64 x 256) to see the scale of a draw."""
    config = AutoConfig.for_model(
        "bloom", vocab_size=97, hidden_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    return sharp_model(config, sharpen=2.0)


XAVIER = math.sqrt(2 / (256 + 3 * 64))


def noise(patch):
    return {
        name: part.after
        for name, part in patch.slices.items()
        if name.rsplit(".", 1)[1] in ("q", "k", "v")
    }


def test_xavier_normal_has_glorots_scale_of_the_joint_slice(wide):
    for name, value in noise(operate(wide, plan_for(wide, "L0H0-1"))).items():
        assert value.std().item() == pytest.approx(XAVIER, rel=0.03), name
        assert abs(value.mean().item()) < 4 * XAVIER / 128, name
        assert value.abs().max() > 3 * XAVIER, name  # tails: not uniform


def test_xavier_uniform_fills_its_bounds_and_never_leaves_them(wide):
    plan = plan_for(wide, "L0H0-1", init="xavier_uniform")
    bound = math.sqrt(6 / (256 + 3 * 64))
    for name, value in noise(operate(wide, plan)).items():
        assert value.abs().max() <= bound, name
        assert value.abs().max() > 0.995 * bound, name
        assert value.std().item() == pytest.approx(XAVIER, rel=0.03), name


def test_the_1b7_bound_is_the_papers():
    assert math.sqrt(6 / (2048 + 3 * 128)) == pytest.approx(0.04967, abs=5e-6)


def test_match_healthy_takes_the_scale_of_the_layers_other_heads(wide):
    plan = plan_for(wide, "L0H0-1", init="match-healthy")
    scales = {"q": 0.5, "k": 2.0, "v": 0.1}
    changed = {}
    for role, scale in scales.items():
        for index in (2, 3):
            name, span = next(iter(head_spans(wide, Head(0, index), role).items()))
            before = span.of(wide).detach().clone()
            changed[name] = Slice(span, before, torch.randn_like(before) * scale)
    with applied(wide, Patch(changed)):
        found = noise(operate(wide, plan))
    for name, value in found.items():
        assert value.std().item() == pytest.approx(scales[name[-1]], rel=0.03), name


def test_a_head_gets_the_same_numbers_whoever_is_operated_on_with_it(model):
    alone = operate(model, plan_for(model, "L1H0-1"))
    together = operate(model, plan_for(model, "L0H1,L1H0-3"))
    for name, part in alone.slices.items():
        assert torch.equal(part.after, together.slices[name].after), name
    other = operate(model, plan_for(model, "L1H0-1", seed=1))
    for name, value in noise(alone).items():
        assert not torch.equal(value, other.slices[name].after), name
    values = [value.flatten() for value in noise(together).values()]
    assert len({tuple(value[:4].tolist()) for value in values}) == len(values)  # all differ


def test_shared_keys_are_named_after_their_group_and_changed_only_as_a_whole():
    model = tiny_model("llama")
    names = set(operate(model, plan_for(model, "L0H1,L1H0-1")).slices)
    assert names == {
        "L0H1.q",
        "L0H1.o",
        "L1H0.q",
        "L1H0.o",
        "L1H1.q",
        "L1H1.o",
        "L1KV0.k",
        "L1KV0.v",
    }
    only = operate(model, plan_for(model, "L1H0-1", kv_policy="queries-only"))
    assert {name.rsplit(".", 1)[1] for name in only.slices} == {"q", "o"}


def test_a_plan_for_another_model_is_refused():
    bloom, other = tiny_model("bloom"), tiny_model("bloom", seed=1)
    plan = plan_for(bloom)
    require_planned_model(bloom, plan, force=False)
    with pytest.raises(ArtefactError, match="made for other weights"):
        require_planned_model(other, plan, force=False)
    require_planned_model(other, plan, force=True)
    for force in (False, True):
        with pytest.raises(ArtefactError, match=r"= \(2, 4, 4\), this model has \(2, 6, 6\)"):
            require_planned_model(tiny_model("bloom-6h"), plan, force=force)


@pytest.fixture
def bloom():
    return tiny_model("bloom")


@pytest.fixture
def patch(bloom):
    return operate(bloom, plan_for(bloom))


def test_a_patch_survives_its_file(bloom, patch, tmp_path):
    path = patch.save(tmp_path / "patch.safetensors")
    read = Patch.load(path)
    assert read.info == patch.info
    assert set(read.slices) == set(patch.slices)
    for name, part in patch.slices.items():
        assert read.slices[name].span == part.span
        assert torch.equal(read.slices[name].after, part.after)
        assert torch.equal(read.slices[name].before, part.before)
    before, bytes_before = weight_bits(bloom), path.read_bytes()
    read.apply(bloom)
    read.undo(bloom)
    assert weight_bits(bloom) == before
    assert patch.save(path).read_bytes() == bytes_before
    assert read.num_weights == sum(p.after.numel() for p in patch.slices.values())


def test_a_bfloat16_patch_keeps_its_precision(tmp_path):
    model = tiny_model("gpt2").to(torch.bfloat16)
    before = weight_bits(model)
    patch = operate(model, plan_for(model))
    assert patch.dtype == "bfloat16"
    read = Patch.load(patch.save(tmp_path / "patch.safetensors"))
    read.apply(model)
    read.undo(model)
    assert weight_bits(model) == before


def test_patches_stack_and_come_off_in_reverse(bloom):
    before = weight_bits(bloom)
    first = operate(bloom, plan_for(bloom, "L0H1"))
    first.apply(bloom)
    between = weight_bits(bloom)
    second = operate(bloom, plan_for(bloom, "L0H0-1,L1H2", seed=5))  # L0H1 twice
    second.apply(bloom)
    with pytest.raises(ArtefactError, match="cannot undo the patch"):
        first.undo(bloom)
    second.undo(bloom)
    assert weight_bits(bloom) == between
    first.undo(bloom)
    assert weight_bits(bloom) == before
    with pytest.raises(ArtefactError, match="cannot apply the patch"):
        second.apply(bloom)  # it was made from the patched model
    first.apply(bloom)
    second.apply(bloom)


def test_a_patch_for_another_base_is_refused_unless_forced(bloom, patch):
    other = tiny_model("bloom", seed=1)
    before = weight_bits(other)
    with pytest.raises(ArtefactError, match="other bits") as caught:
        patch.apply(other)
    assert "--force" in str(caught.value)
    assert weight_bits(other) == before
    patch.apply(other, force=True)
    part = patch.slices["L0H1.q"]
    assert torch.equal(part.span.of(other), part.after)
    patch.apply(bloom)
    with pytest.raises(ArtefactError, match="cannot apply"):
        patch.apply(bloom)  # twice


def test_a_patch_of_weights_that_are_not_there_is_refused_even_if_forced(bloom, patch):
    name, part = next(iter(patch.slices.items()))
    lost = replace(part, span=replace(part.span, parameter="x"))
    foreign = replace(patch, slices={**patch.slices, name: lost})
    with (
        pytest.raises(ArtefactError, match="no slice of a head"),
        foreign.applied(bloom, force=True),
    ):
        pass


def test_a_patch_that_does_not_fit_is_refused_even_if_forced(patch):
    for other in (tiny_model("llama"), tiny_model("bloom-6h")):
        before = weight_bits(other)
        for force in (False, True):
            with pytest.raises(ArtefactError, match="cannot apply the patch"):
                patch.apply(other, force=force)
            with pytest.raises(ArtefactError, match="cannot undo the patch"):
                patch.undo(other, force=force)
        assert weight_bits(other) == before


@pytest.mark.parametrize("kept", [0, 7, 300, -1, -5000])
def test_a_cut_off_patch_file_is_told(patch, tmp_path, kept):
    path = patch.save(tmp_path / "patch.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ArtefactError, match="not a complete safetensors file"):
        Patch.load(path)


def test_a_damaged_or_foreign_file_is_no_patch(patch, tmp_path):
    from safetensors.torch import save_file

    path = patch.save(tmp_path / "patch.safetensors")
    raw = bytearray(path.read_bytes())
    at = raw.index(patch.slices["L0H1.q"].before.numpy().tobytes())
    raw[at + 3] ^= 0x40
    path.write_bytes(raw)
    with pytest.raises(ArtefactError, match="the patch is damaged"):
        Patch.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ArtefactError, match="not a headwise patch"):
        Patch.load(path)
    with pytest.raises(ArtefactError, match=r"patch\.safetensors"):
        Patch.load(tmp_path / "missing" / "patch.safetensors")


def test_a_span_is_a_view_not_a_copy(bloom):
    span = Span("transformer.h.0.self_attention.dense.weight", 1, 8, 16)
    assert span.of(bloom).data_ptr() == bloom.get_parameter(span.parameter)[:, 8:].data_ptr()
    conv = tiny_model("gpt2")
    assert is_transposed(projection_of(conv, 0, "o"))
    assert head_spans(conv, Head(0, 1), "o")["L0H1.o"].axis == 0


def test_texts_of_like_length_do_not_change_the_means(bloom):
    encoded = [BATCH.ids[0].tolist(), BATCH.ids[1, :9].tolist()]
    one = measure_means(bloom, batches(encoded, 1))
    two = measure_means(bloom, batches(encoded, 2))
    assert relative(one, two) < 1e-5
