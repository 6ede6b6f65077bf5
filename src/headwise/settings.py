"""Settings files: one YAML mapping, checked by pydantic, with errors that name the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headwise.artefacts import read_text
from headwise.errors import SettingsError, reported_as

_LARGEST, _DEEPEST, _MOST_NODES = 1_000_000, 50, 100_000  # bytes, levels, values with aliases
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast
# what the constructors of YAML's own types raise on a bad date, number or key
_BAD_VALUES = (ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError)


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping of bounded size, or a clear error."""
    text = read_text(path)
    what, fix = "not readable as YAML", "correct the file at the place that is named"
    with reported_as(SettingsError, what, yaml.YAMLError, *_BAD_VALUES, where=path, fix=fix):
        body = parse_yaml(text)
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise SettingsError("not a YAML mapping", where=path, fix="write it as `key: value` lines")
    return body


def parse_yaml(text: str) -> object:
    """The value of one YAML document; bombs and absurd values are a `ValueError`."""
    if len(text) > _LARGEST:
        raise ValueError(f"more than {_LARGEST:,} characters")
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):  # without recursion, unlike all that follows
        depth += isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent))
        depth -= isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent))
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} levels")
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        value: object = loader.construct_document(node)
    finally:
        loader.dispose()
    _require_plain(value)
    return value


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, with every alias written out."""
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("an alias that holds itself")
        return known[id(node)]
    known[id(node)] = 0
    inner: list[Any] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
    parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
    total = 1 + sum(_count(part, known) for part in parts)
    if total > _MOST_NODES:
        raise ValueError(f"more than {_MOST_NODES:,} values, with aliases written out")
    known[id(node)] = total
    return total


def _require_plain(value: object) -> None:
    """Refuse numbers that nothing here counts to, and text that cannot be written or opened."""
    if isinstance(value, dict):
        for key, part in value.items():
            _require_plain(key)
            _require_plain(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            _require_plain(part)
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("a whole number of more than 63 bits")
    elif isinstance(value, str):
        value.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        if "\0" in value:
            raise ValueError("a null character in a text")


Settings = TypeVar("Settings", bound=BaseModel)


def validated(kind: type[Settings], body: Mapping[str, Any], where: object) -> Settings:
    """Build settings; unknown keys and wrong values become one readable error."""
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            message = f"{key}: {problem['msg']} (got {_short(problem['input'])})"
            if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                near = difflib.get_close_matches(key, kind.model_fields, 1, cutoff=0.3)
                message = f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
            lines.append(message)
        raise SettingsError(
            "; ".join(lines)[:_LONGEST],
            where=where,
            fix=f"known keys: {', '.join(kind.model_fields)}",
        ) from None


_LONGEST = 2_000  # characters of an error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def changed(value: Settings, **changes: Any) -> Settings:
    """A settings value with some fields changed, and checked again (`model_copy` does not)."""
    body = {**value.model_dump(exclude_unset=True), **changes}
    return validated(type(value), body, "the given options")
