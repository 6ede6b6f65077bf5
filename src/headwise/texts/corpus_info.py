"""What identifies a training corpus: a value without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwise.values import OMITTED


@dataclass(frozen=True)
class CorpusInfo:
    """Documents and tokens of a corpus, as `run.json` states them."""

    name: str
    sha256: str = ""
    documents: int = 0
    duplicates: int = 0
    excluded: int = 0  # left out because they are evaluation texts
    near_excluded: int | None = field(default=None, metadata=OMITTED)  # near-duplicates of those
    # documents beyond the first of each group of near-duplicates; a group is on one side
    near_duplicates: int | None = field(default=None, metadata=OMITTED)
    train_documents: int = 0
    validation_documents: int = 0
    train_tokens: int = 0
    validation_tokens: int = 0
