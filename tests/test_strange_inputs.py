"""What a stranger may bring: each ends in one message of what, where and fix, nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from headwise import diagnose
from headwise.cli import main
from headwise.diagnosis.settings import Thresholds
from headwise.errors import HeadwiseError, ModelError, SelectionError, SettingsError, TextError
from headwise.heads import select_heads, select_in_layers
from headwise.integrity.checksums import checked_rows, sealed_row
from headwise.models import tokenizing
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.tensor_files import stored_tensors
from headwise.plasticity.settings import CaptureSettings, parse_buckets
from headwise.texts.text_sets import read_texts


@pytest.fixture
def copied(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "model")


def configured(folder, **change):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


def ended(monkeypatch, capsys, *args):
    """The exit code of a command and its words on stderr."""
    monkeypatch.setattr(sys, "argv", ["headwise", *map(str, args)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code, capsys.readouterr().err


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("diagnose", "MODEL", "--low-entropy", "nan"),
        ("diagnose", "MODEL", "--batch-size", "0"),
        ("diagnose", "MODEL", "--max-length", "1"),
        ("diagnose", ""),
        ("diagnose", "MODEL", "--texts", ""),
        ("evaluate", "MODEL", "--seed", "-1"),
        ("evaluate", "MODEL", "--heads", ""),
        ("capture", "MODEL", "--seed", str(2**70)),
        ("capture", "MODEL", "--heads", ""),
        ("capture", "MODEL", "--layers", " "),
        ("capture", "MODEL", "--buckets", "uniform:" + "9" * 40),
        ("capture", "MODEL", "--buckets", "log2:0"),
        ("repair", "MODEL", "--plan", "none.yaml", "--dose", "nan", "--treatment", "release"),
        ("repair", "MODEL", "--plan", "none.yaml", "--dose", "1"),
        ("repair", "MODEL", "--plan", "none.yaml", "--steps", "-1"),
        ("plan", "nowhere", "--heads", "all", "--seed", "-1"),
    ],
)
def test_an_odd_option_is_told_and_nothing_is_written(
    monkeypatch, capsys, tmp_path, model_dir, args
):
    monkeypatch.chdir(tmp_path)
    given = [str(model_dir) if arg == "MODEL" else arg for arg in args]
    code, words = ended(monkeypatch, capsys, *given, "--out", "out")
    assert code in (1, 2)
    assert "Traceback" not in words
    assert "fix " in words or "Usage" in words
    assert not (tmp_path / "out").exists()


def test_odd_settings_are_told_where_they_are_made():
    with pytest.raises(SettingsError, match="counts as low is nan"):
        Thresholds(low_entropy=float("nan"))
    with pytest.raises(SettingsError, match="a seed of -1"):
        CaptureSettings(seed=-1)
    for text in ("uniform:-3", "uniform:0", "log2:", "uniform:٣", "uniform:" + "9" * 40):
        with pytest.raises(SettingsError, match="unknown buckets"):
            parse_buckets(text)
    with pytest.raises(SelectionError, match="the selection is empty"):
        select_in_layers("", None, (0, 1), 4)
    with pytest.raises(SelectionError, match="put `,` `&` or `-` between heads"):
        select_heads("L0H0L1H1", num_layers=2, num_heads=4)


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1,000,000,000"),
        ({"num_hidden_layers": 100}, "100 layers, its weight files hold"),
        ({"num_labels": 10**9}, "num_labels 1,000,000,000"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1"),
        ({"num_attention_heads": 3}, "its config cannot be used .*not a multiple"),
        ({"model_type": ["llama"]}, "its config cannot be used"),
    ],
)
def test_an_absurd_config_is_told_as_such(copied, change, message):
    with pytest.raises(ModelError, match=message):
        load_model(str(configured(copied, **change)), bos=False)


def test_a_config_that_gives_nan_is_told(monkeypatch, capsys, tmp_path, copied):
    configured(copied, rope_parameters={"rope_type": "default", "rope_theta": 0})
    args = ("diagnose", copied, "--no-bos", "--max-length", "16", "--no-figures", "--out")
    code, words = ended(monkeypatch, capsys, *args, tmp_path / "out")
    assert code == 1
    assert "own logits are NaN or infinite everywhere" in words
    assert not (tmp_path / "out").exists()


def test_heads_that_cannot_share_keys_evenly_are_told(tmp_path, tokenizer):
    model = tiny_language_model("llama", num_key_value_heads=8)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="4 heads on 8 key/value heads"):
        load_model(str(tmp_path), bos=False)


def test_a_saved_kernel_that_is_not_installed_is_no_hindrance(copied):
    configured(copied, _attn_implementation="flash_attention_2")
    assert load_model(str(copied), bos=False).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("content", ["null", "[]", "", "\ufeff{}", '{"a":' * 3000])
def test_a_config_of_other_things_is_told(copied, content):
    (copied / "config.json").write_text(content)
    with pytest.raises(HeadwiseError, match=r"(?s)config\.json.*fix"):
        load_model(str(copied), bos=False)


def test_a_pipe_is_not_waited_for(copied, tmp_path):
    (copied / "config.json").unlink()
    os.mkfifo(copied / "config.json")
    with pytest.raises(HeadwiseError, match="a pipe or a device"):
        load_model(str(copied), bos=False)
    os.mkfifo(tmp_path / "texts.txt")
    with pytest.raises(HeadwiseError, match="a pipe or a device"):
        read_texts([str(tmp_path / "texts.txt")])


def changed_header(change):
    def write(path):
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        names = [name for name in header if name != "__metadata__"]
        text = change(header, names) or json.dumps(header)
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + raw[8 + size :])

    return write


def doubled(header, names):
    return json.dumps(header)[:-1] + f", {json.dumps({names[0]: header[names[1]]})[1:]}"


@pytest.mark.parametrize(
    "change",
    [
        lambda h, n: h[n[0]].update(data_offsets=h[n[1]]["data_offsets"]),
        lambda h, n: h[n[0]].update(data_offsets=[-1, 5]),
        lambda h, n: h[n[0]].update(dtype="F99"),
        lambda h, n: h[n[0]].update(dtype="F16"),
        lambda h, n: h.update(__metadata__=5),
        doubled,
    ],
    ids=["overlap", "negative", "no such type", "other type", "metadata", "doubled"],
)
def test_a_wrong_header_is_not_streamed(copied, change):
    changed_header(change)(copied / "model.safetensors")
    with pytest.raises(ModelError, match="damaged or cut off"):
        stored_tensors(copied)


def test_quantised_numbers_are_not_streamed_as_weights(copied):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="stored quantised"):
        load_model(str(copied), bos=False, stream=True)


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors", 5, None])
def test_an_index_cannot_lead_out_of_its_folder(copied, name):
    weights = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})
    (copied / "model.safetensors").rename(copied.parent / "x.safetensors")
    (copied / "model.safetensors.index.json").write_text(weights)
    with pytest.raises(ModelError, match="does not name weight files of this folder"):
        load_model(str(copied), bos=False)


def test_a_file_that_lies_beside_the_weights_is_not_streamed(copied):
    whole = stored_tensors(copied)
    shutil.copy(copied / "model.safetensors", copied / "older.safetensors")
    assert stored_tensors(copied) == whole


# --- texts --------------------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_first_token(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + SENTENCES[0].encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "b"}).encode())
    assert read_texts([str(tmp_path)]).texts == (SENTENCES[0], "b")


def test_binary_files_and_numbers_are_no_texts(tmp_path):
    (tmp_path / "a.txt").write_bytes("the lake".encode("utf-16-le"))
    with pytest.raises(TextError, match="null characters"):
        read_texts([str(tmp_path / "a.txt")])
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    with pytest.raises(TextError, match="it holds numbers"):
        read_texts([str(tmp_path / "b.parquet")])


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [(0, 2), (1, 2), (0, 0, 1, 2), (0, 2, 1), (0, 1, 1)],
    ids=["one lost", "the first lost", "one doubled", "two exchanged", "one for another"],
)
def test_lost_doubled_and_exchanged_lines_are_told(order):
    rows = [json.loads(sealed_row({"step": n, "loss": 1.0}, "run", n)) for n in range(3)]
    assert checked_rows(rows, "run", "x")[2] == {"step": 2, "loss": 1.0}
    with pytest.raises(HeadwiseError, match="or one before it, is damaged"):
        checked_rows([rows[n] for n in order], "run", "x")


def test_rows_of_an_earlier_headwise_are_read_and_unsealed_ones_among_sealed_are_not():
    from headwise.integrity.checksums import _row_checksum

    old = {"step": 4, "run": "run"}
    old["checksum"] = _row_checksum({"step": 4, "run": "run"}, None, frozenset())
    assert checked_rows([old], "run", "x") == [{"step": 4}]
    with pytest.raises(HeadwiseError, match="no checksum"):
        checked_rows([old, {"step": 5}], "run", "x")


# --- watching -----------------------------------------------------------------------------------


def test_a_changed_film_is_told_and_two_writers_are_refused(tmp_path):
    from campaigns import desk
    from headwise.integrity.locks import one_writer
    from headwise.watch.film import FILM, Film

    desk.saved_checkpoints(tmp_path / "checkpoints", steps=(1, 2))
    out = tmp_path / "film"
    with one_writer(out), pytest.raises(HeadwiseError, match="another process writes here"):
        desk.run_watch(out, tmp_path / "checkpoints")
    desk.run_watch(out, tmp_path / "checkpoints")
    first, second = (out / FILM).read_text().splitlines(keepends=True)
    for wrong in (second, first + first, first + second.replace("0.", "0.1", 1)):
        (out / FILM).write_text(wrong)
        with pytest.raises(HeadwiseError, match="damaged"):
            Film.load(out)


# --- quantised weights --------------------------------------------------------------------------


class Packed(torch.nn.Module):
    """A projection as GPTQ has it: whole numbers and scales in buffers, and no weight."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.packed * self.scale).T


