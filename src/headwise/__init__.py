"""headwise: diagnose, repair, prove and measure the attention heads of causal language models.

Everything a verb of the command line does can be done with the names of this module: load a model,
look at its heads, plan, repair, evaluate, compare. Functions take a `LoadedModel`, or a model and
its tokenizer; what they return is a frozen value that can be saved, shown and put into a frame.
"""

from __future__ import annotations

import importlib
from typing import Any

# name -> module; loaded on first use, so that `headwise --help` does not import torch (PEP 562)
_PUBLIC = {
    # the verbs, in the order of the story
    "load_model": "models.loading",
    "check": "forward.separability",
    "diagnose": "diagnosis.diagnose",
    "survey": "diagnosis.survey",
    "triage": "therapy.triage",
    "make_plan": "surgery.plan",
    "repair": "therapy.repair",
    "apply_patches": "handover.merging",
    "evaluate": "proof.evaluate",
    "compare": "proof.compare",
    "complete": "proof.completions",
    "capture": "plasticity.capture",
    "measure_plasticity": "plasticity.run",
    "load_study": "studies.study",
    "run_study": "studies.run",
    "write_report": "report.write",
    "export_peft": "handover.adapter",
    "model_card": "handover.card",
    "push": "handover.push",
    "HeadWatch": "watch.head_watch",
    "watch_checkpoints": "watch.checkpoints",
    # what they take and return
    "LoadedModel": "models.loaded_model",
    "Head": "heads",
    "HeadMap": "heads",
    "HeadCheck": "forward.separability",
    "Diagnosis": "diagnosis.values",
    "Thresholds": "diagnosis.settings",
    "Film": "watch.film",
    "Adapter": "handover.adapter",
    "Triage": "diagnosis.triage_values",
    "TriageSettings": "diagnosis.triage_settings",
    "TriageThresholds": "diagnosis.triage_settings",
    "Survey": "diagnosis.survey",
    "SurgeryPlan": "surgery.plan",
    "Recipe": "surgery.recipe",
    "recipe_named": "surgery.recipe",
    "RepairRun": "therapy.repair",
    "Therapy": "therapy.values",
    "Patch": "models.patch",
    "Evaluation": "proof.evaluation",
    "Comparison": "proof.comparison",
    "Completions": "proof.completed_texts",
    "Prompt": "proof.completed_texts",
    "Sampling": "proof.settings",
    "CaptureSettings": "plasticity.settings",
    "Captured": "plasticity.capture",
    "Plasticity": "plasticity.run",
    "Study": "studies.study",
    "StudySummary": "studies.summary",
    "TextSet": "texts.text_sets",
    "read_texts": "texts.text_sets",
    "Interval": "intervals",
    "HeadwiseError": "errors",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
