"""Kills at random moments of every resumable verb, and what else stops a run.

A child is forked, does the work, and is killed; so a kill costs a fraction of a second and not the
seconds that importing torch takes. What the last resume leaves must be what an undisturbed run
leaves, byte by byte (the speed of a step apart).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import torch

from campaigns import desk
from campaigns.tally import Tally
from headwise.artefacts import TEMPORARY
from headwise.errors import HeadwiseError
from headwise.plasticity.capture import STAGING
from headwise.plasticity.run import HEADS_FOLDER
from headwise.studies.run import run_study
from headwise.surgery.job import PREFIX

Work = Callable[..., object]
KILLS_A_RUN = 4
TRACEBACK = "traceback.txt"
PATIENCE = 300  # seconds after which a run counts as hung
ORPHANS = 20  # seconds in which a killed process's workers must have ended
# a study loads models, plasticity starts interpreters: several times the cost of the others
ROUNDS = {"study": 10, "plasticity": 5, "repair --treatment auto": 12}
FAULTS = ("SIGTERM", "full disk", "two writers", "read-only folder", "a file for a folder")
FAULTS += ("a linked lock", "linked folders", "a stranger's files", "leftovers of another model")
HIDDEN = (PREFIX, STAGING, HEADS_FOLDER)  # folders that are gone when a run ends


def _study(out, *, folder, resume=False):
    run_study(desk.small_study(folder), out=out)


def _plasticity(out, *, folder, resume=False):
    desk.run_plasticity(out, folder / "qk", resume=resume)


def works(folder: Path) -> dict[str, Work]:
    """Every resumable verb."""
    desk.saved_model(folder)
    desk.run_capture(folder / "qk")
    desk.saved_checkpoints(folder / "checkpoints")
    return {
        **desk.verbs,
        "watch": partial(desk.run_watch, source=folder / "checkpoints"),
        "study": partial(_study, folder=folder),
        "plasticity": partial(_plasticity, folder=folder),
    }


def start(
    work: Work, out: Path, *, resume: bool, before: Callable[[], object] | None = None
) -> int:
    """Fork a child that does the work: it exits with 0, 1 (told), 2 (a traceback) or 130."""
    process = os.fork()
    if process:
        return process
    code = 2
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(null, number)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if before is not None:
            before()
        work(out, resume=resume)
        code = 0
    except HeadwiseError:
        code = 1
    except KeyboardInterrupt:
        code = 130
    except Exception:  # noqa: BLE001 - a traceback is what is looked for
        (out.parent / TRACEBACK).write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _traceback(out: Path) -> str:
    path = out.parent / TRACEBACK
    return "\n" + path.read_text()[-800:] if path.exists() else ""


def wait(process: int) -> int | None:
    """The exit code, minus the signal that ended it; None if it had to be given up."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def digest(out: Path) -> dict[str, str]:
    """A hash of every file that a run leaves, hidden ones and speeds left out."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not any(part.startswith(".") for part in path.parts):
            found[name] = hashlib.sha256(_content(path)).hexdigest()
    return found


def _content(path: Path) -> bytes:
    if path.name != "trace.jsonl":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return json.dumps([{**row, "tokens_per_second": 0} for row in rows]).encode()


def kill(folder: Path, count: int, seed: int, minutes: float | None = None) -> Tally:
    """At least `count` kills over all verbs in turn, and every other fault once a verb."""
    tally, chance = Tally("kills"), random.Random(seed)
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    verbs = works(folder)
    whole = {name: _undisturbed(work, folder / "whole", chance) for name, work in verbs.items()}
    names = list(verbs)
    number = 0
    with tally.until_stopped():
        while sum(tally.tried[verb] for verb in verbs) < count and time.monotonic() < end:
            name = names[number % len(names)]
            number += 1
            if number <= ROUNDS.get(name, count) * len(names):
                _killed_run(tally, name, verbs[name], folder / "run", whole[name], chance)
        for name, fault in product(verbs, FAULTS):
            if time.monotonic() < end:
                _disturb(tally, name, verbs[name], folder / "fault", whole[name], fault, chance)
    return tally


def _undisturbed(work: Work, out: Path, chance: random.Random) -> tuple[dict[str, str], float]:
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    code = wait(start(work, out, resume=False))
    assert code == 0, f"an undisturbed run ended with {code}"
    return digest(out), time.monotonic() - started


def _killed_run(tally, name, work, out, whole, chance):
    """Kill a run a few times, then let it finish."""
    shutil.rmtree(out, ignore_errors=True)
    expected, seconds = whole
    kills = 0
    for _ in range(KILLS_A_RUN):
        process = start(work, out, resume=out.exists())
        time.sleep(chance.random() * seconds)
        os.kill(process, signal.SIGKILL)
        code = wait(process)
        if not _is_gone(process):
            return tally.fails(name, "its workers live on", lost=True)
        if code == 0:
            break  # it was done before its kill
        kills += 1
        if code != -signal.SIGKILL:
            return tally.fails(name, f"ended with {code} before its kill{_traceback(out)}")
    return _finish(tally, name, work, out, expected, kills, "resumed to the same bytes")


def _is_gone(group: int) -> bool:
    """Whether all processes that a killed one had started end soon after it."""
    end = time.monotonic() + ORPHANS
    while time.monotonic() < end:
        alive = [one for one in psutil.process_iter(["status"]) if _group_of(one) == group]
        if all(one.info["status"] == psutil.STATUS_ZOMBIE for one in alive):
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


def _group_of(process: psutil.Process) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return None


def _finish(tally, name, work, out, expected, count, how):
    code = wait(start(work, out, resume=True))
    if code != 0:
        return tally.fails(name, f"could not be resumed: {code}{_traceback(out)}", lost=True)
    found = digest(out)
    if found != expected:
        apart = [key for key in found.keys() | expected if found.get(key) != expected.get(key)]
        return tally.fails(name, f"other bytes in {sorted(apart)}")
    left = [str(path) for path in out.rglob(f".*{TEMPORARY}")]
    if left:
        return tally.fails(name, f"left behind: {left}", lost=True)
    return tally.survives(name, how, count)


def _disturb(tally, name, work, out, whole, fault, chance):
    """One fault that is no kill; the run must end in a word, and go on afterwards."""
    shutil.rmtree(out, ignore_errors=True)
    expected, seconds = whole
    if fault == "two writers":
        return _two_writers(tally, name, work, out, expected)
    if fault == "a linked lock":
        return _linked_lock(tally, name, work, out)
    if fault == "linked folders":
        return _linked_folders(tally, name, work, out, expected)
    if fault == "leftovers of another model":
        return _leftovers(tally, name, work, out, whole, chance)
    if fault == "a stranger's files":
        return _strangers_files(tally, name, work, out, expected)
    if fault == "a file for a folder":
        return _told(tally, fault, work, _file_at(out))
    if fault == "read-only folder":
        out.mkdir(mode=0o555)
        return _told(tally, fault, work, out, _powerless)
    if fault == "full disk":
        sizes = (resource.RLIMIT_FSIZE, (chance.randrange(200, 8000),) * 2)
        code = wait(start(work, out, resume=False, before=partial(resource.setrlimit, *sizes)))
    else:
        process = start(work, out, resume=False)
        time.sleep(chance.random() * seconds)
        os.kill(process, signal.SIGTERM)
        code = wait(process)
    if code not in (0, 1, 130, -signal.SIGTERM):
        return tally.fails(fault, f"{name} ended with {code}{_traceback(out)}")
    return _finish(tally, fault, work, out, expected, 1, "told, then resumed to the same bytes")


def _powerless() -> None:
    """Give up root's power to write everywhere (capset of Linux); others have none."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("the process keeps its capabilities")


