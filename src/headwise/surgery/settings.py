"""What a repair is asked to do: one value that the library, the command line and studies share.

Texts stand in it by name and hash; they themselves come beside it, as the model does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from headwise.errors import SelectionError
from headwise.provenance import TextInfo
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.plan_settings import Mode
from headwise.surgery.recipe import Recipe

MODES: tuple[str, ...] = get_args(Mode)
TRAINED = ("surgery", "gradient-only", "random-heads", "lora")
TREATED = ("surgery", "sham", "random-heads")
AUTO = "auto"  # the treatment that is chosen head by head


@dataclass(frozen=True)
class RepairRequest:
    """Which heads are repaired, how, and with what in view; contradictions are refused."""

    plan: SurgeryPlan | None = field(default=None, repr=False)  # None: auto looks for ill heads
    mode: Mode = "surgery"
    treatment: str | None = None  # of all heads; None: the plan's own, else reinitialise
    dose: float | None = None
    recipe: Recipe | None = field(default=None, repr=False)  # None: fitted to model and corpus
    changes: Mapping[str, float] = field(default_factory=dict)  # to the recipe, applied last
    seed: int = 0
    keep: TextInfo | None = None  # text on which the model is held to what stock says
    excluded: TextInfo | None = None  # text of a later evaluation, left out of corpus and keep
    bos: bool | None = None  # None: the plan's, else as decided at loading
    force: bool = False  # accept a plan for other weights
    tracker: str | None = None

    def __post_init__(self) -> None:
        if self.dose is not None and (self.treatment is None or not math.isfinite(self.dose)):
            raise SelectionError(
                f"the dose {self.dose} needs a treatment and must be finite", fix="name both"
            )
        if self.treatment is not None and self.mode not in TREATED:
            raise SelectionError(
                f"the mode {self.mode} does not treat heads",
                fix=f"leave the treatment out, or choose {', '.join(TREATED)}",
            )
        if self.auto and self.mode != "surgery":
            raise SelectionError(
                f"auto chooses a treatment and trains it, the mode {self.mode} does not",
                fix=f"leave the mode out, or name a treatment for {self.mode}",
            )
        if self.auto and self.dose is not None:
            raise SelectionError(
                f"auto looks for the dose of each head, and {self.dose:g} is asked for",
                fix="leave the dose out, or name a treatment",
            )

    def require_plan(self) -> None:
        """Refuse a request without heads: only auto finds them itself."""
        if self.plan is None and not self.auto:
            raise SelectionError("no plan", fix="pass --plan plan.yaml, or --treatment auto")
        if self.plan is not None and not self.plan.targets:
            raise SelectionError("the plan has no targets", fix="choose heads, or --treatment auto")

    @property
    def auto(self) -> bool:
        """Whether treatments and doses are chosen by measurement."""
        return self.treatment == AUTO

    @property
    def kept(self) -> str:
        """Hash of the text on which the model is held to stock; empty if there is none."""
        return "" if self.keep is None else self.keep.sha256
