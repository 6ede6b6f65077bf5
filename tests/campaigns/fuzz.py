"""Fuzzed inputs: selections, YAML, JSON, patch headers, texts and configs, thousands a second.

An input ends in a value or in an error that headwise knows. A traceback, more than two seconds of
work, a process or a socket that was opened, or a file that an input asked for are faults.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from campaigns import desk
from campaigns.corruptions import KINDS
from campaigns.mutations import BOMB, PIECES, SENTINEL, spoilt_body, spoilt_bytes, spoilt_text
from campaigns.tally import Tally
from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError
from headwise.heads import Head, named_ranges, select_heads, select_in_layers
from headwise.models.loading import load_model
from headwise.models.patch import Patch
from headwise.plasticity.buckets import bucket_of
from headwise.plasticity.settings import load_settings
from headwise.proof.completed_texts import read_prompts
from headwise.studies.study import load_study
from headwise.surgery.plan import SurgeryPlan, make_plan
from headwise.surgery.recipe import recipe_named
from headwise.texts.batches import encode_texts
from headwise.texts.text_sets import read_texts

SLOW = 2.0  # seconds of processor time that no input may take
HANG = 20  # seconds of the clock after which an input is given up
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty")
SHARES = {"selection": 60, "yaml": 14, "json": 14, "patch header": 4, "texts": 8}  # of 100
CONFIG_EVERY = 20_000  # a config loads a model, so it is tried rarely

SELECTIONS = ("L0H1", "L0-1H0-3 & sick", "all - dead", "(sick, band) & L1", "entropy < 1.5", "H2-3")
TOKENS = ("L0", "L1", "H0", "H3", "-", "&", ",", "+", "(", ")", " ", "sick", "dead", "all", "layer")
TOKENS += (">=", "<", "0.5", "1e3", "7", "L0-1", "H1-2", "first_token_mass", "healthy", "1", "band")

executed: list[str] = []


def watch_events(event: str, args: tuple) -> None:
    """An audit hook: what no input may make headwise do."""
    if event.startswith(FORBIDDEN):
        executed.append(f"{event} {args!r:.200}")


class Inputs:
    """Spoilt inputs of every kind, and what reads them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.diagnosis = Diagnosis.load(folder / "diagnosis.json")
        self.sets = self.diagnosis.head_sets()
        self.yaml_texts = _yaml_texts(folder)
        self.yaml = [yaml.safe_load(text) for text in self.yaml_texts]
        self.json = {
            kind: (name, json.loads((folder / name).read_text()))
            for kind, (name, _) in KINDS.items()
            if name.endswith(".json")
        }
        self.patch = (folder / "run/patch.safetensors").read_bytes()
        self.config = json.loads((folder / "model/config.json").read_text())
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)

    def selection(self) -> Callable[[], object]:
        chance = self.chance
        text = "".join(chance.choice(TOKENS) for _ in range(chance.randint(1, 14)))
        if chance.random() < 0.3:
            text = spoilt_text(chance.choice(SELECTIONS), chance)
        way = chance.randrange(20)
        if way == 0:
            return lambda: Head.parse(text)
        if way == 1:
            return lambda: select_in_layers(text, text, (0, 1), 4)
        if way == 2:
            return lambda: named_ranges(text, num_layers=2, num_heads=4)
        if way == 3:
            return lambda: bucket_of(text, np.arange(4))
        options = {"num_layers": 2, "num_heads": 4, "sets": self.sets, "maps": self.diagnosis.maps}
        return lambda: select_heads(text, **options)

    def yaml_file(self) -> Callable[[], object]:
        chance, path = self.chance, self.scratch / "x.yaml"
        number = chance.randrange(len(self.yaml))
        body = self.yaml[number]
        way = chance.random()
        if way < 0.5:
            text = json.dumps(spoilt_body(body, chance))  # JSON is YAML too
        elif way < 0.95:
            text = spoilt_text(self.yaml_texts[number], chance)
        else:
            text = chance.choice((BOMB, *PIECES))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        readers = (SurgeryPlan.load, lambda p: recipe_named(str(p)), lambda p: load_study(str(p)))
        return lambda: (*readers, load_settings)[number](path)

    def json_file(self) -> Callable[[], object]:
        chance = self.chance
        kind = chance.choice(list(self.json))
        name, body = self.json[kind]
        path = self.scratch / Path(name).name
        text = json.dumps(spoilt_body(body, chance))
        if chance.random() < 0.3:
            text = spoilt_text(text, chance)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        read = KINDS[kind][1]
        if kind == "diagnosis.json":
            return lambda: make_plan(Diagnosis.load(path), heads="sick").table()
        return lambda: read(path)

    def patch_header(self) -> Callable[[], object]:
        chance, path = self.chance, self.scratch / "patch.safetensors"
        size = int.from_bytes(self.patch[:8], "little")
        header = json.loads(self.patch[8 : 8 + size])
        if chance.random() < 0.6:
            told = header["__metadata__"]
            key = chance.choice(("spans", "info"))
            told[key] = json.dumps(spoilt_body(json.loads(told[key]), chance))
            header = spoilt_body(header, chance) if chance.random() < 0.3 else header
            raw = _sealed(header, self.patch[8 + size :])
        else:
            raw = spoilt_bytes(self.patch, chance)
        path.write_bytes(raw)
        return lambda: _tried_on(path)

    def text_file(self) -> Callable[[], object]:
        chance = self.chance
        suffix = chance.choice((".jsonl", ".jsonl", ".txt", ".prompts.jsonl"))
        row = json.dumps({"text": "A lighthouse keeper.", "prompt": "A"}, ensure_ascii=False)
        raw = spoilt_text(f"{row}\n{row}\n", chance).encode("utf-8", "surrogatepass")
        raw = spoilt_bytes(raw, chance) if chance.random() < 0.3 else raw
        path = self.scratch / f"x{suffix}"
        path.write_bytes(raw)
        if suffix == ".prompts.jsonl":
            return lambda: read_prompts(path)
        return lambda: _encoded(path, lines=chance.random() < 0.5)

    def config_file(self) -> Callable[[], object]:
        folder = self.scratch / "model"
        shutil.copytree(self.folder / "model", folder, dirs_exist_ok=True)
        body = spoilt_body(self.config, self.chance)
        (folder / "config.json").write_text(json.dumps(body))
        return lambda: load_model(str(folder), bos=False)