def packed_model():
    model = tiny_language_model("llama")
    for layer in model.model.layers:
        for role in "qkvo":
            name = f"{role}_proj"
            setattr(layer.self_attn, name, Packed(getattr(layer.self_attn, name)))
    return LoadedModel("packed", model, tiny_tokenizer()).reading(False)


def test_quantised_heads_are_read_and_ablated_but_not_operated_on(tmp_path):
    from campaigns import desk
    from headwise import capture, check, diagnose, evaluate, repair, triage

    loaded = packed_model()
    found = diagnose(loaded, desk.HELD, max_length=24)
    told = evaluate(loaded, [desk.HELD], heads="L1H0-1", max_texts=3, max_length=24)
    assert told.heads.first_order is None  # a packed kernel may pass no gradient on
    assert capture(loaded, desk.HELD, out=tmp_path / "qk", settings=CaptureSettings(max_length=24))
    for work in (
        lambda: check(loaded),
        lambda: triage(loaded, found, desk.HELD, heads="L1H0"),
        lambda: repair(loaded, None, desk.TEXTS, out=tmp_path / "run", treatment="auto"),
        lambda: repair(loaded, desk.plan(), desk.TEXTS, desk.RECIPE, out=tmp_path / "run"),
    ):
        with pytest.raises(HeadwiseError, match=r"are quantised(?s:.*)before it is quantised"):
            work()
    assert not (tmp_path / "run").exists()


