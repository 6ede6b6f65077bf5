"""An evaluation as a value: losses by document, and what every head is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.artefacts import load_artefact, save_artefact
from headwise.diagnosis.values import Diagnosis


@dataclass(frozen=True)
class Evaluation:
    """The body of `evaluation.json`, by name."""

    body: Mapping[str, Any] = field(repr=False)

    def save(self, path: Path) -> Path:
        """Write `evaluation.json`."""
        return save_artefact(path, "evaluation", dict(self.body))

    @staticmethod
    def load(path: Path) -> Evaluation:
        """Read `evaluation.json`."""
        return Evaluation(load_artefact(path, "evaluation"))

    @property
    def diagnosis(self) -> Diagnosis:
        """The heads as they were measured in this condition."""
        return Diagnosis.from_json(self.body["diagnosis"])
