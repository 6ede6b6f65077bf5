"""Random damage to every kind of artefact: told, mended or without effect, but never a result.

A damaged file must end in an error that headwise knows, in the same value as before (white space,
a cache that is made again), or not be read at all. Another value is a silent wrong result.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import torch

from campaigns import desk
from campaigns.tally import Tally
from headwise.artefacts import load_artefact, to_json
from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError
from headwise.integrity.checksums import file_checksum
from headwise.models.patch import Patch
from headwise.models.tensor_files import read_safetensors
from headwise.plasticity.head_group import analyse_group
from headwise.plasticity.reader import find_heads, group_heads
from headwise.plasticity.run import HeadFailure
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.values import CaptureInfo, HeadRecord, PlasticitySummary
from headwise.plasticity.writer import end_portion, is_whole
from headwise.proof.completed_texts import Completions
from headwise.proof.values import Comparison, Evaluation
from headwise.studies.study import started_study
from headwise.studies.summary import StudySummary
from headwise.surgery.run_state import read_maps, read_trace
from headwise.surgery.values import RunSettings
from headwise.texts.corpus import Corpus
from headwise.therapy.values import Therapy
from headwise.triaging.values import Triage
from headwise.values import to_plain
from headwise.watch.film import Film

Read = Callable[[Path], object]


def damage(raw: bytes, chance: random.Random) -> bytes:
    """The bytes with one random fault."""
    place = chance.randrange(len(raw))
    size = chance.choice((1, 1, 4, 64, 512))
    return chance.choice(
        (
            lambda: (
                raw[:place] + bytes([raw[place] ^ (1 << chance.randrange(8))]) + raw[place + 1 :]
            ),
            lambda: raw[:place] + bytes([chance.randrange(256)]) + raw[place + 1 :],
            lambda: raw[:place],
            lambda: raw[:place] + bytes(size) + raw[place + size :],
            lambda: raw[:place] + chance.randbytes(size) + raw[place + size :],
            lambda: raw[:place] + chance.randbytes(size) + raw[place:],
            lambda: raw[:place] + raw[place + size :],
            lambda: raw[:place] + raw[place : place + size] + raw[place:],
            lambda: _moved_line(raw, chance),
        )
    )()


def _moved_line(raw: bytes, chance: random.Random) -> bytes:
    """One line left out, written twice, or changed for another."""
    lines = raw.splitlines(True)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    way = chance.randrange(3)
    if way == 0:
        del lines[one]
    elif way == 1:
        lines.insert(one, lines[other])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _plain(read: Read) -> Read:
    return lambda path: to_json(to_plain(read(path)))


def _tensors(path):
    tensors, metadata = read_safetensors(path)
    return {k: (v.dtype, v.shape, v.numpy().tobytes()) for k, v in tensors.items()}, metadata


def _patch(path):
    patch = Patch.load(path)
    with patch.applied(desk.loaded().model):
        pass
    return patch.fingerprint(), patch.base_fingerprint(), to_plain(patch.info), patch.documents


def _without_speed(trace):
    rows, validations = trace
    return [{**row.to_json(), "tokens_per_second": 0} for row in rows], validations


def _measured(folder):
    """What plasticity makes of a capture; a head that fails says so."""
    found = find_heads(folder)
    settings = PlasticitySettings(definition="full", dataset_local_root=folder)
    results = [r for g in group_heads(found) for r in analyse_group(found, g, settings)]
    for result in results:
        if isinstance(result, HeadFailure):
            raise HeadwiseError(result.reason)
    return [(r.layer, r.q_head, r.ap_overall) for r in results]


def _damaged_prefix(path):
    """Train on with a damaged cache: the file must be made again as it was."""
    from headwise.surgery.job import Job, _prefix

    run = RunSettings.load(path.parent.parent / "run")
    job = Job(desk.loaded().model, run, Corpus(run.corpus, ()), path.parent)
    return _prefix(job, path, desk.random_block()).numpy().tobytes()


KINDS: dict[str, tuple[str, Read]] = {
    "diagnosis.json": ("diagnosis.json", _plain(Diagnosis.load)),
    "triage.json": ("triage.json", _plain(Triage.load)),
    "evaluation.json": ("evaluation.json", _plain(Evaluation.load)),
    "comparison.json": ("comparison.json", _plain(Comparison.load)),
    "completions.json": ("completions.json", _plain(Completions.load)),
    "survey.json": ("survey.json", lambda path: str(load_artefact(path, "survey"))),
    "run.json": ("run/run.json", _plain(lambda path: RunSettings.load(path.parent))),
    "therapy.json": ("auto/therapy.json", _plain(lambda path: Therapy.load(path.parent))),
    "trace.jsonl": ("run/trace.jsonl", lambda path: _without_speed(read_trace(path.parent))),
    "maps.jsonl": ("run/maps.jsonl", lambda path: to_plain(read_maps(path.parent))),
    "watch.json": ("film/watch.json", _plain(lambda path: Film.load(path.parent))),
    "watch.jsonl": ("film/watch.jsonl", _plain(lambda path: Film.load(path.parent))),
    "patch": ("run/patch.safetensors", _patch),
    "checkpoint": ("run/checkpoints/step-0000003.safetensors", _tensors),
    "best": ("run/checkpoints/best.safetensors", _tensors),
    "prefix cache": (".headwise-prefix/0.safetensors", _damaged_prefix),
    "capture.json": ("qk/capture.json", _plain(lambda path: CaptureInfo.load(path.parent))),
    "captured vectors": ("qk/l01h00k/data.parquet", lambda path: _measured(path.parent.parent)),
    "staged vectors": ("portion/l00q.safetensors", lambda path: _staged(path)),
    "plasticity.json": ("plasticity/plasticity.json", _plain(PlasticitySummary.load)),
    "kept head": ("plasticity/.heads/l00h00.json", _plain(HeadRecord.load)),
    "study.json": ("study/study.json", _plain(started_study)),
    "summary.json": ("study/summary.json", _plain(StudySummary.load)),
}


def _staged(path):
    """A staged portion: whole as it was written, or captured again."""
    return file_checksum(path) if is_whole(path.parent, "a-capture") else "captured again"


def prepare(folder):
    """Files that a finished run has cleaned away, made again."""
    from headwise.models.tensor_files import write_safetensors

    _damaged_prefix(folder / ".headwise-prefix" / "0.safetensors")
    portion = folder / "portion"
    write_safetensors(portion / "l00q.safetensors", {"vectors": torch.ones(2, 3, 4)})
    end_portion(portion, "a-capture")


def corrupt(folder: Path, count: int, seed: int) -> Tally:
    """Damage `count` files, the kinds in turn."""
    prepare(folder)
    tally, chance = Tally("corruptions"), random.Random(seed)
    whole = {kind: (read(folder / name), name) for kind, (name, read) in KINDS.items()}
    with tally.until_stopped():
        for number in range(count):
            kind = list(KINDS)[number % len(KINDS)]
            value, name = whole[kind]
            path = folder / name
            kept = folder / "kept"
            shutil.copyfile(path, kept)
            damaged = damage(path.read_bytes(), chance)
            path.write_bytes(damaged)
            _judge(tally, kind, value, path, damaged == kept.read_bytes())
            shutil.copyfile(kept, path)
    return tally


def _judge(tally, kind, value, path, untouched):
    try:
        with redirect_stderr(StringIO()), np.errstate(all="ignore"):
            found = KINDS[kind][1](path)
    except HeadwiseError:
        tally.survives(kind, "told")
    except Exception as error:  # noqa: BLE001 - a traceback is what is looked for
        tally.fails(kind, f"{type(error).__name__}: {error}")
    else:
        if found == value:
            tally.survives(kind, "not changed" if untouched else "without effect or mended")
        elif found == "captured again":
            tally.survives(kind, "mended")
        else:
            tally.fails(kind, "another value was read without a word")