def test_ablation_of_a_quantised_model_is_that_of_the_same_numbers_unpacked():
    from campaigns import desk
    from headwise import evaluate

    packed, plain = packed_model(), packed_model()
    for layer in plain.model.model.layers:
        for role in "qkvo":
            one = getattr(layer.self_attn, f"{role}_proj")
            linear = torch.nn.Linear(one.in_features, one.out_features, bias=False)
            linear.weight.data = (one.packed * one.scale).clone()
            setattr(layer.self_attn, f"{role}_proj", linear)
    costs = [
        evaluate(
            one, [desk.HELD], heads="L0H1,L1H0", max_texts=3, max_length=24
        ).heads.ablation_zero
        for one in (packed, plain)
    ]
    for name, cost in costs[0].items():
        assert cost.value == pytest.approx(costs[1][name].value, abs=1e-5)


def test_two_quantised_models_have_two_fingerprints():
    one, other = packed_model().model, packed_model().model
    assert weight_fingerprint(one) == weight_fingerprint(other)
    other.model.layers[0].self_attn.q_proj.packed[0, 0] += 1
    assert weight_fingerprint(one) != weight_fingerprint(other)


def test_falcon_is_not_taken_for_quantised():
    from headwise.models.architectures import is_packed, require_plain

    model = tiny_language_model("falcon-gqa")
    assert not is_packed(model)
    require_plain(model)