def _file_at(out: Path) -> Path:
    out.parent.mkdir(exist_ok=True)
    out.write_text("a file")
    return out


def _told(tally, fault, work, out, before=None):
    code = wait(start(work, out, resume=False, before=before))
    if out.is_file():
        out.unlink()
    else:
        shutil.rmtree(out, ignore_errors=True)
    if code != 1:
        return tally.fails(fault, f"ended with {code}, not with a word")
    return tally.survives(fault, "told")


def _linked_lock(tally, name, work, out):
    """A lock that is a link to somebody's file: refused or not, the file is untouched."""
    precious = out.parent / "precious.txt"
    precious.write_text("do not touch")
    out.mkdir()
    (out / ".lock").symlink_to(precious)
    code = wait(start(work, out, resume=False))
    if code not in (0, 1) or precious.read_text() != "do not touch":
        return tally.fails("a linked lock", f"{name} ended with {code}: {precious.read_text()!r}")
    shutil.rmtree(out)
    return tally.survives("a linked lock", "the file behind it is untouched")


FOREIGN = (
    f".mine{TEMPORARY}",
    f".run.json.0123abcd-0123abcd{TEMPORARY}",
    "README.md",
    "notes/mine.txt",
    "prefix/mine.txt",
    "checkpoints/step-mine.safetensors",
    f"{PREFIX}/mine.safetensors",
    f"{STAGING}/portion-000000/mine.safetensors",
    f"{STAGING}/portion-mine/mine.txt",
    f"{HEADS_FOLDER}/mine.json",
    ".workers/mine",
)


