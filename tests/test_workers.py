"""Processes for long work: a lost one starts again, all of them end with whoever asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.workers import apart, spread


def once_killed(path):
    """The second worker that comes here finds the first one's mark."""
    path = Path(path)
    if not path.exists() and path.name != "whole":
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGTERM if path.name == "asked" else signal.SIGKILL)
        time.sleep(5)
    return path.name, os.getpid()


@pytest.mark.parametrize("name", ["killed", "asked"])
def test_a_lost_worker_is_replaced_and_the_others_go_on(tmp_path, name):
    items, lost = [str(tmp_path / name), str(tmp_path / "whole")], []
    found = dict(apart(once_killed, items, workers=2, lost=lost.append))
    assert set(found) == {name, "whole"}
    assert lost == items[:1]
    assert found[name] != int((tmp_path / name).read_text())


def always_killed(item):
    os.kill(os.getpid(), signal.SIGKILL)


def test_work_that_kills_every_worker_is_given_up(tmp_path):
    lost = []
    with pytest.raises(HeadwiseError, match=r"lost 3 times.*\n.*the work"):
        list(apart(always_killed, ["the work"], workers=1, lost=lost.append))
    assert lost == ["the work"] * 2


def own_number(item):
    return os.getpid()


def test_a_worker_is_used_again_for_the_next_item():
    found = list(apart(own_number, list(range(5)), workers=2, lost=print))
    assert len(found) == 5
    assert len(set(found)) <= 2
    assert os.getpid() not in found


def test_work_spread_over_one_pool_comes_back_whole():
    assert sorted(spread(abs, [-2, 1, 3], workers=2)) == [1, 2, 3]


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from headwise.workers import apart

def wait(path):
    try:
        Path(path).write_text(str(os.getpid()))
        time.sleep(60)
    except KeyboardInterrupt:
        Path(path + "-saved").write_text("")
        raise

list(apart(wait, sys.argv[1:], workers=2, lost=print))
"""


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent_and_may_save_before(tmp_path, number):
    items = [tmp_path / "a", tmp_path / "b"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, items)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # a shell's background job is started deaf to Ctrl-C, and so would be what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not all(item.exists() and item.read_text() for item in items):
        time.sleep(0.02)
        assert process.poll() is None
    workers = [int(item.read_text()) for item in items]
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: workers must hear it once
    else:
        process.send_signal(number)
    process.wait(timeout=240)  # a busy machine starts workers slowly
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    saved = [(tmp_path / f"{item.name}-saved").exists() for item in items]
    assert saved == [number == signal.SIGINT] * 2
