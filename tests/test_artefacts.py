"""Artefacts: whole or not at all, the same bytes for the same inputs, refused when not ours."""

from __future__ import annotations

import json
import os
import stat

import pytest

from headwise.artefacts import (
    content_hash,
    load_artefact,
    read_json,
    save_artefact,
    versions,
    write_atomically,
    write_text,
)
from headwise.errors import ArtefactError

BODY = {"b": [[0.1, 1e-17], [2.0, 3.0]], "a": {"text": "naïve", "none": None, "empty": []}}


def test_what_was_saved_is_loaded_to_the_last_bit(tmp_path):
    path = save_artefact(tmp_path / "deep" / "x.json", "diagnosis", BODY)
    body = load_artefact(path, "diagnosis")
    assert body == {"schema": "headwise.diagnosis/1", **BODY}
    assert load_artefact(path, ("evaluation", "diagnosis")) == body


def test_the_same_body_gives_the_same_bytes_whatever_its_order(tmp_path):
    first = save_artefact(tmp_path / "1.json", "x", BODY).read_bytes()
    second = save_artefact(tmp_path / "2.json", "x", dict(reversed(BODY.items()))).read_bytes()
    assert first == second
    told = json.loads(first)
    assert len(told.pop("checksum")) == 64
    assert told == {"schema": "headwise.x/1", **BODY}


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = write_text(tmp_path / "x.txt", "old")

    def half(file):
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtefactError, match=r"cannot write x\.txt: No space left on device"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]  # noqa: PTH208


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = write_text(tmp_path / "x.txt", "old")

    def interrupted(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_a_folder_that_cannot_be_made_is_a_known_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"cannot write x\.json"):
        save_artefact(tmp_path / "file" / "x.json", "x", {})


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_text(tmp_path / "x", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_never_written(tmp_path, value):
    with pytest.raises(ArtefactError, match=r"x\.json would hold a NaN or infinity"):
        save_artefact(tmp_path / "x.json", "x", {"maps": {"mass": [[0.5, value]]}})
    assert not (tmp_path / "x.json").exists()


def test_a_cut_off_file_is_refused(tmp_path):
    path = save_artefact(tmp_path / "x.json", "x", BODY)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtefactError, match="not a complete JSON file"):
        load_artefact(path, "x")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtefactError, match="not UTF-8 text"):
        load_artefact(path, "x")


def test_another_schema_is_refused_by_name(tmp_path):
    path = save_artefact(tmp_path / "x.json", "survey", {})
    with pytest.raises(
        ArtefactError, match=r"'headwise\.survey/1', expected headwise\.diagnosis/1"
    ):
        load_artefact(path, "diagnosis")
    path.write_text('{"schema": "headwise.diagnosis/2"}')
    with pytest.raises(ArtefactError, match="the headwise version that wrote it"):
        load_artefact(path, "diagnosis")
    path.write_text("[1]")
    with pytest.raises(ArtefactError, match="no JSON object"):
        read_json(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match="no such file"):
        load_artefact(tmp_path / "x.json", "x")
    with pytest.raises(ArtefactError, match="no such file"):
        load_artefact(tmp_path, "x")


def test_the_hash_knows_where_parts_end():
    assert content_hash(["ab", "c"]) != content_hash(["a", "bc"])
    assert content_hash(["ab", b"c"]) == content_hash([b"ab", "c"])


def test_versions_name_what_can_change_a_number():
    assert set(versions()) == {"headwise", "torch", "transformers", "numpy", "scipy"}
