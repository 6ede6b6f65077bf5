"""A loaded model, and how functions take one: as a `LoadedModel`, or as a model and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
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

from headwise.models.description import describe_model
from headwise.models.model_info import ModelInfo

Options = ParamSpec("Options")
Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be looked at, with what identifies it."""

    id: str
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def describe(self) -> ModelInfo:
        """The `model` entry of an artefact."""
        return describe_model(self.model, self.id)

    @property
    def max_positions(self) -> int | None:
        """The positions the model was made for, None where it has no limit of its own."""
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return int(limit) if limit else None


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
