"""Texts in, token batches out: files, folders, hub datasets, or the bundled set.

A `TextSet` is a tuple of texts with a content hash. Batches are padded on the right: under a causal
mask a real token never sees padding there, so every statistic is exact without a padding mask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwise.artefacts import content_hash, is_there, require_regular
from headwise.bundled import DATA
from headwise.errors import TextError, reported_as
from headwise.models.patient import PATIENTS, patient_texts
from headwise.provenance import TextInfo

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


@dataclass(frozen=True)
class TextSet:
    """Named texts; equal content has an equal hash."""

    name: str
    texts: tuple[str, ...] = field(repr=False)

    def __repr__(self) -> str:
        return f"TextSet({self.name}, {len(self.texts)} texts)"

    @property
    def sha256(self) -> str:
        """Hash of the texts in order."""
        return content_hash(self.texts)

    def first(self, count: int | None) -> TextSet:
        """Its first texts; all without a count."""
        return self if count is None else TextSet(self.name, self.texts[:count])

    def describe(self, tokens: int | None = None) -> TextInfo:
        """The `texts` entry of an artefact."""
        return TextInfo(self.name, len(self.texts), self.sha256, tokens)


def document_hash(text: str) -> str:
    """The identity of a document, whatever its white space: 16 hexadecimal digits."""
    return content_hash([" ".join(text.split())])[:16]


def bundled_texts() -> TextSet:
    """A varied set of our own: prose, code and several languages."""
    folder = DATA / "texts"
    return TextSet("bundled", tuple(p.read_text("utf-8") for p in sorted(folder.glob("*.txt"))))


def default_texts(model_name: str) -> TextSet:
    """The patient's own held-out text for the patient, the bundled set for any other model."""
    if model_name in PATIENTS:
        return TextSet("patient-heldout", tuple(patient_texts("heldout")))
    return bundled_texts()


def as_text_set(
    texts: TextSet | Sequence[str] | None, model_name: str, *, most: int | None = None
) -> TextSet:
    """Given texts, all of them; else the default of the model, of which `most` are read."""
    if texts is None:
        default = default_texts(model_name)
        return TextSet(default.name, default.texts[:most])
    if isinstance(texts, TextSet):
        return texts
    if isinstance(texts, str) or not texts or not all(_is_text(text) for text in texts):
        raise TextError(
            "texts must be a non-empty list of non-empty strings",
            fix="pass e.g. texts=['Some text.', 'Another one.']",
        )
    return TextSet("given", tuple(texts))


def _is_text(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip())


def default_corpus(model_name: str) -> TextSet:
    """The patient's own training corpus; any other model needs --corpus."""
    if model_name not in PATIENTS:
        raise TextError("no corpus to train on", fix="pass --corpus with files, folders or an id")
    return TextSet("patient-train", tuple(patient_texts("train")))


def read_texts(sources: Sequence[str | Path], *, lines: bool = False) -> TextSet:
    """Read files (.txt, .jsonl, .parquet), folders of them, or one hub dataset id."""
    texts: list[str] = []
    names = [str(source) for source in sources]
    for source in names:
        if not source.strip():
            raise TextError("the name of a text is empty", fix="pass a file, a folder or a hub id")
        path = Path(source)
        if is_there(path) and path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            texts += [text for file in files for text in _read_file(file, lines)]
        elif is_there(path):
            texts += _read_file(path, lines)
        else:
            texts += _read_hub(source)
    kept = tuple(text for text in texts if text.strip())
    if not kept:
        raise TextError(
            "no text found: every source is empty",
            where=", ".join(names) or "no source",
            fix=f"pass files with text ({', '.join(SUFFIXES)}) or a folder of them",
        )
    return TextSet(", ".join(names), kept)


def _read_file(path: Path, lines: bool) -> list[str]:
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    text = _decoded(path)
    if "\0" in text:
        raise TextError(
            "it holds null characters: a binary file, or UTF-16",
            where=path,
            fix="convert it to UTF-8 text first",
        )
    return text.splitlines() if lines else [text]


def _decoded(path: Path) -> str:
    with (
        reported_as(
            TextError, "not UTF-8 text", UnicodeDecodeError, where=path, fix="convert it first"
        ),
        reported_as(TextError, "cannot be read", OSError, where=path, fix="check its rights"),
    ):
        require_regular(path)
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no first token


def _read_jsonl(path: Path) -> list[str]:
    """The `text` of every line; anything but a text that can be written is refused."""
    texts = []
    wrong = (ValueError, LookupError, TypeError, RecursionError)
    fix = 'one object a line: {"text": "..."}'
    # a JSON text may hold U+2028 and its like, at which `splitlines` would cut
    for number, line in enumerate(_decoded(path).split("\n"), 1):
        what = f"line {number} is not a JSON object with a `text` field"
        with reported_as(TextError, what, *wrong, where=path, fix=fix):
            if line.strip():
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f"its `text` is {type(text).__name__}, not a string")
                text.encode()
                texts.append(text)
    return texts


def _read_parquet(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    what, fix = "no readable `text` column", "write a column `text` of strings"
    wrong = (pyarrow.ArrowException, LookupError, ValueError, OSError)
    with reported_as(TextError, what, *wrong, where=path, fix=fix):
        column = pyarrow.parquet.read_table(path, columns=["text"]).column("text")
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            raise ValueError("it holds numbers")  # a cast would make texts of them
        texts = column.cast(pyarrow.string()).to_pylist()
    return [text for text in texts if text is not None]


def _read_hub(name: str) -> list[str]:
    """A hub dataset, `id[:config[:split]]`; only what cannot be a path reaches the network."""
    identifier, _, rest = name.partition(":")
    if identifier.count("/") != 1 or identifier.startswith(("/", ".")) or Path(identifier).suffix:
        raise TextError("no such file or folder", where=name, fix="check the path")
    from datasets import load_dataset

    config, _, split = rest.partition(":")
    what, fix = "the hub dataset could not be loaded", "check the id; offline, pass local files"
    with reported_as(TextError, what, OSError, ValueError, where=name, fix=fix):
        dataset = load_dataset(identifier, config or None, split=split or "train")
    if "text" not in dataset.column_names:
        raise TextError(
            "the hub dataset has no `text` column", where=name, fix="save its texts as .jsonl first"
        )
    texts = [text for text in dataset["text"] if text is not None]
    if not all(isinstance(text, str) for text in texts):
        raise TextError(
            "its `text` column holds other things than texts", where=name, fix="choose another set"
        )
    return texts
