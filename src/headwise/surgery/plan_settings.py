"""How heads are chosen from a diagnosis and repaired; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from typing_extensions import Doc

from headwise.errors import SelectionError
from headwise.keywords import Seed

Init = Literal["xavier_normal", "xavier_uniform", "match-healthy"]
Preset = Literal["pass1", "pass2", "column"]
KvPolicy = Literal["whole-group", "queries-only"]
Mode = Literal["surgery", "sham", "gradient-only", "ablate", "random-heads", "lora"]
Compensate = Literal["none", "mean"]

MODES: tuple[str, ...] = get_args(Mode)
TREATED = ("surgery", "sham", "random-heads")  # modes that treat heads
AUTO = "auto"  # the treatment that is chosen head by head


@dataclass(frozen=True)
class PlanSettings:
    """Keywords of `make_plan`, options of `headwise plan`, `plan:` of a study and its arms."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    heads: Annotated[str | None, Doc("e.g. 'L5-22H9-15 & sick'")] = None
    preset: Annotated[Preset | None, Doc("A selection of the paper's.")] = None
    column: Annotated[int | None, Doc("Head index for the preset column.")] = None
    init: Annotated[Init, Doc("How queries, keys and values are drawn.")] = "xavier_normal"
    compensate: Annotated[Compensate, Doc("What the bias gives for the head.")] = "none"
    kv_policy: Annotated[KvPolicy, Doc("Of heads that share keys and values.")] = "whole-group"
    seed: Seed = 42


@dataclass(frozen=True)
class RepairSettings:
    """Keywords of `repair`, options of `headwise repair`; contradictions are refused."""

    mode: Annotated[Mode, Doc("The operation, or a control.")] = "surgery"
    treatment: Annotated[
        str | None, Doc("release, centre, ... for all heads; auto: as each needs.")
    ] = None  # None: the plan's own, else reinitialise
    dose: Annotated[float | None, Doc("How much of the treatment.")] = None
    seed: Seed = 0
    force: Annotated[bool, Doc("Accept other weights.")] = False  # than those of the plan
    tracker: Annotated[str | None, Doc("tensorboard, trackio, wandb ...")] = None

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

    @property
    def auto(self) -> bool:
        """Whether treatments and doses are chosen by measurement."""
        return self.treatment == AUTO
