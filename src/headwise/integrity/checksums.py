"""Checksums: every saved file says what it held when it was written, and is asked when it is read.

SHA-256 everywhere, in four places: a JSON artefact carries that of its other lines as its first
line, a row of a .jsonl file that of its fields and its place, a safetensors file that of its header
and data in its metadata, and a capture that of each of its files in `capture.json`. What belongs to
a run also carries the run's identity, a hash of its settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.errors import ArtefactError

CHECKSUM, RUN_KEY = "checksum", "run"
_FIRST_LINE = re.compile(rf'\{{\n "{CHECKSUM}": "([^"\n]*)",\n')
_HEX = re.compile(r"\A\{\n.*[0-9a-f]{24}")
_ROW_DIGITS = 16  # of the checksum of one row: a row is short


def require_same(
    actual: str, recorded: object, where: object, fix: str, noun: str = "the file"
) -> None:
    """Refuse data that are not what was written."""
    if actual != recorded:
        raise ArtefactError(
            f"{noun} is damaged: its checksum does not match its content"
            if recorded
            else "it carries no checksum, so damage would not be seen",
            where=where,
            fix=fix,
        )


def require_run(recorded: object, run: str, where: object) -> None:
    """Refuse what another run wrote."""
    if run and recorded != run:
        raise ArtefactError(
            "it belongs to another run: the settings that it was made with are not these",
            where=where,
            fix="put the file of this run back, or start anew in another --out",
        )


def file_checksum(path: Path) -> str:
    """Of a whole file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtefactError(
            f"cannot be read ({error.strerror})", where=path, fix="check the path and its rights"
        ) from None


def sealed_text(text: str) -> str:
    """The text of a JSON object, one key a line, with the checksum of it as its first line."""
    return f'{{\n "{CHECKSUM}": "{_text_checksum(text)}",\n' + text.removeprefix("{\n")


def check_text(text: str, where: object) -> None:
    """Refuse a sealed text that was changed; one that another program laid out anew has no seal."""
    match, fix = _FIRST_LINE.match(text), "write it again; if you edited it, delete its first line"
    if match is not None:
        require_same(_text_checksum("{\n" + text[match.end() :]), match[1], where, fix)
    elif _HEX.search(text[: text.find("\n", 2)]):  # what is left of a checksum
        require_same("", text[:20], where, fix)


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_row(
    row: Mapping[str, object], run: str, place: int, free: frozenset[str] = frozenset()
) -> str:
    """Line `place`, from 0, of a .jsonl file; `free` fields (speeds) differ between equal runs."""
    body = {**row, RUN_KEY: run} if run else dict(row)
    return json.dumps({**body, CHECKSUM: _row_checksum(body, place, free)}) + "\n"


def checked_rows(
    rows: Sequence[Any], run: str, where: object, free: frozenset[str] = frozenset()
) -> list[Any]:
    """The fields of each row; a damaged row, a missing, repeated or strange one is refused."""
    sealed = [isinstance(row, dict) and CHECKSUM in row for row in rows]
    if any(sealed) and not all(sealed):
        require_same("one of its rows", None, where, _PUT_BACK)
    return [_checked_row(row, place, run, where, free) for place, row in enumerate(rows)]


_PUT_BACK = "put the undamaged file back, or start anew in another --out"


def _checked_row(row: Any, place: int, run: str, where: object, free: frozenset[str]) -> Any:
    if not isinstance(row, dict) or CHECKSUM not in row:
        return row
    body = {key: value for key, value in row.items() if key != CHECKSUM}
    # a row that an earlier headwise wrote does not know its place
    if row[CHECKSUM] != _row_checksum(body, None, free):
        noun = f"line {place + 1}, or one before it,"
        require_same(_row_checksum(body, place, free), row[CHECKSUM], where, _PUT_BACK, noun)
    require_run(body.pop(RUN_KEY, ""), run, where)
    return body


def _row_checksum(body: Mapping[str, object], place: int | None, free: frozenset[str]) -> str:
    kept = {key: value for key, value in body.items() if key not in free}
    text = json.dumps(kept, sort_keys=True)
    return _text_checksum(text if place is None else f"{place} {text}")[:_ROW_DIGITS]
