"""Processes and signals: nothing is left running, and nothing waits that should end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from headwise.errors import HeadwiseError
from headwise.ranks import Place, launched_place

CALL = [sys.executable, "-m", "headwise"]


def started(*words, **environment):
    return subprocess.Popen(
        [*map(str, words)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SPREADING = """
import time
from headwise.workers import spread
for _ in spread(time.sleep, [0.01] * 200, workers=2):
    pass
"""


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
def test_a_process_killed_while_its_workers_start_leaves_no_orphan(after):
    parent = started(sys.executable, "-c", SPREADING)
    children: list[psutil.Process] = []
    while not children and parent.poll() is None:
        children = psutil.Process(parent.pid).children(recursive=True)
    time.sleep(after)
    children = psutil.Process(parent.pid).children(recursive=True) or children
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_a_process_that_waits_for_a_partner_ends_when_it_is_told_to(tmp_path):
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
    process = started(*CALL, "check", "patient", **alone)
    listening = time.monotonic() + 60
    while time.monotonic() < listening:
        if any(c.laddr.port == 29417 for c in psutil.Process(process.pid).net_connections()):
            break
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) != 0


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-1"), ("RANK", "")])
def test_a_launcher_s_number_that_is_none_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(HeadwiseError, match=f"{name} is {value!r}, not a number"):
        launched_place()


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched_place() == Place(0, 1)


def test_a_bad_rank_is_one_message_without_a_traceback():
    process = started(*CALL, "plan", "nowhere.json", "--heads", "sick", RANK="x")
    _, words = process.communicate()
    assert process.returncode == 1
    assert words.startswith("headwise: RANK is 'x', not a number")
    assert "Traceback" not in words


IN_A_DEL = """
import os, signal, sys, time
import headwise.cli
from headwise.cli import main

class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

def app():
    ends = Ends()
    del ends
    time.sleep(8)
    print("it went on")

headwise.cli.app = app
main()
"""


def test_a_signal_that_a_destructor_swallows_comes_again():
    process = started(sys.executable, "-c", IN_A_DEL)
    words, errors = process.communicate()
    assert "it went on" not in words
    assert "KeyboardInterrupt" in errors


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "1"}])
def test_a_poor_terminal_ends_no_verb(tmp_path, model_dir, environment):
    (tmp_path / "few.txt").write_text("The lake froze from shore to shore, and nobody came.")
    words = ["diagnose", str(model_dir), "--texts", str(tmp_path / "few.txt"), "--out"]
    process = started(*CALL, *words, str(tmp_path / "d"), **environment)  # it draws a head grid
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (tmp_path / "d" / "diagnosis.json").exists()


def test_a_closed_standard_output_does_not_undo_what_was_done(tmp_path):
    script = f'{sys.executable} -m headwise study --init some/model "{tmp_path}/s.yaml" >&-'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s.yaml").exists()


def test_a_name_with_escape_codes_or_markup_is_shown_and_not_obeyed(capsys):
    from headwise.cli.show import Screen, rich_table
    from headwise.tables import table

    name = "\x1b[2Jmodel[red]x\x07"
    assert "\x1b" not in str(HeadwiseError("no such model", where=name))
    assert "\\x1b[2Jmodel" in str(HeadwiseError("no such model", where=name))
    screen = Screen(width=80, highlight=False, force_terminal=False)
    screen.print(f"reading {name}")
    screen.print(rich_table(table("models", ("model", "heads"), [(name, 3)])))
    words = capsys.readouterr().out
    assert "\x1b" not in words
    assert words.count("\\x1b[2Jmodel[red]x\\x07") == 2


def test_a_name_in_a_markdown_table_is_one_cell():
    from headwise.tables import table

    text = table("t", ("model", "p"), [("a|b\n<img src=x>\x1b", "p < 0.05")]).to_markdown()
    assert "| a\\|b \\<img src=x>\\x1b | p < 0.05 |" in text


def test_without_a_home_the_cache_is_where_headwise_cache_says(tmp_path, monkeypatch):
    from pathlib import Path

    from headwise.models import loading

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(loading, "_convert_gguf", lambda path, folder: folder.mkdir(parents=True))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    with pytest.raises(HeadwiseError, match="set HEADWISE_CACHE"):
        loading.converted_gguf(tmp_path / "m.gguf")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HeadwiseError, match="no such file"):  # nothing was converted here
        loading.converted_gguf(tmp_path / "m.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir())
