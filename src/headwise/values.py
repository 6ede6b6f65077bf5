"""Frozen values and JSON: one way there and one way back.

A saved value is a frozen dataclass without torch. `to_plain` turns it into what JSON can hold;
`from_plain` builds it again and checks every field against its type, so that a missing field, a
wrong kind, a NaN or an absurd count is an `ArtefactError` and never a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import BaseModel, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema, to_json

from headwise.errors import ArtefactError, SettingsError, reported_as

Value = TypeVar("Value")
OMITTED: dict[str, bool] = {"omit_none": True}  # metadata of a field that is left out if None
MOST = 100_000  # no model has more layers or heads; a larger count is damage
MOST_HEADS = 1_000_000  # layers times heads
Count = Annotated[int, Field(ge=1, le=MOST)]
Width = Annotated[int, Field(ge=1, le=100 * MOST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Numbers:
    """How an array of finite numbers with a fixed number of axes is read from nested lists."""

    def __init__(self, axes: int) -> None:
        self.axes = axes

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._array)

    def _array(self, value: object) -> np.ndarray:
        wrong = f"not a table of finite numbers with {self.axes} axes"
        try:
            array = np.array(value)
        except ValueError:  # ragged
            raise ValueError(wrong) from None
        # text that looks like a number is none: np.array(["1"], dtype=float) would take it
        if array.ndim != self.axes or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ValueError(wrong)
        return array.astype(float)


class _NoneIfEmpty:
    """How an optional section is read that is written as {} where there is none."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # A validator in front would turn JSON into Python, where strict takes no list for a tuple.
        nothing = core_schema.no_info_plain_validator_function(lambda value: None)
        return core_schema.tagged_union_schema(
            {"": handler(source), "{}": nothing}, lambda value: "{}" if value == {} else ""
        )


Empty = _NoneIfEmpty()
HeadArray = Annotated[np.ndarray, _Numbers(2)]  # [layer][head]
BucketArray = Annotated[np.ndarray, _Numbers(3)]  # [layer][head][bucket]
PooledArray = Annotated[np.ndarray, _Numbers(4)]  # [layer][head][query bucket][key bucket]


def to_plain(value: object) -> Any:
    """What JSON can hold: dataclasses by field name, arrays and tuples as lists.

    A value with a `to_json` of its own (one that adds what follows from its fields) is asked. This
    is not pydantic's `dump_python`: that knows neither `to_json` nor `OMITTED` nor arrays.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return value.to_json() if hasattr(value, "to_json") else plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def plain_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass for JSON; `class_` is written as `class`."""
    parts = {f: getattr(value, f.name) for f in fields(value)}
    return {
        f.name.rstrip("_"): to_plain(part)
        for f, part in parts.items()
        if not (part is None and f.metadata.get("omit_none"))
    }


@cache
def _adapter(kind: Any) -> Any:  # a TypeAdapter; its generic form cannot be checked at run time
    return TypeAdapter(kind)


_AGAIN = "write it again with headwise; a hand-edited or damaged file is not used"


def from_plain(kind: type[Value] | GenericAlias, body: object, where: object) -> Value:
    """Build a value from parsed JSON; the first part that does not fit its type is reported."""
    what = "not a value that JSON can hold"  # too deep, or a lone surrogate
    with reported_as(ArtefactError, what, ValueError, where=where, fix=_AGAIN):
        raw = to_json(body)
    try:
        value: Value = _adapter(cast(Any, kind)).validate_json(raw, strict=True)
    except ValidationError as error:
        first, *more = error.errors(include_url=False)
        place = ".".join(str(part) for part in first["loc"] if part != "")[:200] or "the file"
        also = f" (and {len(more)} more faults)" if more else ""
        message = f"{place}: {first['msg'][:200]}{also}"
        raise ArtefactError(message, where=where, fix=_AGAIN) from None
    except SettingsError as error:  # a value's own check, which does not know the file
        raise ArtefactError(str(error).splitlines()[0], where=where, fix=_AGAIN) from None
    if (b"NaN" in raw or b"Infinity" in raw) and not _is_finite(body):
        message = "it holds a NaN or an infinity where no field says so"
        raise ArtefactError(message, where=where, fix=_AGAIN)
    return value


def _is_finite(body: object) -> bool:
    if isinstance(body, dict):
        return all(_is_finite(part) for part in body.values())
    if isinstance(body, (list, tuple)):
        return all(_is_finite(part) for part in body)
    return not isinstance(body, float) or math.isfinite(body)