def _strangers_files(tally, name, work, out, expected):
    """Files that look like leftovers of ours but are not stay through a whole run."""
    out.mkdir()
    foreign = [out / place for place in FOREIGN]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for resume in (False, True):
        code = wait(start(work, out, resume=resume))
        kept = [path for path in foreign if path.exists() and path.read_text() == "mine"]
        if code not in (0, 1) or kept != foreign:
            gone = [str(path.relative_to(out)) for path in foreign if path not in kept]
            text = f"{name} ended with {code}, gone: {gone}{_traceback(out)}"
            return tally.fails("a stranger's files", text)
    shutil.rmtree(out)
    return tally.survives("a stranger's files", "none was touched")


def _linked_folders(tally, name, work, out, expected):
    """Each folder of a run is a link to somebody else's, with files of the same names in it."""
    inside = {up for path in expected for up in Path(path).parents}
    for place in sorted(inside.union(map(Path, HIDDEN)) - {Path()}):
        shutil.rmtree(out, ignore_errors=True)
        theirs = out.parent / "theirs"
        shutil.rmtree(theirs, ignore_errors=True)
        for path in [*expected, f"{place}/0.safetensors", f"{place}/l00h00.json"]:
            if Path(path).is_relative_to(place):
                mine = theirs / Path(path).relative_to(place)
                mine.parent.mkdir(parents=True, exist_ok=True)
                mine.write_text("mine")
        before = bits(theirs)
        (out / place).parent.mkdir(parents=True)
        (out / place).symlink_to(theirs)
        code = wait(start(work, out, resume=False))
        if code not in (0, 1) or bits(theirs) != before:
            text = f"{name} with {place} ended with {code}{_traceback(out)}"
            return tally.fails("linked folders", text)
    shutil.rmtree(out)
    return tally.survives("linked folders", "nothing behind a link was touched")


def bits(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _leftovers(tally, name, work, out, whole, chance):
    """What a killed run of another model left, without the file that says whose it is."""
    expected, seconds = whole
    process = start(work, out, resume=False, before=_another_model)
    time.sleep((0.5 + chance.random() / 2) * seconds)
    os.kill(process, signal.SIGKILL)
    wait(process)
    for path in out.rglob("*.json"):
        path.unlink()
    code = wait(start(work, out, resume=False))
    if code == 1:
        return tally.survives("leftovers of another model", "told")
    if code != 0 or digest(out) != expected:
        text = f"{name} ended with {code}{_traceback(out)}"
        return tally.fails("leftovers of another model", text)
    return tally.survives("leftovers of another model", "without effect")


def _another_model() -> None:
    with torch.no_grad():
        for weights in desk.loaded().model.parameters():
            weights.mul_(1.1)


def _two_writers(tally, name, work, out, expected):
    """The second of two processes in one folder is refused, the first one is not disturbed."""
    first = start(work, out, resume=False)
    while not (out / ".lock").exists():
        if os.waitpid(first, os.WNOHANG)[0]:
            return tally.fails("two writers", f"{name} never held its folder")
        time.sleep(0.001)
    os.kill(first, signal.SIGSTOP)
    second = wait(start(work, out, resume=True))
    os.kill(first, signal.SIGCONT)
    code = wait(first)
    if second != 1 or code != 0:
        return tally.fails(
            "two writers", f"{name}: the first ended with {code}, the second {second}"
        )
    if digest(out) != expected:
        return tally.fails("two writers", f"{name}: other bytes")
    return tally.survives("two writers", "the second was refused")
