"""The modes of a repair: surgery and its controls."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from headwise.errors import SelectionError
from headwise.heads import Head, format_heads
from headwise.settings import changed
from headwise.surgery.plan import SurgeryPlan

Mode = Literal["surgery", "sham", "gradient-only", "ablate", "random-heads", "lora"]


MODES: tuple[str, ...] = get_args(Mode)


TRAINED = ("surgery", "gradient-only", "random-heads", "lora")


_TREATED = ("surgery", "sham", "random-heads")


def require_treated_mode(mode: Mode) -> None:
    """A treatment needs a mode that operates."""
    if mode not in _TREATED:
        raise SelectionError(
            f"the mode {mode} does not treat heads",
            fix=f"leave the treatment out, or choose {', '.join(_TREATED)}",
        )


def random_heads_plan(plan: SurgeryPlan, seed: int) -> SurgeryPlan:
    """As many healthy heads in each layer as it has targets; from the nearest layers if short."""
    generator = np.random.default_rng([seed, 7919])
    free = list(plan.healthy_heads)
    if len(free) < len(plan.target_heads):
        raise SelectionError(
            f"random-heads needs {len(plan.target_heads)} healthy heads, the model has {len(free)}",
            fix="plan fewer heads, or leave this control out",
        )
    chosen: list[Head] = []
    for target in plan.target_heads:
        nearest = min(abs(head.layer - target.layer) for head in free)
        pool = [head for head in free if abs(head.layer - target.layer) == nearest]
        pick = pool[int(generator.integers(len(pool)))]
        free.remove(pick)
        chosen.append(pick)
    same = {name: format_heads(chosen) for name in plan.treatments}
    if len(same) > 1:
        raise SelectionError("random-heads needs a plan with one treatment", fix="use --treatment")
    return changed(plan, targets=format_heads(chosen), watched="", treatments=same)
