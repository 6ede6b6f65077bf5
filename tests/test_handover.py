"""Handing a repair over: exact adapters, directories that stay what they were, cards, the hub."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from conftest import tiny_language_model
from headwise.artefacts import save_artefact
from headwise.errors import ArtefactError, HeadwiseError, ModelError
from headwise.handover.adapter import export_peft, split_rank
from headwise.handover.card import model_card
from headwise.handover.merging import apply_patches
from headwise.handover.push import push
from headwise.handover.weight_files import RECORD, REPLACED
from headwise.heads import Head
from headwise.models.loading import load_model
from headwise.models.patch import Patch, Slice
from headwise.models.slices import spans_of
from headwise.models.values import PatchInfo
from headwise.report.source import read_source
from planned import weight_bits
from reportstudy import build_study

HEADS = [Head(0, 1), Head(1, 2), Head(1, 3)]
IDS = torch.arange(3, 35)[None]


def patch_of(model, change, roles="q", heads=HEADS) -> Patch:
    """A patch that writes `change(slice)` into some heads' slices."""
    slices = {}
    for name, span in spans_of(model, heads, roles).items():
        before = span.of(model).detach().clone()
        slices[name] = Slice(span, before, change(before).to(before.dtype))
    return Patch(slices, PatchInfo(base_model="tiny"))


def released(part):
    """As `release` does: what points along one direction of the head goes."""
    dim = min(part.shape)  # of Conv1D the head stands across
    u = torch.nn.functional.normalize(torch.linspace(-1, 1, dim), dim=0)
    if part.ndim == 1:
        return part - u * (u @ part)
    if part.shape[0] == dim:
        return part - torch.outer(u, u @ part)
    return part - torch.outer(part @ u, u)


def weights_only(patch: Patch) -> Patch:
    kept = {name: part for name, part in patch.slices.items() if not name.endswith("_bias")}
    return Patch(kept, patch.info)


def folder_of(model, tokenizer, folder, **options):
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2", "qwen2"])
@pytest.mark.parametrize("biases", [False, True])
def test_an_adapter_has_the_logits_of_the_patched_model(family, biases, tokenizer, tmp_path):
    folder = folder_of(tiny_language_model(family), tokenizer, tmp_path / "base")
    loaded = load_model(str(folder), bos=False)
    patch = patch_of(loaded.model, released)
    patch = patch if biases else weights_only(patch)
    made = export_peft(loaded, patch, tmp_path / "adapter")
    assert set(made.stored.values()) == {"rank 2"}  # one direction a head, two heads in layer 1
    with torch.no_grad(), patch.applied(loaded.model):
        expected = loaded.model(IDS).logits
    fresh = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        stock = fresh(IDS).logits
        adapted = PeftModel.from_pretrained(fresh, tmp_path / "adapter")(IDS).logits
    size = expected.abs().max()  # these random models have logits of up to 20
    assert (adapted - expected).abs().max() < 1e-5 * size < (stock - expected).abs().max()
    assert made.error < 1e-5 * size
    assert not any("lora" in name for name, _ in loaded.model.named_modules())


