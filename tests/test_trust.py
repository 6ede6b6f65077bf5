"""No silent wrong result, no traceback, nothing lost: damage, foreign files, odd inputs, locks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from campaigns import desk
from campaigns.mutations import BOMB
from conftest import tiny_language_model, tiny_model, tiny_tokenizer
from headwise.artefacts import save_artefact
from headwise.diagnosis.settings import Thresholds
from headwise.errors import (
    ArtefactError,
    HeadwiseError,
    ModelError,
    SelectionError,
    SettingsError,
    TextError,
)
from headwise.handover.merging import apply_patches
from headwise.heads import Head, select_heads
from headwise.integrity.checksums import check_text, sealed_text
from headwise.integrity.locks import LOCK, one_writer
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patch import Patch, Slice
from headwise.models.slices import Span, head_spans
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.plasticity.settings import CaptureSettings
from headwise.settings import read_yaml
from headwise.surgery.checkpoints import load_best
from headwise.surgery.recipe import recipe_named
from headwise.surgery.run_state import read_maps, read_trace
from headwise.surgery.training import train
from headwise.texts.batches import encode_texts, token_ids
from headwise.texts.text_sets import read_texts
from headwise.therapy.repair import repair as repair_run
from planned import TINY_RECIPE, opened, plan_for, random_corpus


def flip(path, place=-5, bit=1):
    """One bit of a file turned over."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= bit
    path.write_bytes(bytes(raw))


# --- checksums and identity ---------------------------------------------------------------------


def test_a_flipped_bit_of_a_tensor_is_refused(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(4)}, {"b": "c"})
    tensors, metadata = read_safetensors(path)
    assert metadata == {"b": "c"}
    assert torch.equal(tensors["a"], torch.ones(4))
    flip(path)
    with pytest.raises(ArtefactError, match="its checksum does not match"):
        read_safetensors(path)


def test_a_file_without_a_checksum_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ArtefactError, match="carries no checksum"):
        read_safetensors(tmp_path / "x.safetensors")


def test_a_changed_digit_of_a_json_artefact_is_refused():
    text = sealed_text('{\n "a": 0.125\n}\n')
    check_text(text, "x")
    with pytest.raises(ArtefactError, match="its checksum does not match"):
        check_text(text.replace("0.125", "0.126"), "x")
    check_text(json.dumps(json.loads(text)), "x")  # laid out anew by another program: no seal


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it(tmp_path):
    model = tiny_model("llama")
    ends, told = [], []
    for damaged in (False, True):
        folder = tmp_path / str(damaged)
        with opened(model, plan_for(model), folder) as job:
            train(job)
        if damaged:
            flip(folder / "checkpoints" / "step-0000006.safetensors", -9)
        with opened(model, plan_for(model), folder) as job:
            train(job, resume=True, progress=lambda title, *rest: told.append(title))
            ends.append([p.detach().clone() for p in job.trained])
    lines = [line for line in told if "going back to the one before" in line]
    assert len(lines) == 1
    assert "step-0000006.safetensors" in lines[0]
    for left, right in zip(*ends, strict=True):
        assert torch.equal(left, right)


def test_a_run_whose_checkpoints_are_all_damaged_says_what_to_do(tmp_path):
    model = tiny_model("llama")
    with opened(model, plan_for(model), tmp_path) as job:
        train(job)
        for path in (tmp_path / "checkpoints").glob("step-*"):
            flip(path, -9)
        with pytest.raises(ArtefactError, match=r"every checkpoint.*(?s:.)*start anew"):
            train(job, resume=True)


def test_the_files_of_another_run_are_refused(tmp_path):
    model = tiny_model("llama")
    with opened(model, plan_for(model), tmp_path) as job:
        train(job)
        other = replace(job, run=replace(job.run, fingerprint="of other weights"))
        with pytest.raises(ArtefactError, match="belongs to another run"):
            train(other, resume=True)
        with pytest.raises(ArtefactError, match="belongs to another run"):
            load_best(other)
        with pytest.raises(ArtefactError, match="the run's best step is 99"):
            load_best(job, 99)


@pytest.mark.parametrize("name", ["trace.jsonl", "maps.jsonl"])
def test_an_emptied_trace_or_map_does_not_resume(tmp_path, name):
    model = tiny_model("llama")
    with opened(model, plan_for(model), tmp_path) as job:
        train(job)
        (tmp_path / name).write_text("")
        with pytest.raises(ArtefactError, match="0 rows, the checkpoint was written after"):
            train(job, resume=True)


