"""How heads are chosen from a diagnosis and operated on; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import Doc

from headwise.keywords import Seed

Init = Literal["xavier_normal", "xavier_uniform", "match-healthy"]
Preset = Literal["pass1", "pass2", "column"]
KvPolicy = Literal["whole-group", "queries-only"]
Mode = Literal["surgery", "sham", "gradient-only", "ablate", "random-heads", "lora"]
Compensate = Literal["none", "mean"]


@dataclass(frozen=True)
class PlanSettings:
    """Keywords of `make_plan`, options of `headwise plan`."""

    heads: Annotated[str | None, Doc("e.g. 'L5-22H9-15 & sick'")] = None
    preset: Annotated[Preset | None, Doc("A selection of the paper's.")] = None
    column: Annotated[int | None, Doc("Head index for the preset column.")] = None
    init: Annotated[Init, Doc("How queries, keys and values are drawn.")] = "xavier_normal"
    compensate: Annotated[Compensate, Doc("What the bias gives for the head.")] = "none"
    kv_policy: Annotated[KvPolicy, Doc("Of heads that share keys and values.")] = "whole-group"
    seed: Seed = 42
