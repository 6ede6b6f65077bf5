"""The bundled patient: where its files are, and its texts.

The patient is a small BLOOM that the project grew itself (`patients/grow.py`); its card is the
README.md beside the weights. Nothing here imports torch, so `--help` and the reports stay fast.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Literal

from headwise.bundled import DATA
from headwise.errors import ArtefactError, reported_as

PATIENTS = ("patient", "patient-empty")  # asleep: values and outputs kept; empty: decayed away
Split = Literal["train", "second", "heldout"]


def patient_dir() -> Path:
    """The directory of the patient: an ordinary Hugging Face model directory with `texts/`."""
    return DATA / "patient"


def empty_patch_path() -> Path:
    """The patch that turns the patient into its sibling whose dead heads are empty."""
    return DATA / "patient-empty" / "patch.safetensors"


def patient_texts(split: Split, domain: str | None = None) -> list[str]:
    """The texts of one split, in file order; `domain` keeps `scripture` or `union` only.

    `train` is rich in parallel scripture, `second` is prose alone, `heldout` holds both and shares
    no document with the other two.
    """
    path = patient_dir() / "texts" / f"{split}.jsonl.xz"
    with reported_as(
        ArtefactError,
        "the patient's texts cannot be read",
        FileNotFoundError,
        lzma.LZMAError,
        UnicodeDecodeError,
        where=path,
        fix="reinstall headwise; splits are train, second and heldout",
    ):
        lines = lzma.decompress(path.read_bytes()).decode().rstrip("\n").split("\n")
    rows = [json.loads(line) for line in lines]
    return [row["text"] for row in rows if domain is None or row["domain"] == domain]
