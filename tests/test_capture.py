"""Captured queries and keys: they must rebuild transformers' own attention on every row."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from conftest import SENTENCES, sharp_model, tiny_language_model, tiny_model, tiny_tokenizer
from eager import window_of
from headwise.errors import ArtefactError, SettingsError
from headwise.forward.tap import tapped
from headwise.heads import Head
from headwise.models.architectures import geometry_of, positions_of
from headwise.plasticity import capture
from headwise.plasticity.buckets import bucket_of
from headwise.plasticity.capture import layer_vectors
from headwise.plasticity.settings import CaptureSettings, parse_buckets
from headwise.texts.text_sets import TextSet
from planned import random_ids

TEXTS = TextSet("five", SENTENCES)
IDS = torch.tensor([random_ids(70, 1)])


def scores_of(model, layer):
    """Scale, soft cap and key bias of a layer, as the tap sees them."""
    seen = {}

    def read(attention):
        seen[attention.layer] = attention.scores

    with torch.inference_mode(), tapped(model, read):
        model.base_model(input_ids=IDS, use_cache=False)
    return seen[layer]


def rebuilt_attention(model, layer, q, k):
    """softmax(cap(q.k * scale) + bias) under the causal window, from the captured vectors."""
    scores = scores_of(model, layer)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ k.double().transpose(-1, -2) * scores.scale
    if scores.softcap:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.bias is not None:
        logits = logits + scores.bias.double()
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place[None]
    allowed = (distance >= 0) & (distance < window_of(model, layer))
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1)


def test_captured_vectors_rebuild_the_models_attention(model):
    with torch.inference_mode():
        expected = model(IDS, output_attentions=True, use_cache=False)
    found = layer_vectors(model, IDS, [0, 1], False)
    assert [layer for layer, _, _ in found] == [0, 1]
    geometry = geometry_of(model)
    for layer, q, k in found:
        assert q.shape[1] == geometry.num_heads
        assert k.shape[1] == geometry.num_kv_heads
        attention = rebuilt_attention(model, layer, q, k)
        error = (attention - expected.attentions[layer]).abs().max()
        assert error < 1e-5, f"layer {layer}: {error:.1e}"
    with torch.inference_mode():
        after = model(IDS, use_cache=False).logits
    assert torch.equal(after, expected.logits)  # capturing left nothing behind


def test_before_rotation_vectors_differ_by_a_rotation_only(model):
    """RoPE keeps lengths, and does nothing at position 0; other families rotate nothing."""
    rotated = layer_vectors(model, IDS, [0, 1], False)
    plain = layer_vectors(model, IDS, [0, 1], True)
    for (layer, *after), (same, *before) in zip(rotated, plain, strict=True):
        assert layer == same
        for x, y in zip(after, before, strict=True):
            assert x.shape == y.shape
            scale = float(x.abs().max())
            assert (x[:, :, 0] - y[:, :, 0]).abs().max() < 1e-5 * scale
            assert (x.norm(dim=-1) - y.norm(dim=-1)).abs().max() < 1e-4 * scale
            turns = positions_of(model) == "rope" and _has_rope(model, layer)
            assert bool(torch.allclose(x, y, atol=1e-4 * scale)) != turns


def _has_rope(model, layer):
    flags = getattr(model.config, "no_rope_layers", None)
    return bool(flags[layer]) if flags else True


def test_clipped_queries_are_captured_clipped():
    config = AutoConfig.for_model(
        "olmo",
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        clip_qkv=0.5,
    )
    model = sharp_model(config)
    (_, after, _), (_, before, _) = (
        layer_vectors(model, IDS, [0], flag)[0] for flag in (False, True)
    )
    assert before.abs().max() == 0.5
    assert (before.norm(dim=-1) - after.norm(dim=-1)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "stablelm", "llama", "phi3"])
def test_a_text_as_long_as_there_are_heads_is_not_turned_on_its_side(name):
    model = tiny_model(name)
    ids = IDS[:, : geometry_of(model).num_heads]
    whole, short = (layer_vectors(model, part, [1], True)[0] for part in (IDS, ids))
    for x, y in zip(whole[1:], short[1:], strict=True):
        assert torch.allclose(x[:, :, : ids.shape[1]], y, atol=1e-3)


@pytest.mark.parametrize(
    ("text", "positions", "buckets"),
    [
        ("uniform:4", [0, 3, 4, 11, 12], [0, 0, 1, 2, 3]),
        ("log2:1", [0, 1, 2, 3, 6, 7, 14, 15], [0, 1, 1, 2, 2, 3, 3, 4]),
        ("log2:8", [0, 6, 7, 14, 15, 30, 31], [3, 3, 3, 3, 4, 4, 5]),
        ("log2:128", [0, 126, 254, 255, 510, 511], [7, 7, 7, 8, 8, 9]),
    ],
)
def test_buckets_are_those_of_the_formula(text, positions, buckets):
    found = bucket_of(text, np.array(positions))
    assert found.tolist() == buckets
    if text.startswith("log2"):
        size = int(text.split(":")[1])
        expected = [max(int(np.log2(size)), int(np.floor(np.log2(p + 1)))) for p in positions]
        assert found.tolist() == expected


@pytest.mark.parametrize("text", ["uniform", "uniform:0", "log3:4", "uniform:-4", ""])
def test_unknown_buckets_are_an_error(text):
    with pytest.raises(SettingsError, match="unknown buckets"):
        parse_buckets(text)


@pytest.mark.parametrize("text", ["uniform:16", "log2:4"])
def test_a_base_rate_keeps_that_many_rows_a_text_and_bucket(text):
    settings = CaptureSettings(buckets=text, base_rate=3.0)
    length, texts = 127, 600
    kept = np.stack([capture.kept_positions(length, i, 0, "q", settings) for i in range(texts)])
    buckets = bucket_of(text, np.arange(length))
    for bucket in np.unique(buckets):
        width = (buckets == bucket).sum()
        rows = kept[:, buckets == bucket].sum(1).mean()
        full = 16 if text.startswith("uniform") else 2.0**bucket
        expected = min(1.0, 3.0 / full) * width
        assert rows == pytest.approx(expected, abs=4 * np.sqrt(expected / texts) + 1e-9), bucket
    again = capture.kept_positions(length, 5, 0, "q", settings)
    assert (again == kept[5]).all()
    others = [
        capture.kept_positions(length, 5, 1, "q", settings),
        capture.kept_positions(length, 5, 0, "k", settings),
    ]
    assert not any((again == other).all() for other in others)


@pytest.fixture(scope="module")
def speaker():
    return tiny_language_model("llama"), tiny_tokenizer()


def captured(speaker, out, **options):
    model, tokenizer = speaker
    changes = {
        key: options.pop(key)
        for key in tuple(options)
        if key in CaptureSettings.__dataclass_fields__
    }
    settings = CaptureSettings(**{"buckets": "uniform:8", **changes})
    texts = options.pop("texts", TEXTS)
    return capture.capture(
        model, tokenizer, texts, out=out, name="tiny", settings=settings, **options
    )


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_files_hold_every_token_of_every_head(speaker, tmp_path):
    model, tokenizer = speaker
    done = captured(speaker, tmp_path)
    lengths = [len(tokenizer(text)["input_ids"]) for text in SENTENCES]
    names = {
        f"l{layer:02d}h{h:02d}{kind}"
        for layer in range(2)
        for kind, heads in (("q", 4), ("k", 2))
        for h in range(heads)
    }
    assert set(done.rows) == names
    assert set(done.rows.values()) == {sum(lengths)}
    table = pq.read_table(tmp_path / "l01h03q" / "data.parquet").to_pydict()
    assert set(table) == {"bucket", "example_id", "position", "vector", "sliding_window"}
    assert sorted(zip(table["example_id"], table["position"], strict=True)) == [
        (i, p) for i, n in enumerate(lengths) for p in range(n)
    ]
    assert table["bucket"] == [p // 8 for p in table["position"]]
    assert set(table["sliding_window"]) == {None}
    ids = torch.tensor([tokenizer(SENTENCES[2])["input_ids"]])
    [(_, q1, k1)] = layer_vectors(model, ids, [1], False)
    rows = [i for i, e in enumerate(table["example_id"]) if e == 2]
    assert np.allclose(np.array(table["vector"])[rows], q1[0, 3].numpy(), atol=1e-4)
    keys = pq.read_table(tmp_path / "l01h01k" / "data.parquet").to_pydict()
    rows = [i for i, e in enumerate(keys["example_id"]) if e == 2]
    assert np.allclose(np.array(keys["vector"])[rows], k1[0, 1].numpy(), atol=1e-4)


def test_a_window_is_written_beside_its_vectors(tmp_path):
    speaker = tiny_language_model("gemma3"), tiny_tokenizer()
    captured(speaker, tmp_path)
    windows = [
        set(
            pq.read_table(tmp_path / f"l{layer:02d}h00q" / "data.parquet")[
                "sliding_window"
            ].to_pylist()
        )
        for layer in (0, 1)
    ]
    assert windows == [{40}, {None}]


def test_chosen_heads_bring_the_keys_they_use(speaker, tmp_path):
    done = captured(speaker, tmp_path, heads=[Head(0, 3), Head(1, 0), Head(1, 1)])
    assert set(done.rows) == {"l00h03q", "l00h01k", "l01h00q", "l01h01q", "l01h00k"}
    meta = (tmp_path / "capture.json").read_text()
    assert '"head_sampling": "selection"' in meta


def test_the_old_layout_has_a_folder_a_model(speaker, tmp_path):
    old = captured(speaker, tmp_path / "old", layout="old")
    new = captured(speaker, tmp_path / "new")
    assert old.folder == tmp_path / "old" / "tiny"
    left, right = files(old.folder), files(new.folder)
    same = {name for name in left if name.endswith(".parquet")}
    assert same
    assert all(left[name] == right[name] for name in same)


def test_the_same_inputs_give_the_same_bytes_whatever_the_batch(speaker, tmp_path):
    one = captured(speaker, tmp_path / "a", base_rate=2.0, batch_size=2)
    two = captured(speaker, tmp_path / "b", base_rate=2.0, batch_size=2)
    assert files(one.folder) == files(two.folder)
    three = captured(speaker, tmp_path / "c", base_rate=2.0, batch_size=5)
    assert three.rows == one.rows
    other = captured(speaker, tmp_path / "d", base_rate=2.0, seed=1)
    assert other.rows != one.rows


def test_bos_and_max_length_are_honoured(speaker, tmp_path):
    done = captured(speaker, tmp_path, bos=True, max_length=6)
    assert set(done.rows.values()) == {5 * 6}


@pytest.mark.parametrize("done_portions", [0, 1, 2])
def test_a_killed_capture_goes_on_where_it_stopped(speaker, tmp_path, monkeypatch, done_portions):
    monkeypatch.setattr(capture, "_PORTION_TEXTS", 2)
    whole = captured(speaker, tmp_path / "whole")
    real, calls = capture.capture_portion, []

    class Killed(Exception):
        pass

    def dying(model, portion, path, *rest):
        if len(calls) == done_portions:
            real(model, portion, path, *rest)
            (path / "done").unlink()  # killed before the marker
            raise Killed
        calls.append(portion[0])
        real(model, portion, path, *rest)

    monkeypatch.setattr(capture, "capture_portion", dying)
    with pytest.raises(Killed):
        captured(speaker, tmp_path / "killed")
    resumed = []

    def counting(model, portion, path, *rest):
        resumed.append(portion[0])
        real(model, portion, path, *rest)

    monkeypatch.setattr(capture, "capture_portion", counting)
    with pytest.raises(ArtefactError, match="there is a capture here already"):
        captured(speaker, tmp_path / "killed")
    captured(speaker, tmp_path / "killed", resume=True)
    assert resumed == list(range(2 * done_portions, 5, 2))  # finished portions were not run again
    assert files(tmp_path / "killed") == files(whole.folder)


def test_what_another_capture_staged_is_not_taken_for_this_ones(speaker, tmp_path, monkeypatch):
    whole = captured(speaker, tmp_path / "whole")

    def killed(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as before:
        before.setattr(capture, "_assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            captured(speaker, tmp_path / "out", pre_rope=True)
    (tmp_path / "out" / "capture.json").unlink()
    captured(speaker, tmp_path / "out")
    assert files(tmp_path / "out") == files(whole.folder)


def test_resuming_a_finished_capture_does_nothing(speaker, tmp_path, monkeypatch):
    done = captured(speaker, tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(capture, "capture_portion", None)
    again = captured(speaker, tmp_path, resume=True)
    assert again == done
    assert files(tmp_path) == before
    with pytest.raises(ArtefactError, match="with other settings"):
        captured(speaker, tmp_path, resume=True, seed=3)


def test_only_one_portion_of_texts_is_held_at_once(speaker, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "_PORTION_TEXTS", 2)
    held = []
    real = capture.capture_portion

    def watching(model, portion, path, *rest):
        held.append(len(portion[1]))
        real(model, portion, path, *rest)
        assert (path / "done").exists()

    monkeypatch.setattr(capture, "capture_portion", watching)
    captured(speaker, tmp_path)
    assert held == [2, 2, 1]
    assert not (tmp_path / capture.STAGING).exists()


def test_alibi_captures_say_what_is_not_in_the_vectors(speaker, tmp_path):
    assert captured(speaker, tmp_path / "llama").note == ""
    bloom = tiny_language_model("bloom"), tiny_tokenizer()
    done = captured(bloom, tmp_path / "bloom")
    assert "ALiBi adds a bias on keys" in done.note
    assert done.note in (tmp_path / "bloom" / "README.md").read_text()
