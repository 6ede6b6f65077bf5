"""headwise: diagnose, repair, prove and measure the attention heads of causal language models.

Everything a verb of the command line does can be done from Python: load a model, look at its heads,
plan, repair, evaluate, compare. Functions take a `LoadedModel`, or a model and its tokenizer; what
they return is a frozen value that can be saved, shown and put into a frame. What is not here
(settings, records inside the values) is imported from its package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# name -> module; loaded on first use, so that `headwise --help` does not import torch (PEP 562)
_PUBLIC = {
    # the verbs, in the order of the story
    "load_model": "models.loading",
    "read_texts": "texts.text_sets",
    "check": "forward.separability",
    "attention": "forward.patterns",
    "ablated": "forward.ablated",
    "diagnose": "diagnosis.diagnose",
    "survey": "diagnosis.survey",
    "triage": "triaging.triage",
    "checkup": "checkups.checkup",
    "make_plan": "surgery.plan",
    "recipe_named": "surgery.recipe",
    "repair": "therapy.repair",
    "apply_patches": "handover.merging",
    "export_peft": "handover.adapter",
    "evaluate": "proof.evaluate",
    "prune": "pruning.prune",
    "stream": "pruning.stream",
    "compare": "proof.compare",
    "complete": "proof.completions",
    "capture": "plasticity.capture",
    "measure_plasticity": "plasticity.run",
    "run_study": "studies.run",
    "write_report": "report.write",
    "HeadWatch": "watch.head_watch",
    "watch_checkpoints": "watch.checkpoints",
    # what they take and return
    "LoadedModel": "models.loaded_model",
    "TextSet": "texts.text_sets",
    "Diagnosis": "diagnosis.values",
    "Triage": "triaging.values",
    "TriageSettings": "triaging.settings",
    "SurgeryPlan": "surgery.plan",
    "Recipe": "surgery.recipe",
    "Patch": "models.patch",
    "Evaluation": "proof.values",
    "Comparison": "proof.values",
    "HeadwiseError": "errors",
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from headwise.checkups.checkup import checkup as checkup
    from headwise.diagnosis.diagnose import diagnose as diagnose
    from headwise.diagnosis.survey import survey as survey
    from headwise.diagnosis.values import Diagnosis as Diagnosis
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.forward.ablated import ablated as ablated
    from headwise.forward.patterns import attention as attention
    from headwise.forward.separability import check as check
    from headwise.handover.adapter import export_peft as export_peft
    from headwise.handover.merging import apply_patches as apply_patches
    from headwise.models.loaded_model import LoadedModel as LoadedModel
    from headwise.models.loading import load_model as load_model
    from headwise.models.patch import Patch as Patch
    from headwise.plasticity.capture import capture as capture
    from headwise.plasticity.run import measure_plasticity as measure_plasticity
    from headwise.proof.compare import compare as compare
    from headwise.proof.completions import complete as complete
    from headwise.proof.evaluate import evaluate as evaluate
    from headwise.proof.values import Comparison as Comparison, Evaluation as Evaluation
    from headwise.pruning.prune import prune as prune
    from headwise.pruning.stream import stream as stream
    from headwise.report.write import write_report as write_report
    from headwise.studies.run import run_study as run_study
    from headwise.surgery.plan import SurgeryPlan as SurgeryPlan, make_plan as make_plan
    from headwise.surgery.recipe import Recipe as Recipe, recipe_named as recipe_named
    from headwise.texts.text_sets import TextSet as TextSet, read_texts as read_texts
    from headwise.therapy.repair import repair as repair
    from headwise.triaging.settings import TriageSettings as TriageSettings
    from headwise.triaging.triage import triage as triage
    from headwise.triaging.values import Triage as Triage
    from headwise.watch.checkpoints import watch_checkpoints as watch_checkpoints
    from headwise.watch.head_watch import HeadWatch as HeadWatch
else:  # a type checker that saw this would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'headwise' has no attribute {name!r}")
        return getattr(importlib.import_module(f"headwise.{_PUBLIC[name]}"), name)

    def __dir__() -> list[str]:
        return sorted(_PUBLIC)
