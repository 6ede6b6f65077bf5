"""A shrunken directory loads in plain transformers and says what the ablated model says."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from headwise.errors import ModelError
from headwise.forward.mean_outputs import measure_means
from headwise.handover.merging import apply_patches
from headwise.handover.shrinking import Shrunken
from headwise.heads import Head, format_heads
from headwise.models.values import PatchInfo
from headwise.surgery.operation import silence
from headwise.surgery.plan import SurgeryPlan, planned_model
from headwise.surgery.treatments import retire
from headwise.texts.batches import batches, encode_for
from test_prune import TEXTS, loaded_tiny
from test_triage import output_of


def taken_out(loaded, heads, replacement):
    """A patch without heads, and the mean outputs that it puts in their place."""
    plan = SurgeryPlan(
        model=planned_model(loaded.describe()), targets=format_heads(heads), bos=loaded.bos
    )
    if replacement == "zero":
        patch = silence(loaded.model, plan)
        info = PatchInfo("tiny", patch.info.plan, retired={"zeroed": format_heads(heads)})
        return type(patch)(patch.slices, info), None
    blocks = list(batches(encode_for(loaded, TEXTS.texts[:8], max_length=32), 4))
    means = measure_means(loaded.model, blocks)
    return retire(loaded.model, plan, blocks, means), means


def ablated_logits(model, ids, heads, means):
    with ExitStack() as stack, torch.inference_mode():
        for head in heads:
            given = 0.0 if means is None else means[head.layer, head.index]
            stack.enter_context(
                output_of(model, head, lambda out, given=given: torch.zeros_like(out) + given)
            )
        return model(ids, use_cache=False).logits


EVEN = [Head(0, 1), Head(0, 2), Head(1, 0), Head(1, 3)]  # one head of every group of two
GROUPS = [Head(0, 2), Head(0, 3), Head(1, 0), Head(1, 1)]  # one whole group of every layer


@pytest.mark.parametrize(
    ("family", "heads", "replacement", "left"),
    [
        ("llama", EVEN, "zero", (2, 2)),
        ("llama", GROUPS, "zero", (2, 1)),
        ("qwen3", EVEN, "zero", (2, 2)),
        ("mistral", GROUPS, "zero", (2, 1)),
        ("llama-mha-bias", EVEN, "mean", (2, 2)),
        ("llama", [*EVEN, Head(0, 0)], "zero", (2, 2)),  # the odd one stays, silenced
    ],
)
def test_a_smaller_model_has_the_logits_of_the_ablated_one(
    family, heads, replacement, left, tmp_path
):
    loaded = loaded_tiny(family)
    patch, means = taken_out(loaded, heads, replacement)
    apply_patches(loaded, [patch], tmp_path / "small", shrink=True)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = ablated_logits(loaded.model, ids, heads, means)
    with torch.inference_mode():
        logits = small(ids).logits
    assert (logits - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    config = small.config
    assert (config.num_attention_heads, config.num_key_value_heads) == left
    told = Shrunken.load(tmp_path / "small")
    count = sum(p.numel() for p in small.parameters())
    assert told.weights == count
    assert told.saved_weights == sum(p.numel() for p in loaded.model.parameters()) - count > 0
    shape = loaded.describe()
    cache = 4 * 2 * shape.head_dim * 2 * (shape.num_kv_heads - left[1])
    assert told.saved_cache_bytes == cache


def test_a_parked_constant_becomes_an_output_bias(tmp_path):
    loaded = loaded_tiny("llama", bos=True)
    patch, _ = taken_out(loaded, EVEN, "mean")
    assert set(patch.info.retired) <= {"parked", "zeroed"}
    apply_patches(loaded, [patch], tmp_path / "small", shrink=True)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = loaded.tokenizer.bos_token_id
    with torch.inference_mode(), patch.applied(loaded.model):
        wanted = loaded.model(ids, use_cache=False).logits
        assert (small(ids).logits - wanted).abs().max() < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("family", "heads", "why"),
    [
        ("llama", EVEN[:3], "loses no head"),
        ("gpt2", [Head(0, 0), Head(1, 1)], "no head_dim"),
        ("bloom", [Head(0, 0), Head(1, 1)], "cannot be written smaller"),
    ],
)
def test_what_cannot_shrink_says_why_and_leaves_nothing(family, heads, why, tmp_path):
    loaded = loaded_tiny(family)
    patch, _ = taken_out(loaded, heads, "zero")
    with pytest.raises(ModelError, match=why):
        apply_patches(loaded, [patch], tmp_path / "small", shrink=True)
    assert not list(tmp_path.iterdir())
