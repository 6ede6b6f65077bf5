"""A short slice of every campaign; `make faults` and `make fuzz` run them at length."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from campaigns import corruptions, desk, fuzz, kills, soak
from campaigns.tally import Tally
from headwise.errors import HeadwiseError
from headwise.heads import select_heads
from headwise.settings import read_yaml


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return desk.make_artefacts(tmp_path_factory.mktemp("artefacts"))


def test_random_damage_to_any_artefact_is_told_or_without_effect(artefacts):
    tally = corruptions.corrupt(artefacts, 10 * len(corruptions.KINDS), seed=1)
    assert tally.clean, str(tally)
    assert tally.notes["told"] > tally.tried.total() / 2


def test_fuzzed_inputs_end_in_a_value_or_in_a_known_error(artefacts, monkeypatch):
    monkeypatch.chdir(artefacts)
    tally = fuzz.fuzz(artefacts, 3_000, seed=1)
    assert tally.clean, str(tally)
    assert tally.tried.keys() >= {"config", *fuzz.SHARES}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(st.text(), st.text("LH0123456789-&,() sickdeal<>=._")))
def test_any_text_is_a_selection_or_told(text):
    try:
        heads = select_heads(text, num_layers=2, num_heads=4)
    except HeadwiseError:
        return
    assert all(0 <= head.layer < 2 and 0 <= head.index < 4 for head in heads)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("abc01:-&*[]{}<>!'\"\n .#|?%@,~", max_size=60))
def test_any_text_is_yaml_or_told(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    with contextlib.suppress(HeadwiseError):
        assert isinstance(read_yaml(path), dict)


def test_a_table_counts_what_was_wrong():
    tally = Tally("x")
    tally.survives("a", "told")
    tally.fails("a", "example")
    tally.fails("b", "gone", lost=True)
    assert not tally.clean
    assert "| all | 3 | 1 | 1 | 1 |" in str(tally)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
def test_a_killed_run_ends_with_the_same_bytes(tmp_path):
    work, chance, tally = desk.verbs["repair, cached prefix"], random.Random(3), Tally("kills")
    whole = kills._undisturbed(work, tmp_path / "whole", chance)
    kills._killed_run(tally, "repair", work, tmp_path / "run", whole, chance)
    for fault in kills.FAULTS:
        kills._disturb(tally, "repair", work, tmp_path / "fault", whole, fault, chance)
    assert tally.clean, str(tally)


@needs_fork
@pytest.mark.parametrize("fault", ["linked folders", "a stranger's files", "read-only folder"])
def test_a_capture_touches_no_file_of_somebody_else(tmp_path, fault):
    work, chance, tally = desk.verbs["capture"], random.Random(3), Tally("kills")
    whole = kills._undisturbed(work, tmp_path / "whole", chance)
    kills._disturb(tally, "capture", work, tmp_path / "fault", whole, fault, chance)
    assert tally.clean, str(tally)


@needs_fork
def test_processes_that_outlive_a_killed_one_are_seen_and_ended(monkeypatch):
    monkeypatch.setattr(kills, "ORPHANS", 1)

    def leaves_an_orphan(out, *, resume):
        subprocess.Popen(["sleep", "60"])

    process = kills.start(leaves_an_orphan, Path(), resume=False)
    assert kills.wait(process) == 0
    assert not kills._is_gone(process)
    assert kills._is_gone(process)  # it was ended


def test_a_campaign_that_is_stopped_has_a_table_of_what_it_tried():
    tally = Tally("x")
    with tally.until_stopped():
        tally.survives("a", "told")
        os.kill(os.getpid(), signal.SIGTERM)
        tally.survives("a", "told")
    assert "| all | 1 | 1 | 0 | 0 |" in str(tally)
    assert tally.notes["stopped early"] == 1


@pytest.mark.faults
def test_a_long_run_keeps_memory_and_handles(tmp_path):
    tally = soak.soak(tmp_path, 1_000)
    assert tally.clean, str(tally)
