"""A loaded model, and how functions take one: as a `LoadedModel`, or as a model and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
    runtime_checkable,
)

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.alarms import Alarm
from headwise.models.architectures import max_positions
from headwise.models.description import describe_model
from headwise.models.first_token import FirstToken, decide_first_token, num_embeddings
from headwise.models.values import ModelInfo, model_name
from headwise.progress import Progress, silent, stage

Options = ParamSpec("Options")
Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be looked at, with what identifies it."""

    id: str
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    decided: FirstToken | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"LoadedModel({model_name(self.id)}, {self.model.config.model_type})"

    @cached_property
    def first_token(self) -> FirstToken:
        """How every text starts, and why; decided once, with no patch on the model."""
        return self.decided or decide_first_token(self.model, self.tokenizer)

    @property
    def bos(self) -> bool:
        """Whether every text starts with a BOS."""
        return self.first_token.bos

    def reading(
        self,
        bos: bool | None = None,
        *artefacts: tuple[bool | None, str],
        progress: Progress = silent,
    ) -> LoadedModel:
        """The same model with the first token of a piece of work; the one place that decides it.

        `bos` is what is asked for, None if nothing is. `artefacts` are what the work goes on from,
        each with its first token and its name: they overrule what was decided at loading, which
        `progress` hears; two that differ are refused, and so is one that differs from `bos`.
        """
        decided = self.decided
        if bos is not None:
            decided = decide_first_token(self.model, self.tokenizer, bos)
        known = [(value, source) for value, source in artefacts if value is not None]
        if known:
            decided = decided or self.first_token
            before = decided.bos
            for value, source in known:
                decided = decided.inherited(value, source)
            if decided.bos != before:
                stage(str(decided), progress)
        return replace(self, decided=decided)

    @property
    def num_embeddings(self) -> int:
        """Tokens that the model has an embedding for."""
        return num_embeddings(self.model)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What is wrong with the model as it was loaded."""
        tokens = len(self.tokenizer) if self.tokenizer is not None else 0
        if tokens <= self.num_embeddings:
            return ()
        message = f"the tokenizer has {tokens} tokens, the model embeds {self.num_embeddings}"
        return (Alarm("tokenizer-larger-than-embedding", message),)

    def length(self, asked: int) -> int:
        """A text length, at most the positions the model was made for."""
        return min(asked, self.max_positions or asked)

    def describe(self) -> ModelInfo:
        """The `model` entry of an artefact."""
        return describe_model(self.model, self.id)

    @property
    def max_positions(self) -> int | None:
        """The positions the model was made for, None where it has no limit of its own."""
        return max_positions(self.model)


@runtime_checkable  # so that the tests' type checks can look at it
class _TakesModel(Protocol, Generic[Options, Made]):
    """Both ways to call: with a `LoadedModel`, or with a model and its tokenizer."""

    @overload
    def __call__(
        self, loaded: LoadedModel, /, *args: Options.args, **options: Options.kwargs
    ) -> Made: ...

    @overload
    def __call__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        /,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> Made: ...


def takes_model(
    function: Callable[Concatenate[LoadedModel, Options], Result],
) -> _TakesModel[Options, Result]:
    """Let a function that works on a `LoadedModel` also take a model and a tokenizer.

    A bare model is named by its config, or by `name=`.
    """

    @wraps(function)
    def call(first: Any, *args: Any, **options: Any) -> Result:
        if isinstance(first, LoadedModel):
            return function(first, *args, **options)
        name = options.pop("name", None) or first.config._name_or_path
        name = name or str(first.config.model_type)
        tokenizer, *rest = args if args else (options.pop("tokenizer", None),)
        return function(LoadedModel(name, first, tokenizer), *rest, **options)

    return cast(_TakesModel[Options, Result], call)
