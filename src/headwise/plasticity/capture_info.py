"""What `capture.json` says about a folder of captured vectors: a value without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headwise.artefacts import load_artefact, save_artefact
from headwise.models.values import ModelInfo
from headwise.plasticity.settings import CaptureSettings
from headwise.provenance import TextInfo
from headwise.values import OMITTED, from_plain, to_plain

FILE = "capture.json"


@dataclass(frozen=True)
class CaptureInfo:
    """One capture: of what, how, and how far it has come."""

    model: ModelInfo
    texts: TextInfo
    settings: CaptureSettings
    heads: tuple[str, ...]
    capture_point: str
    note: str
    versions: dict[str, str]
    head_sampling: Literal["selection"] | None = field(default=None, metadata=OMITTED)
    rows: dict[str, int] = field(default_factory=dict, repr=False)  # `l00h00q` -> rows
    # `l00h00q` -> of its Parquet file
    checksums: dict[str, str] = field(default_factory=dict, repr=False)
    finished: bool = False
    folder: Path | None = field(default=None, metadata=OMITTED, compare=False)  # not written

    def same_work(self, other: CaptureInfo) -> bool:
        """Whether both would write the same vectors; progress and versions do not count."""
        mine, yours = (
            replace(info, versions={}, rows={}, checksums={}, finished=False)
            for info in (self, other)
        )
        return mine == yours

    def save(self, folder: Path) -> Path:
        """Write `capture.json`."""
        return save_artefact(folder / FILE, "capture", to_plain(replace(self, folder=None)))

    @staticmethod
    def load(folder: Path) -> CaptureInfo:
        """Read `capture.json`; a damaged one is an `ArtefactError`."""
        path = folder / FILE
        info: CaptureInfo = from_plain(CaptureInfo, load_artefact(path, "capture"), path)
        return replace(info, folder=folder)
