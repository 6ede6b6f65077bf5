"""How a model is loaded: keywords of `load_model`, options of every verb that loads one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from headwise.artefacts import is_there
from headwise.errors import ModelError
from headwise.keywords import AllowPickle, Bos, DeviceMap, Dtype, RemoteCode, Stream
from headwise.models.patient import PATIENTS, patient_dir

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


@dataclass(frozen=True)
class LoadSettings:
    """Precision, place and trust; how texts start, and where weights stay."""

    device_map: DeviceMap = None
    dtype: Dtype = None
    allow_pickle: AllowPickle = False
    trust_remote_code: RemoteCode = False
    bos: Bos = None
    stream: Stream = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ModelError(f"unknown --dtype {self.dtype!r}", fix=" or ".join(DTYPES))


def model_path(name: str) -> Path:
    """Where a model is, if it is on this machine; a path to nothing is refused."""
    if not name.strip():
        raise ModelError("the name of the model is empty", fix="pass a hub id or a directory")
    path = patient_dir() if name in PATIENTS else Path(name)
    if path.suffix == ".gguf" and not path.is_file():
        raise ModelError("no such GGUF file", where=path, fix="check the path")
    if not is_there(path) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError("no such model directory", where=name, fix="check the path")
    near = difflib.get_close_matches(name, PATIENTS, 1, cutoff=0.8)
    if near and not is_there(path):
        raise ModelError(f"no such model: {name}", fix=f"did you mean {near[0]!r}?")
    return path