def test_a_changed_row_of_the_trace_is_refused(tmp_path):
    model = tiny_model("llama")
    with opened(model, plan_for(model), tmp_path) as job:
        train(job)
        path = tmp_path / "trace.jsonl"
        path.write_text(path.read_text().replace('"step": 1,', '"step": 7,', 1))
        with pytest.raises(ArtefactError, match="its checksum does not match"):
            train(job, resume=True)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured") / "qk"
    desk.run_capture(folder)
    return folder


def test_a_finished_capture_is_verified_when_resumed(captured, tmp_path):
    import shutil

    folder = tmp_path / "qk"
    shutil.copytree(captured, folder)
    assert desk.run_capture(folder, resume=True).rows
    flip(folder / "l01h00k" / "data.parquet", 200)
    with pytest.raises(ArtefactError, match="its checksum does not match"):
        desk.run_capture(folder, resume=True)


def test_captured_vectors_carry_page_checksums(captured):
    path = captured / "l00h00q" / "data.parquet"
    pq.ParquetFile(path, page_checksum_verification=True).read()
    flip(path, 100)
    with pytest.raises(OSError, match=r"CRC|could not|Couldn't"):
        pq.ParquetFile(path, page_checksum_verification=True).read()
    flip(path, 100)


# --- a patch touches heads only -----------------------------------------------------------------


def patch_of(model, **spans):
    slices = {}
    for name, span in spans.items():
        held = span.of(model).detach().clone()
        slices[name.replace("__", ".")] = Slice(span, held, held + 1)
    return Patch(slices)


def test_a_patch_cannot_touch_the_embedding():
    model = tiny_model("llama")
    patch = patch_of(model, L0H0__q=Span("model.embed_tokens.weight", 0, 0, 8))
    with pytest.raises(ArtefactError, match="no slice of a head"):
        patch.apply(model, force=True)
    wrong_head = patch_of(model, L0H0__q=head_spans(model, Head(0, 1), "q")["L0H1.q"])
    with pytest.raises(ArtefactError, match="no slice of a head"):
        wrong_head.apply(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: replace(part, after=part.after * float("nan")), "holds NaN or infinity"),
        (lambda part: replace(part, after=part.after.half()), "turns torch.float32"),
        (lambda part: replace(part, after=part.after[:1]), "turns a shape"),
        (lambda part: replace(part, span=replace(part.span, start=-8, stop=0)), "has no place"),
        (lambda part: replace(part, span=replace(part.span, stop=3)), "for 3 places"),
        (lambda part: replace(part, span=replace(part.span, axis=2)), "has no place"),
    ],
)
def test_a_slice_that_no_repair_makes_is_refused(tmp_path, change, message):
    model = tiny_model("llama")
    patch = patch_of(model, L0H0__q=head_spans(model, Head(0, 0), "q")["L0H0.q"])
    wrong = Patch({name: change(part) for name, part in patch.slices.items()})
    with pytest.raises(ArtefactError, match=message):
        wrong.save(tmp_path / "patch.safetensors")


def test_slices_that_overlap_are_refused(tmp_path):
    model = tiny_model("llama")
    span = head_spans(model, Head(0, 0), "q")["L0H0.q"]
    patch = patch_of(model, L0H0__q=span, L0H1__q=replace(span, start=4, stop=12))
    with pytest.raises(ArtefactError, match="overlap at 4"):
        patch.save(tmp_path / "patch.safetensors")


def test_a_patch_for_other_head_sizes_is_refused_even_by_force():
    patch = patch_of(
        tiny_model("llama"), L0H1__q=head_spans(tiny_model("llama"), Head(0, 1), "q")["L0H1.q"]
    )
    with pytest.raises(ArtefactError, match="no slice of a head"):
        patch.apply(tiny_model("qwen3"), force=True)


