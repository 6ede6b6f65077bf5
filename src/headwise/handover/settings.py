"""What `export` writes; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc


@dataclass(frozen=True)
class ExportSettings:
    """One target, and what is accepted on the way to it."""

    peft: Annotated[Path | None, Doc("Folder for an exact PEFT adapter.")] = None
    gguf: Annotated[Path | None, Doc("The base's GGUF file with the patch inside.")] = None
    lora_gguf: Annotated[Path | None, Doc("A LoRA that llama.cpp adds to the base.")] = None
    full_rank: Annotated[bool, Doc("PEFT: also if the change is not of low rank.")] = False
    force: Annotated[bool, Doc("Accept another base.")] = False