def test_positions_of_mpt_are_known_and_kept_to():
    from headwise.forward.guard import guard
    from headwise.models.loaded_model import LoadedModel

    model = tiny_language_model("mpt", max_seq_len=16)
    assert LoadedModel("mpt", model, tiny_tokenizer()).max_positions == 16
    guard(model)


def test_a_model_that_does_not_run_is_told():
    from headwise.forward.guard import guard

    with pytest.raises(ModelError, match="this 'llama' model does not run"):
        guard(tiny_language_model("llama", num_key_value_heads=8))


def with_split(folder, pattern):
    """The model directory with a tokenizer that first splits by a regular expression."""
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, body["pre_tokenizer"]]}
    path.write_text(json.dumps(body))
    return folder


def test_a_catastrophic_regular_expression_of_a_tokenizer_is_one_message(copied, tmp_path):
    loaded = load_model(str(with_split(copied, "(a+)+$")), bos=False)
    with pytest.raises(TextError, match=r"the tokenizer fails on 'aaaa.*retry-limit"):
        diagnose(loaded, ["a" * 40 + "b"])


def test_a_tokenizer_that_takes_for_ever_is_given_up_with_a_word(copied, monkeypatch):
    loaded = load_model(str(with_split(copied, "(a+)+$")), bos=False)
    monkeypatch.setattr(tokenizing, "PATIENCE", 0.05)  # the text takes about half a second
    with pytest.raises(TextError, match=r"the tokenizer has not ended after"):
        diagnose(loaded, [("a" * 19 + "b ") * 100])


def test_a_bos_outside_of_the_embedding_is_not_used_and_not_accepted(copied, tokenizer):
    path = copied / "tokenizer.json"
    body = json.loads(path.read_text())
    rows = 400
    body["added_tokens"].append(
        {**body["added_tokens"][0], "id": rows + 7, "content": "<far>", "special": True}
    )
    path.write_text(json.dumps(body))
    settings = copied / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": "<far>"}))
    loaded = load_model(str(copied))
    assert loaded.tokenizer.bos_token_id >= loaded.num_embeddings
    assert not loaded.bos
    assert "outside of the embedding" in loaded.first_token.reason
    assert diagnose(loaded, list(SENTENCES)).maps["entropy"].size
    with pytest.raises(ModelError, match=r"--bos: the BOS is token \d+, the model embeds"):
        load_model(str(copied), bos=True)


def test_a_model_max_length_that_is_no_number_is_refused(copied):
    settings = copied / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": "x"}))
    with pytest.raises(ModelError, match="model_max_length is 'x', not a number"):
        load_model(str(copied))