# --- types at the door --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "with aliases written out"),
        ("a: &a [*a]", "an alias that holds itself"),
        ("a: " + "[" * 100 + "]" * 100, "more than 50 levels"),
        ("a: '" + "x" * 1_000_001 + "'", "more than 1,000,000 characters"),
        ("a: 2026-13-45", "month must be in"),
        ("a: " + "9" * 5000, "not readable as YAML"),
        ("a: 0x" + "f" * 5000, "more than 63 bits"),
        ('a: "\\0"', "null character"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("- a", "not a YAML mapping"),
    ],
)
def test_a_yaml_bomb_or_an_absurd_value_is_told(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    started = time.process_time()
    with pytest.raises(SettingsError, match=message):
        read_yaml(tmp_path / "x.yaml")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: .inf", "lr: Input should be a finite number"),
        ("steps: 10000000000", "steps: .*less than or equal"),
        ("base: r.yaml", "leads back to the recipe"),
        ("base: 3", "leads back to the recipe, or is no name"),
    ],
)
def test_an_absurd_recipe_is_told(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        recipe_named("r.yaml")


@pytest.mark.parametrize(
    "text",
    ["(" * 60 + "all", "L" + "9" * 400 + "H0", "all" + ",all" * 40_000, "all - ", "L0H0 x" * 99],
)
def test_an_absurd_selection_is_told_quickly(text):
    started = time.process_time()
    with pytest.raises(SelectionError) as caught:
        select_heads(text, num_layers=2, num_heads=4)
    assert len(str(caught.value)) < 600
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogates"),
        (b'{"text": null}', "NoneType, not a string"),
        (b'{"text": 5}', "int, not a string"),
        (b'{"text": ' + b"[" * 100_000, "recursion"),
        (b"[1]", "line 1 is not"),
        (b'{"txet": "a"}', "line 1"),
    ],
)
def test_a_bad_line_of_text_is_told(tmp_path, raw, message):
    (tmp_path / "x.jsonl").write_bytes(raw)
    with pytest.raises(TextError, match=message):
        read_texts([str(tmp_path / "x.jsonl")])


def test_a_line_separator_inside_a_text_is_no_end_of_line(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n")
    assert read_texts([str(tmp_path / "x.jsonl")]).texts == ("a\u2028b",)


def test_a_parquet_column_of_other_things_is_told(tmp_path):
    pq.write_table(pa.table({"text": [[1, 2]]}), tmp_path / "x.parquet")
    with pytest.raises(TextError, match="no readable `text` column"):
        read_texts([str(tmp_path / "x.parquet")])


def test_a_huge_text_is_cut_before_it_is_tokenised(tokenizer, monkeypatch):
    text = "the ships and the lake " * 400
    whole = token_ids(tokenizer, text)
    monkeypatch.setattr("headwise.texts.batches._LONGEST", 500)
    assert token_ids(tokenizer, text) == whole
    some = token_ids(tokenizer, text, most=16)
    assert some[:16] == whole[:16]
    assert len(some) < len(whole) / 10


def test_a_length_of_nothing_is_told(tokenizer):
    with pytest.raises(TextError, match="cut at 0 tokens"):
        encode_texts(tokenizer, ["some text"], max_length=0)


def test_odd_thresholds_and_rates_are_told():
    with pytest.raises(SettingsError, match="sink <= dead"):
        Thresholds(dead=0.3, sink=0.5)
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(SettingsError, match="keeps nothing"):
            CaptureSettings(base_rate=rate)


@pytest.fixture
def copied(model_dir, tmp_path):
    import shutil

    return shutil.copytree(model_dir, tmp_path / "model")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -3},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"hidden_size": -1},
        {"head_dim": 0},
        {"vocab_size": 0},
        {"rope_parameters": "x"},
        {"model_type": None},
        {"num_attention_heads": "4"},
    ],
)
def test_a_config_that_makes_no_model_is_told(copied, change):
    path = copied / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(HeadwiseError) as caught:
        load_model(str(copied), bos=False)
    assert "damaged or cut off" not in str(caught.value)


# --- one run, one writer ------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))  # stale
    with one_writer(tmp_path):
        told = json.loads((tmp_path / LOCK).read_text())
        assert told["pid"] == os.getpid()
        with (
            pytest.raises(
                ArtefactError, match=f"another process writes here: process {os.getpid()}"
            ),
            one_writer(tmp_path),
        ):
            pass
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_is_a_link_or_another_s_file_is_refused_and_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(ArtefactError, match="is a link"), one_writer(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / LOCK).unlink()
    for foreign in ("a note", '["list"]', '{"pid": 3}'):
        (tmp_path / LOCK).write_text(foreign)
        with pytest.raises(ArtefactError, match="headwise did not write"), one_writer(tmp_path):
            pass
        assert (tmp_path / LOCK).read_text() == foreign
    (tmp_path / LOCK).write_text("")  # a process that was killed before it told its number
    with one_writer(tmp_path):
        pass