def _yaml_texts(folder):
    plan = desk.plan()
    plan.save(folder / "plan.yaml")
    recipe = desk.RECIPE.model_dump(exclude={"name"})
    study = desk.small_study(folder).model_dump(mode="json")
    measured = {"dataset_local_root": str(folder / "qk"), "definition": "full", "pairs": "all"}
    return (
        (folder / "plan.yaml").read_text(),
        *(yaml.safe_dump(b) for b in (recipe, study, measured)),
    )


def _sealed(header, data):
    """A file whose checksum is right, so that its content is looked at."""
    from headwise.models.tensor_files import _checksum

    told = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(told, dict):
        rest = {key: value for key, value in header.items() if key != "__metadata__"}
        told["checksum"] = _checksum(rest, told, [data])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def _tried_on(path):
    patch = Patch.load(path)
    with patch.applied(desk.loaded().model, force=True):
        return


def _encoded(path, lines):
    found = read_texts([str(path)], lines=lines)
    return encode_texts(desk.loaded().tokenizer, found.texts, max_length=16)


def _give_up(number, frame):
    raise TimeoutError(f"more than {HANG} s")


def fuzz(folder: Path, count: int, seed: int, minutes: float | None = None) -> Tally:
    """Try `count` inputs, or as many as the minutes allow."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    tally, inputs = Tally("fuzzed inputs"), Inputs(folder, seed)
    sys.addaudithook(watch_events)
    signal.signal(signal.SIGALRM, _give_up)
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    makers = dict(zip(SHARES, (inputs.selection, inputs.yaml_file, inputs.json_file), strict=False))
    makers |= {"patch header": inputs.patch_header, "texts": inputs.text_file}
    os.chdir(inputs.scratch)
    executed.clear()
    with tally.until_stopped():
        for number in range(count):
            if number % 1000 == 0 and time.monotonic() > end:
                break
            kind = kinds[number % len(kinds)]
            maker = makers[kind]
            if number % CONFIG_EVERY == 3:
                kind, maker = "config", inputs.config_file
            _try(tally, kind, maker())
    for found in [*executed, *map(str, inputs.scratch.rglob(SENTINEL))]:
        tally.fails("code executed", found)
    return tally


def _try(tally, kind, call):
    started = time.process_time()
    signal.alarm(HANG)
    try:
        call()
        how = "accepted"
    except HeadwiseError:
        how = "told"
    except TimeoutError as error:
        return tally.fails(kind, error, lost=True)
    except Exception:  # noqa: BLE001 - a traceback is what is looked for
        return tally.fails(kind, traceback.format_exc()[-1200:])
    finally:
        signal.alarm(0)
    if time.process_time() - started > SLOW:
        return tally.fails(kind, f"{time.process_time() - started:.1f} s", lost=True)
    return tally.survives(kind, how)
