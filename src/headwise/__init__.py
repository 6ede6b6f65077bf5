"""headwise: diagnose, repair, prove and measure the attention heads of causal language models."""

from __future__ import annotations

import importlib
from typing import Any

# name -> module; loaded on first use, so that `headwise --help` does not import torch (PEP 562)
_PUBLIC = {
    "Head": "heads",
    "HeadMap": "heads",
    "Diagnosis": "diagnosis.values",
    "Patch": "models.patch",
    "diagnose": "diagnosis.diagnose",
    "load_model": "models.loading",
    "check": "forward.separability",
    "survey": "diagnosis.survey",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