def test_a_sweep_removes_only_what_headwise_left_half_written(tmp_path):
    from headwise.artefacts import TEMPORARY, sweep, temporary_beside

    (tmp_path / "deep").mkdir()
    foreign = tmp_path / "deep" / ".editor.tmp"
    foreign.write_text("another program's")
    link = tmp_path / f".link.12345678{TEMPORARY}"
    link.symlink_to(foreign)
    likely = tmp_path / f".run.json.0123abcd-0123abcd{TEMPORARY}"
    likely.write_text("another program's, or a person's")
    ours = temporary_beside(tmp_path / "deep" / "run.json")
    ours.write_text("half")
    sweep(tmp_path)
    assert not ours.exists()
    assert foreign.exists()
    assert likely.exists()
    assert link.is_symlink()


def test_only_own_files_of_a_folder_are_removed_and_a_link_is_refused(tmp_path):
    from headwise.artefacts import own_folder, remove_files

    mine, theirs = tmp_path / "cache", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "0.safetensors").write_text("x")
    (mine / "note.txt").write_text("a user's")
    remove_files(mine, "*.safetensors")
    assert [path.name for path in mine.iterdir()] == ["note.txt"]
    (mine / "note.txt").unlink()
    (mine / "1.safetensors").write_text("x")
    remove_files(mine, "*.safetensors")
    assert not mine.exists()
    mine.symlink_to(theirs)
    for use in (own_folder, lambda folder: remove_files(folder, "*.safetensors")):
        with pytest.raises(ArtefactError, match="cache is a link"):
            use(mine)
    assert (theirs / "0.safetensors").exists()
    remove_files(tmp_path / "nowhere", "*")


def test_a_run_leaves_a_folder_called_prefix_and_linked_checkpoints_alone(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    (tmp_path / "run" / "prefix").mkdir(parents=True)
    (tmp_path / "run" / "prefix" / "thesis.txt").write_text("years of work")
    given = (plan_for(loaded.model), random_corpus(), TINY_RECIPE)
    repair_run(loaded, *given, out=tmp_path / "run")
    assert (tmp_path / "run" / "prefix" / "thesis.txt").read_text() == "years of work"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "step-0000001.safetensors").write_text("another run's")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(ArtefactError, match="checkpoints is a link"):
        repair_run(loaded, *given, out=tmp_path / "linked")
    assert [path.name for path in elsewhere.iterdir()] == ["step-0000001.safetensors"]


def test_a_fresh_run_refuses_checkpoints_that_lie_in_its_folder(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    (tmp_path / "checkpoints").mkdir()
    theirs = tmp_path / "checkpoints" / "step-0000001.safetensors"
    theirs.write_text("another run's")
    with pytest.raises(ArtefactError, match="checkpoints without their run lie here"):
        repair_run(loaded, plan_for(loaded.model), random_corpus(), TINY_RECIPE, out=tmp_path)
    assert theirs.read_text() == "another run's"


def test_a_process_that_is_killed_leaves_no_lock_that_holds(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from headwise.integrity.locks import one_writer\n"
        "with one_writer(Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ArtefactError, match=f"process {process.pid}"), one_writer(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with one_writer(tmp_path):
        pass


def test_a_model_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="is a file, or not empty"):
        apply_patches(loaded, [], tmp_path / "file")

    def full(folder, **options):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loaded.model, "save_pretrained", full)
    with pytest.raises(ModelError, match="No space left"):
        apply_patches(loaded, [], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_sealed_artefact_is_the_same_whenever_it_is_written(tmp_path):
    body = {"a": [1.5, 2.5], "b": {"c": None}}
    left, right = (
        save_artefact(tmp_path / n, "x", body).read_bytes() for n in ("1.json", "2.json")
    )
    assert left == right


@pytest.mark.parametrize(("name", "read"), [("trace.jsonl", read_trace), ("maps.jsonl", read_maps)])
def test_a_finished_run_that_lost_the_end_of_its_rows_is_told(tmp_path, name, read):
    loaded = LoadedModel("tiny", tiny_model("llama"), tiny_tokenizer())
    run = repair_run(loaded, plan_for(loaded.model), random_corpus(), TINY_RECIPE, out=tmp_path)
    whole = (run.out / name).read_bytes()
    assert read(run.out)
    (run.out / name).write_bytes(b"".join(whole.splitlines(True)[:-1]))
    with pytest.raises(ArtefactError, match="the finished run left"):
        read(run.out)
