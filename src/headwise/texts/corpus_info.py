"""What identifies a training corpus: a value without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusInfo:
    """Documents and tokens of a corpus, as `run.json` states them."""

    name: str
    sha256: str = ""
    documents: int = 0
    duplicates: int = 0
    excluded: int = 0  # left out because they are evaluation texts
    near_excluded: int = 0  # left out because they are near-duplicates of such
    near_duplicates: int = 0  # documents like another one: all on one side of the split
    train_documents: int = 0
    validation_documents: int = 0
    train_tokens: int = 0
    validation_tokens: int = 0