def test_the_same_patch_gives_the_same_adapter(tokenizer, tmp_path):
    folder = folder_of(tiny_language_model("bloom"), tokenizer, tmp_path / "base")
    loaded = load_model(str(folder), bos=False)
    for name in ("a", "b"):
        export_peft(loaded, patch_of(loaded.model, released), tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_patch_of_full_rank_says_its_rank_and_is_exported_on_request(model_dir, tmp_path):
    loaded = load_model(str(model_dir), bos=False)
    patch = patch_of(loaded.model, lambda part: torch.randn(part.shape), "qkvo", HEADS)
    with pytest.raises(HeadwiseError, match=r"not of low rank: .* changes with rank \d+ of"):
        export_peft(loaded, patch, tmp_path / "adapter")
    made = export_peft(loaded, patch, tmp_path / "adapter", full_rank=True)
    assert made.error < 1e-3
    with pytest.raises(HeadwiseError, match="changes nothing"):
        export_peft(loaded, Patch({}), tmp_path / "none")


def test_an_adapter_that_is_larger_than_its_patch_is_refused(model_dir, tmp_path):
    """A reinitialised head has the rank of a head: fewer numbers than the matrix, more than it."""
    loaded = load_model(str(model_dir), bos=False)
    patch = patch_of(loaded.model, lambda part: torch.randn(part.shape), "o", [Head(0, 1)])
    with pytest.raises(HeadwiseError, match="not of low rank"):
        export_peft(loaded, patch, tmp_path / "adapter")
    export_peft(loaded, patch, tmp_path / "adapter", full_rank=True)


def test_rounding_does_not_count_as_rank():
    torch.manual_seed(0)
    weight = torch.randn(24, 192)
    after = weight - torch.outer(torch.randn(24), torch.randn(192))
    change = after.double() - weight.double()
    assert torch.linalg.matrix_rank(change) == 24
    a, b = split_rank(change, torch.finfo(torch.float32).eps * float(after.norm()))
    assert a.shape == (1, 192)
    torch.testing.assert_close((b @ a).double(), change, atol=1e-5, rtol=0)


# --- merged directories --------------------------------------------------------------------------


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def tensors_of(folder, pattern="*.safetensors"):
    found = {}
    for path in folder.glob(pattern):
        with safe_open(str(path), framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2"])
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_a_half_precision_base_is_merged_and_undone_to_the_same_files(
    family, shards, tokenizer, tmp_path
):
    model = tiny_language_model(family, sharpen=1.0).half()
    base = folder_of(model, tokenizer, tmp_path / "base", max_shard_size=shards)
    loaded = load_model(str(base), bos=False)  # float32
    patch = patch_of(loaded.model, lambda part: part + 1e-5 * torch.rand(part.shape))
    merged = apply_patches(loaded, [patch], tmp_path / "merged")
    assert {p.name for p in base.iterdir()} == {p.name for p in merged.iterdir()} - {RECORD}
    plain = AutoModelForCausalLM.from_pretrained(merged)
    with patch.applied(loaded.model):
        for name, value in loaded.model.named_parameters():
            assert torch.equal(plain.get_parameter(name), value), name
    before, after = tensors_of(base), tensors_of(merged)
    kept = [name for name in before if torch.equal(before[name].float(), after[name].float())]
    assert all(after[name].dtype == torch.float16 for name in kept)
    assert 0 < len(before) - len(kept) <= 4
    back = apply_patches(load_model(str(merged), bos=False), [patch], tmp_path / "back", undo=True)
    assert digests(back) == digests(base)


def test_values_that_fit_keep_the_bases_precision(tokenizer, tmp_path):
    base = folder_of(tiny_language_model("llama").half(), tokenizer, tmp_path / "base")
    loaded = load_model(str(base), bos=False)
    merged = apply_patches(loaded, [patch_of(loaded.model, torch.zeros_like)], tmp_path / "merged")
    assert {value.dtype for value in tensors_of(merged).values()} == {torch.float16}
    assert json.loads((merged / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_a_patch_of_less_precision_leaves_the_base_its_own_and_is_undone(
    shards, tokenizer, tmp_path
):
    base = folder_of(
        tiny_language_model("llama"), tokenizer, tmp_path / "base", max_shard_size=shards
    )
    loaded = load_model(str(base), dtype="bfloat16", bos=False)
    patch = patch_of(loaded.model, lambda part: part * 0.5)
    second = Patch({n: Slice(s.span, s.after, s.after * 0.5) for n, s in patch.slices.items()})
    merged = apply_patches(loaded, [patch, second], tmp_path / "merged")
    before, after = tensors_of(base), tensors_of(merged, "model*.safetensors")
    assert {value.dtype for value in after.values()} == {torch.float32}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {part.span.parameter for part in patch.slices.values()}
    for part in second.slices.values():
        rows = part.span.within(after[part.span.parameter])
        assert torch.equal(rows, part.after.float())
    again = load_model(str(merged), dtype="bfloat16", bos=False)
    one = apply_patches(again, [second], tmp_path / "one", undo=True)
    again = load_model(str(one), dtype="bfloat16", bos=False)
    back = apply_patches(again, [patch], tmp_path / "back", undo=True)
    assert digests(back) == digests(base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_patch_forced_onto_another_base_is_undone_to_that_base(
    dtype, tokenizer, tmp_path, model_dir
):
    stock = load_model(str(model_dir), bos=False, dtype=dtype)
    patch = patch_of(stock.model, torch.zeros_like)
    other = load_model(str(model_dir), bos=False)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.5)
    base = tmp_path / "base"
    other.model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    loaded = load_model(str(base), bos=False, dtype=dtype)
    with pytest.raises(ArtefactError, match="other bits"):
        apply_patches(loaded, [patch], tmp_path / "refused")
    merged = apply_patches(loaded, [patch], tmp_path / "merged", force=True)
    assert digests(merged) != digests(base)
    again = load_model(str(merged), bos=False, dtype=dtype)
    bits = weight_bits(again.model)
    back = apply_patches(again, [patch], tmp_path / "back", undo=True)
    assert digests(back) == digests(base)
    assert weight_bits(again.model) == bits


def test_what_could_not_be_written_in_the_bases_precision_is_refused(model_dir, tmp_path):
    loaded = load_model(str(model_dir), dtype="bfloat16", bos=False)
    patch = patch_of(loaded.model, torch.zeros_like)
    merged = apply_patches(loaded, [patch], tmp_path / "merged")
    (merged / REPLACED).unlink()  # what undoing needs
    with pytest.raises(ModelError, match=r"files are float32 .* loaded in bfloat16"):
        apply_patches(
            load_model(str(merged), dtype="bfloat16", bos=False),
            [patch],
            tmp_path / "back",
            undo=True,
        )


@pytest.mark.parametrize("undo", [False, True])
def test_merging_leaves_the_model_in_memory_as_it_was(undo, model_dir, tmp_path):
    loaded = load_model(str(model_dir), bos=False)
    patch = patch_of(loaded.model, torch.zeros_like)
    if undo:
        patch = Patch({n: Slice(s.span, s.after, s.before) for n, s in patch.slices.items()})
    bits = weight_bits(loaded.model)
    apply_patches(loaded, [patch], tmp_path / "merged", undo=undo)
    assert weight_bits(loaded.model) == bits


def test_a_patch_forced_onto_another_base_gives_its_bits_back(model_dir):
    model = load_model(str(model_dir), bos=False).model
    patch = patch_of(model, torch.zeros_like)
    with torch.no_grad():
        for part in patch.slices.values():
            part.span.of(model).mul_(3)
    bits = weight_bits(model)
    with patch.applied(model, force=True):
        assert weight_bits(model) != bits
    assert weight_bits(model) == bits


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"patches": 1, "narrow": {}, "files": {}},
        {"patches": [], "narrow": {"x": "F8"}, "files": {}},
        {"patches": ["x"], "narrow": {}, "files": {"config.json": 3}},
    ],
)
def test_a_hand_made_merge_record_is_refused(body, model_dir, tmp_path):
    loaded = load_model(str(model_dir), bos=False)
    base = shutil.copytree(model_dir, tmp_path / "base")
    (base / RECORD).write_text(json.dumps({"schema": "headwise.merge/1", **body}))
    copied = replace(loaded, id=str(base))
    with pytest.raises(HeadwiseError, match=r"patches|narrow|files"):
        apply_patches(copied, [patch_of(loaded.model, torch.zeros_like)], tmp_path / "out")


def test_what_was_changed_in_memory_is_not_lost(model_dir, tmp_path):
    loaded = load_model(str(model_dir), bos=False)
    patch = patch_of(loaded.model, torch.zeros_like)
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(2)
    merged = apply_patches(loaded, [patch], tmp_path / "merged")
    again = load_model(str(merged), bos=False).model
    assert torch.equal(again.lm_head.weight, loaded.model.lm_head.weight)


# --- cards and the hub -----------------------------------------------------------------------


def test_a_card_tells_what_was_done_with_controls_and_goes_to_a_folder(model_dir, tmp_path):
    study = build_study(tmp_path / "study", seeds=(0,))
    copy = tmp_path / "model"
    folder_of(load_model(str(model_dir)).model, load_model(str(model_dir)).tokenizer, copy)
    assert push(copy, str(tmp_path / "hub"), run=study) == str(tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("---\n")
    for words in ("## What was done", "| gradient-only |", "95% interval", "--undo"):
        assert words in card
    assert (tmp_path / "hub" / "config.json").exists()
    with pytest.raises(ModelError, match="no model and no adapter"):
        push(study, str(tmp_path / "hub"))


def test_a_run_without_evaluation_makes_no_claim(tmp_path):
    study = build_study(tmp_path / "study", seeds=(0,))
    run = study / "runs" / "sham-s0"
    for name in ("evaluation.json", "comparison.json", "diagnosis.json"):
        (run / name).unlink(missing_ok=True)
    assert "No claim is made." in model_card(run)


def test_a_card_before_evaluation_carries_the_harm_and_the_slices_that_the_run_knows(
    tokenizer, tmp_path
):
    """It said `repaired`, and queries, keys and values where the patch held q and o alone."""
    study = build_study(tmp_path / "study", seeds=(0,))
    run = study / "runs" / "surgery-s0"
    for name in ("evaluation.json", "comparison.json"):
        (run / name).unlink()
    body = json.loads((run / "run.json").read_text())
    best = min(read_source(run).runs[0].validations.values())
    body["stock_loss"] = best - 0.8693
    body.pop("checksum", None)
    save_artefact(run / "run.json", "run", {k: v for k, v in body.items() if k != "schema"})
    patch_of(tiny_language_model("llama"), released, "qo").save(run / "patch.safetensors")
    card = model_card(run)
    assert "0.8693 nats per token worse than stock" in card
    assert "repaired" not in card
    assert "**The operation made the model worse on its own validation text" in card
    assert "reinitialised the queries and silenced the outputs" in card
    assert "keys" not in card


def test_a_comparison_is_also_a_csv(tmp_path):
    from headwise.proof.values import Comparison

    study = build_study(tmp_path / "study", seeds=(0,))
    found = Comparison.load(study / "runs" / "surgery-s0" / "comparison.json")
    lines = found.to_csv().splitlines()
    assert lines[0].startswith("layer,head,delta_")
    assert len(lines) == 1 + 64
    assert found.to_frame().shape[0] == 64


@pytest.mark.slow
def test_the_harness_reads_a_merged_directory(model_dir, tmp_path):
    harness = pytest.importorskip("lm_eval.models.huggingface")
    loaded = load_model(str(model_dir), bos=False)
    patch = patch_of(loaded.model, torch.zeros_like)
    merged = apply_patches(loaded, [patch], tmp_path / "merged")
    wrapped = harness.HFLM(pretrained=str(merged), device="cpu", dtype="float32")
    with torch.no_grad(), patch.applied(loaded.model):
        assert torch.equal(wrapped.model(IDS).logits, loaded.model(IDS).logits)


@pytest.mark.slow
def test_transformer_lens_reads_a_merged_directory(tokenizer, tmp_path):
    lens = pytest.importorskip("transformer_lens.model_bridge")
    base = folder_of(tiny_language_model("gpt2"), tokenizer, tmp_path / "base")
    loaded = load_model(str(base), bos=False)
    patch = patch_of(loaded.model, released)
    merged = apply_patches(loaded, [patch], tmp_path / "merged")
    bridge = lens.TransformerBridge.boot_transformers(str(merged), device="cpu")
    with torch.no_grad(), patch.applied(loaded.model):
        torch.testing.assert_close(bridge(IDS), loaded.model(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "place",
    [
        "diagnosis.values.Diagnosis",
        "triaging.values.Triage",
        "diagnosis.survey.Survey",
        "surgery.plan.SurgeryPlan",
        "therapy.repair.RepairRun",
        "therapy.values.Therapy",
        "proof.values.Evaluation",
        "proof.values.Comparison",
        "proof.completed_texts.Completions",
        "plasticity.run.Plasticity",
        "studies.summary.StudySummary",
        "watch.film.Film",
    ],
)
def test_every_artefact_is_a_frame(place):
    """Whatever a verb gives back can go on in pandas."""
    module, _, name = place.rpartition(".")
    assert callable(getattr(importlib.import_module(f"headwise.{module}"), name).to_frame)
