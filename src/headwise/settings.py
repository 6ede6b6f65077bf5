"""Settings files: one YAML mapping, checked by pydantic, with errors that name the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headwise.errors import ArtefactError, SettingsError


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping, or a clear error."""
    try:
        body = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ArtefactError("no such file", where=path, fix="check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"not readable as YAML ({error})", where=path) from None
    if not isinstance(body, dict):
        raise SettingsError("not a YAML mapping", where=path)
    return body


Settings = TypeVar("Settings", bound=BaseModel)


def validated(kind: type[Settings], body: Mapping[str, Any], where: object) -> Settings:
    """Build settings; unknown keys and wrong values become one readable error."""
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            message = f"{key}: {problem['msg']} (got {problem['input']!r})"
            if problem["type"] == "extra_forbidden":
                near = difflib.get_close_matches(key, kind.model_fields, 1, cutoff=0.3)
                message = f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
            lines.append(message)
        raise SettingsError(
            "; ".join(lines), where=where, fix=f"known keys: {', '.join(kind.model_fields)}"
        ) from None


def changed(value: Settings, **changes: Any) -> Settings:
    """A settings value with some fields changed, and checked again (`model_copy` does not)."""
    body = {**value.model_dump(exclude_unset=True), **changes}
    return validated(type(value), body, "the given options")
