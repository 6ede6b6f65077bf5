"""What a repair is asked to do: one value that the library, the command line and studies share.

Texts stand in it by name and hash; they themselves come beside it, as the model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwise.errors import SelectionError
from headwise.provenance import TextInfo
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.plan_settings import RepairSettings
from headwise.surgery.recipe import Recipe

TRAINED = ("surgery", "gradient-only", "random-heads", "lora")


@dataclass(frozen=True)
class RepairRequest(RepairSettings):
    """Which heads are repaired, how, and with what in view."""

    plan: SurgeryPlan | None = field(default=None, repr=False)  # None: auto looks for ill heads
    recipe: Recipe | None = field(default=None, repr=False)  # None: fitted to model and corpus
    # to the recipe, applied last
    changes: Mapping[str, float | bool | str | None] = field(default_factory=dict)
    keep: TextInfo | None = None  # text on which the model is held to what stock says
    also: TextInfo | None = (
        None  # other text that auto's patch is judged on; None: keep, or bundled
    )
    excluded: TextInfo | None = None  # text of a later evaluation, left out of corpus and keep
    bos: bool | None = None  # None: the plan's, else as decided at loading

    def require_plan(self) -> None:
        """Refuse a request without heads: only auto finds them itself."""
        if self.plan is None and not self.auto:
            raise SelectionError("no plan", fix="pass --plan plan.yaml, or --treatment auto")
        if self.plan is not None and not self.plan.targets:
            raise SelectionError("the plan has no targets", fix="choose heads, or --treatment auto")

    @property
    def kept(self) -> str:
        """Hash of the text on which the model is held to stock; empty if there is none."""
        return "" if self.keep is None else self.keep.sha256
