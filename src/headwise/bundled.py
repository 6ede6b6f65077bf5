"""Where the bundled files are: the patient, texts, prompts, studies, the report's parts."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
