"""Verbs from settings: a parameter that is a settings dataclass becomes an option per field.

Typer reads a command's signature. `verb` gives it one in which every settings value is written out
(nested ones too), and puts the values together again when the command runs; a wrong value is
refused then, before anything is imported or loaded. A parameter whose default is a settings value
takes the defaults of its options from there.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Gt, Le
from typer.models import ArgumentInfo
from typing_extensions import Doc

from headwise.cli.app import app, quiet
from headwise.keywords import ChangesOf, Flags

Command = Callable[..., None]
Quiet = Annotated[bool, Doc("Print nothing but errors.")]


def verb(
    name: str, short_help: str, *, example: str, without: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Register a function as a verb of the command line, which also takes `--quiet`.

    Fields `without` are no options of this verb: they keep the defaults of their settings.
    """

    def register(function: Command) -> Command:
        every = [*_parameters(function), _option("quiet", Quiet, False)]
        named = {option.name: option for option in reversed(every)}  # of two settings: one option
        options = [o for o in every if named[o.name] is o and o.name not in without]

        @wraps(function)
        def command(**given: Any) -> None:
            token = quiet.set(given.pop("quiet"))
            try:
                function(**_put_together(function, given))
            finally:
                quiet.reset(token)

        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in options}
        del command.__wrapped__  # typer would look through it
        app.command(name, short_help=short_help, epilog=f"Example: headwise {example}")(command)
        return function

    return register


def _parameters(function: Command) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind = kinds[parameter.name]
        if is_dataclass(kind):
            yield from _field_options(kind, parameter.default)
        elif _marks(kind, ChangesOf):
            yield from _change_options(_marks(kind, ChangesOf)[0].model)
        else:
            yield _option(parameter.name, kind, parameter.default)


def _field_options(kind: Any, given: Any = None) -> Iterator[inspect.Parameter]:
    """Options for all documented fields, of nested settings too; `given` settings have defaults."""
    kinds = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            yield from _field_options(kinds[field.name])
        elif _marks(kinds[field.name], Doc, ArgumentInfo):
            default = getattr(given, field.name) if isinstance(given, kind) else _default(field)
            yield _option(field.name, kinds[field.name], default)


def _change_options(model: Any) -> Iterator[inspect.Parameter]:
    """An option without a default for every documented field of a pydantic model."""
    for name, info in model.model_fields.items():
        kind = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        if _marks(kind, Doc):
            yield _option(name, kind, False if info.annotation is bool else None)


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """A typer option from the `Doc`, bounds and `Flags` of a keyword; others stay as they are."""
    docs = _marks(kind, Doc)
    if docs:
        plain, least, most = _plain(get_args(kind)[0]), _marks(kind, Ge, Gt), _marks(kind, Le)
        flags = [one.names for one in _marks(kind, Flags)] or _flag(name, plain, default)
        info = typer.Option(
            *flags,
            help=docs[0].documentation,
            min=_bound(least[0]) if least else None,
            max=most[0].le if most else None,
            show_default=default not in (None, (), []) and default != "",
        )
        default = None if default == () else default
        kind = Annotated[plain | None if default is None else plain, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _marks(kind: Any, *wanted: type) -> list[Any]:
    """What an annotation says besides the type."""
    return [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, wanted)]


def _bound(bound: Ge | Gt) -> Any:
    return bound.ge if isinstance(bound, Ge) else bound.gt


def _flag(name: str, kind: Any, default: Any) -> list[str]:
    """A switch that is off has no `--no-` form; one that may be unset or on has both."""
    dashed = f"--{name.rstrip('_').replace('_', '-')}"
    if kind is bool and default is False:
        return [dashed]
    return [f"{dashed}/--no-{dashed[2:]}"] if kind is bool else [dashed]


def _plain(kind: Any) -> Any:
    """The type as typer knows it: no None in a union, a list for a sequence, else text."""
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not types.NoneType]
        kind = parts[0] if len(parts) == 1 else str
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is collections.abc.Sequence:
        return list[get_args(kind)[0]]  # type: ignore[misc]
    return kind


def _put_together(function: Command, given: dict[str, Any]) -> dict[str, Any]:
    kinds = get_type_hints(function, include_extras=True)
    values: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        changes = _marks(kinds[name], ChangesOf)
        if is_dataclass(kinds[name]):
            values[name] = _settings(kinds[name], given)
        elif changes:
            asked = {one.name: given[one.name] for one in _change_options(changes[0].model)}
            values[name] = {
                key: value
                for key, value in asked.items()
                if value is not None and value is not False  # 0 is a value
            }
        else:
            values[name] = _given(given[name], parameter.default)
    return values


def _settings(kind: Any, given: dict[str, Any]) -> Any:
    """A settings value from what the command line gave; fields that are no options keep theirs."""
    kinds = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            values[field.name] = _settings(kinds[field.name], given)
        elif field.name in given:
            values[field.name] = _given(given[field.name], field.default)
    return kind(**values)


def _given(value: Any, default: Any) -> Any:
    """Typer gives None for a list that is empty, and a list where settings hold a tuple."""
    if isinstance(default, tuple):
        return tuple(value or ())
    return value
