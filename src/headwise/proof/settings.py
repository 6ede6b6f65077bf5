"""What evaluations and completions depend on besides the model and the texts; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from typing_extensions import Doc

from headwise.keywords import BatchSize, Flags, MaxLength, Patches, Seed


@dataclass(frozen=True)
class EvaluateSettings:
    """Keywords of `evaluate`, options of `headwise evaluate`."""

    patches: Patches = ()
    heads: Annotated[
        str | None, Doc("Heads to ablate one by one: a selection, `all` or `none`.")
    ] = None
    max_length: MaxLength = 512
    whole: Annotated[
        bool,
        Doc("Losses of whole texts, in windows of --max-length that overlap by half."),
    ] = False
    max_texts: Annotated[int, Doc("Texts used to judge heads."), Ge(2)] = 64
    max_tokens: Annotated[int | None, Doc("Read no more tokens of each text set."), Ge(2)] = None
    adaptive: Annotated[
        bool,
        Doc("Judge heads on as many texts as decide, or on all."),
        Flags("--adaptive/--fixed"),
    ] = True
    batch_size: BatchSize = 4
    tasks: Annotated[Sequence[str], Doc("lm-evaluation-harness tasks as well.")] = ()
    paper: Annotated[
        bool | None,
        Doc("The paper's 12 prompts as a text set; default: for BLOOM without --texts."),
    ] = None
    force: Annotated[bool, Doc("Apply patches to another base.")] = False
    seed: Seed = 0


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; the defaults are the paper's."""

    new_tokens: Annotated[int, Doc("Tokens to add."), Ge(1)] = 100
    temperature: Annotated[float, Doc("0 is greedy."), Ge(0)] = 0.7
    top_p: Annotated[float, Doc("Nucleus sampling."), Ge(0.01), Le(1)] = 0.92
    seed: Seed = 42
