"""Progress: told by the library, drawn by the command line alone."""

from __future__ import annotations

import contextlib
import io
import sys
from contextvars import ContextVar

from headwise.cli import progress_bar
from headwise.cli.progress_bar import progress_bars
from headwise.progress import silent, stage, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_every_item_is_told_when_it_is_done():
    told = []
    told.extend(track("ab", "letters", lambda *what: told.append(what)))
    start, first, second = [("letters", n, 2, "") for n in range(3)]
    assert told == [start, "a", first, "b", second]
    told.clear()
    assert list(track([], "nothing", lambda *what: told.append(what))) == told == []


def test_quiet_is_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "quiet", ContextVar("asked", default=True))
    with progress_bars() as progress:
        assert progress is silent
        stage("a stage", progress)
        list(track("abc", "letters", progress))
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_lines_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
    with progress_bars() as progress:
        stage("a stage", progress)
        for done in range(7):
            progress("work", done, 6, f"loss {done}" if done else "")
    out, err = capsys.readouterr()
    assert out == "a stage\n"
    told = "work: 3/6 loss 3, 18 s left\nwork: 6/6 loss 6, 0 s left\n"
    assert err == told  # 6 seconds a step, a line every 15


def test_on_a_terminal_a_bar_is_drawn_and_taken_away(capsys, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bars() as progress:
        stage("a stage", progress)
        progress("work", 1, 3, "")
        progress("work", 2, 3, "loss 0.5")
        progress("more", 0, 2, "")
    assert "a stage" in capsys.readouterr().out
    drawn = screen.getvalue()
    assert "work" in drawn
    assert "2/3" in drawn
    assert "more" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 2  # the cursor is back


def test_a_bar_that_an_error_leaves_behind_is_removed(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with contextlib.suppress(ValueError), progress_bars() as progress:
        progress("work", 0, 3, "")
        raise ValueError
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1
