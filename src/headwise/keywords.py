"""Keywords that several verbs share: type, help and bounds, written once and without torch.

A verb's settings are a frozen dataclass in its package's `settings.py`. Each field is a keyword of
the library function and, if it has a `Doc`, an option of the command line with the same name and
default (`headwise.cli.verbs` makes the options; `tests/test_settings.py` compares all three).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc


@dataclass(frozen=True)
class Flags:
    """How the command line spells a keyword where that is not `--its-name`."""

    names: str


@dataclass(frozen=True)
class ChangesOf:
    """Marks a mapping of changes to a settings file: fields with a `Doc` are options, if given."""

    model: type


Backend = Literal["joblib", "dask"]
Seed = Annotated[int, Doc("Seed of everything random."), Ge(0), Le(2**32 - 1)]
MaxLength = Annotated[int, Doc("Cut each text at this many tokens."), Ge(2)]
BatchSize = Annotated[int, Doc("Texts a forward pass."), Ge(1)]
Patches = Annotated[
    Sequence[Path], Doc("patch.safetensors; several are stacked."), Flags("--patch")
]
Bos = Annotated[bool | None, Doc("A BOS before each text; default: as the model needs it.")]
Stream = Annotated[
    bool | None, Doc("Read weights from disk layer by layer; default: if they exceed memory.")
]
Dtype = Annotated[str | None, Doc("float32, bfloat16 or float16.")]
DeviceMap = Annotated[str | None, Doc("`auto`, or a .json of module: device (cpu, disk, 0).")]
AllowPickle = Annotated[bool, Doc("Also load pickled weights.")]
RemoteCode = Annotated[bool, Doc("Run the model's own code.")]


def keywords_of(settings: Any) -> dict[str, Any]:
    """The fields of a settings value, as the keywords of its library function."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}
