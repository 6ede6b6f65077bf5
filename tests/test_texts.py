"""Texts: every kind of source, what is refused, and batches that lose no token."""

from __future__ import annotations

import copy
import json

import pyarrow
import pyarrow.parquet
import pytest

from headwise.errors import SettingsError, TextError
from headwise.texts.batches import batches, encode_texts
from headwise.texts.settings import TextSettings
from headwise.texts.text_sets import TextSet, bundled_texts, default_texts, read_texts


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_text_file_is_one_text_or_one_a_line(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one\n\ntwo\n")
    assert read_texts([str(path)]).texts == ("one\n\ntwo\n",)
    assert read_texts([str(path)], lines=True).texts == ("one", "two")
    assert read_texts([path]) == read_texts([str(path)])


def test_jsonl_and_parquet_give_their_text_field(tmp_path):
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    assert read_texts([str(lines)]).texts == ("one", "two")
    table = parquet(tmp_path / "x.parquet", text=["three", None, "four"], id=[1, 2, 3])
    assert read_texts([str(table)]).texts == ("three", "four")
    assert read_texts([str(lines), str(table)]).texts == ("one", "two", "three", "four")


def test_a_folder_is_read_in_order_and_only_what_is_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub" / "c.jsonl").write_text(json.dumps({"text": "c"}))
    (tmp_path / "weights.bin").write_bytes(b"\xff")
    assert read_texts([str(tmp_path)]).texts == ("a", "b", "c")


def test_sources_without_text_are_refused(tmp_path):
    (tmp_path / "x.txt").write_text(" \n")
    for source in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(TextError, match="no text found: every source is empty"):
            read_texts([str(source)])


@pytest.mark.parametrize("name", ["gone.txt", "./gone", "/gone/for/good", "gone"])
def test_a_missing_path_is_refused_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # an import would fail
    with pytest.raises(TextError, match="no such file or folder"):
        read_texts([name])


def test_files_of_the_wrong_kind_are_refused_with_their_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(TextError, match="line 2 is not a JSON object with a `text` field"):
        read_texts([str(path)])
    path.write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(TextError, match="line 2"):
        read_texts([str(path)])
    with pytest.raises(TextError, match="no readable `text` column"):
        read_texts([str(parquet(tmp_path / "x.parquet", body=["a"]))])
    (tmp_path / "y.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(TextError, match="no readable `text` column"):
        read_texts([str(tmp_path / "y.parquet")])
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(TextError, match="not UTF-8 text"):
        read_texts([str(tmp_path / "x.txt")])


def test_the_hash_is_of_the_content_not_of_the_name():
    assert TextSet("a", ("x", "y")).sha256 == TextSet("b", ("x", "y")).sha256
    assert TextSet("a", ("x", "y")).sha256 != TextSet("a", ("xy",)).sha256


def test_the_bundled_texts_are_varied_and_long_enough():
    texts = bundled_texts()
    assert len(texts.texts) == texts.describe().count == 12
    assert min(map(len, texts.texts)) > 500
    assert any("def " in text for text in texts.texts)
    assert any("é" in text for text in texts.texts)
    assert default_texts("some/model") == texts


def test_encoding_cuts_and_keeps_the_tokenizers_own_special_tokens(tokenizer):
    [ids] = encode_texts(tokenizer, ["The lake froze from shore to shore."], max_length=5)
    assert len(ids) == 5
    assert ids[0] != tokenizer.bos_token_id  # this tokenizer adds none, like BLOOM's
    [with_bos] = encode_texts(tokenizer, ["The lake froze."], bos=True)
    assert with_bos[0] == tokenizer.bos_token_id
    [once] = encode_texts(tokenizer, ["<bos>The lake froze."], bos=True)
    assert once == with_bos


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "there is no text"),
        (["The lake froze.", "a"], "text 1 has 1 token, at least 2 are needed: 'a'"),
        ([""], "text 0 has 0 tokens"),
    ],
)
def test_texts_that_are_too_short_are_refused(tokenizer, texts, message):
    with pytest.raises(TextError, match=message):
        encode_texts(tokenizer, texts)


def test_bos_needs_a_tokenizer_that_has_one(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.bos_token = None
    with pytest.raises(TextError, match="the tokenizer has no BOS token"):
        encode_texts(without, ["The lake froze."], bos=True)


def test_batches_hold_every_token_once_longest_first():
    encoded = [list(range(1, n + 1)) for n in (3, 7, 2, 5, 7)]
    seen = {}
    widths = []
    for batch in batches(encoded, 2):
        widths.append(batch.ids.shape[1])
        for row, (index, length) in enumerate(zip(batch.index, batch.lengths, strict=True)):
            seen[index] = batch.ids[row, :length].tolist()
            assert not batch.ids[row, length:].any()
    assert widths == [7, 5, 2]
    assert [seen[i] for i in range(5)] == encoded


def test_a_limit_reads_the_first_texts_and_needs_texts(tmp_path):
    (tmp_path / "some.txt").write_text("one line\ntwo lines\nthree lines\n")
    settings = TextSettings((str(tmp_path / "some.txt"),), lines=True, limit=2)
    assert settings.read().texts == ("one line", "two lines")
    with pytest.raises(SettingsError, match="--limit without --texts"):
        TextSettings(limit=2).read()
