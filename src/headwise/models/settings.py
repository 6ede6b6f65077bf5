"""How a model is loaded: keywords of `load_model`, options of every verb that loads one."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import ModelError
from headwise.keywords import AllowPickle, Bos, DeviceMap, Dtype, RemoteCode, Stream

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
