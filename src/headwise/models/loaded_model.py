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
from headwise.models.values import ModelInfo

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

    @cached_property
    def first_token(self) -> FirstToken:
        """How every text starts, and why; decided once, with no patch on the model."""
        return self.decided or decide_first_token(self.model, self.tokenizer)

    @property
    def bos(self) -> bool:
        """Whether every text starts with a BOS."""
        return self.first_token.bos

    def starting_with(self, bos: bool | None) -> LoadedModel:
        """The same model with the first token that is asked for; None changes nothing."""
        if bos is None:
            return self
        return replace(self, decided=decide_first_token(self.model, self.tokenizer, bos))

    def inheriting(self, bos: bool | None, source: str) -> LoadedModel:
        """The same model with the first token of an artefact; a mismatch is refused."""
        return replace(self, decided=self.first_token.inherited(bos, source))

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
        told = f"the tokenizer has {tokens} tokens, the model embeds {self.num_embeddings}"
        return (Alarm("tokenizer-larger-than-embedding", told),)

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
        loaded = LoadedModel(name, first, tokenizer, _asked(first, tokenizer, options))
        return function(loaded, *rest, **options)

    return cast(_TakesModel[Options, Result], call)


def _asked(model: Any, tokenizer: Any, options: dict[str, Any]) -> FirstToken | None:
    """An explicit `bos` spares the measuring."""
    bos = options.get("bos")
    return None if bos is None else decide_first_token(model, tokenizer, bos)
