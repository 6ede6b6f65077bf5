"""Completions as values: prompts, how they were sampled, what came, and simple measures of it.

The measures stand beside the texts, so that imprinting and degeneration are seen, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headwise.alarms import Alarm
from headwise.artefacts import load_artefact, save_artefact, versions
from headwise.bundled import DATA
from headwise.errors import ArtefactError, TextError
from headwise.frames import frame
from headwise.models.values import ModelInfo
from headwise.proof.settings import Sampling
from headwise.tables import tables_html
from headwise.values import OMITTED, from_plain, plain_fields, to_plain

if TYPE_CHECKING:
    import pandas as pd

PROMPTS = DATA / "prompts" / "completions.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One prompt and what kind of text it asks for; a line of a .jsonl file calls it `prompt`."""

    text: Annotated[str, Field(alias="prompt")]
    category: str = "given"


def bundled_prompts() -> list[Prompt]:
    """50 prompts of our own: conceptual, technical, narrative, code, French and Spanish."""
    return read_prompts(PROMPTS)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a .jsonl file (`prompt`, optional `category`) or one a line from a text file."""
    try:
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"prompts cannot be read ({error})", where=path, fix="check the path"
        ) from None
    if not lines:
        raise TextError("no prompts", where=path, fix="one prompt a line, or .jsonl with `prompt`")
    if path.suffix != ".jsonl":
        return [Prompt(line) for line in lines]
    try:
        return [from_plain(Prompt, json.loads(line), path) for line in lines]
    except (ValueError, RecursionError, ArtefactError) as error:
        raise TextError(
            f"not one JSON object with a `prompt` a line ({str(error)[:200]})",
            where=path,
            fix='one object a line: {"prompt": "..."}',
        ) from None


@dataclass(frozen=True)
class TextMeasures:
    """Length, distinct-n, repetition, share of markup, and whether the language changed."""

    words: int
    distinct_1: float
    distinct_2: float
    distinct_3: float
    repetition: float
    markup_share: float
    language: str | None
    language_drift: bool


_AVERAGED = tuple(f.name for f in fields(TextMeasures) if f.name != "language")


@dataclass(frozen=True)
class Completion:
    """One prompt with its category, how the model completes it, and the measures of that."""

    prompt: str
    category: str
    completion: str
    measures: TextMeasures


@dataclass(frozen=True)
class CompletionProvenance:
    """The prompts, the versions and, where they are known, the stock model and the patches."""

    prompts_sha256: str | None = field(default=None, metadata=OMITTED)
    versions: Mapping[str, str] = field(default_factory=versions)
    model: ModelInfo | None = field(default=None, metadata=OMITTED)
    bos: bool | None = field(default=None, metadata=OMITTED)
    # hash of the last patch of each condition, "" for stock
    patches: Mapping[str, str] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Completions:
    """The same prompts through several conditions."""

    conditions: Mapping[str, Sequence[Completion]] = field(repr=False)
    sampling: Sampling
    provenance: CompletionProvenance = field(repr=False)

    def __repr__(self) -> str:
        prompts = max((len(rows) for rows in self.conditions.values()), default=0)
        return f"Completions({prompts} prompts, {', '.join(self.conditions)})"

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Conditions that end some prompts at once, without a word."""
        empty = {
            name: sum(not row.completion.strip() for row in rows)
            for name, rows in self.conditions.items()
        }
        return tuple(
            Alarm(
                "empty-completions",
                f"{count} of {len(self.conditions[name])} completions of {name} are empty",
            )
            for name, count in empty.items()
            if count
        )

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Means of the measures by condition: over all prompts, and by category."""
        return {name: mean_measures(rows) for name, rows in self.conditions.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row per prompt and condition (needs pandas)."""
        return frame(
            [
                {
                    "condition": name,
                    "text": row.prompt,
                    "category": row.category,
                    "completion": row.completion,
                    **plain_fields(row.measures),
                }
                for name, rows in self.conditions.items()
                for row in rows
            ]
        )

    def _repr_html_(self) -> str:
        from headwise.proof.view import completions_table

        return tables_html([completions_table(self)])

    def save(self, path: Path) -> Path:
        """Write `completions.json`."""
        derived = {"summary": self.summary(), "alarms": to_plain(self.alarms)}
        return save_artefact(path, "completions", {**plain_fields(self), **derived})

    @staticmethod
    def load(path: Path) -> Completions:
        """Read `completions.json`."""
        return from_plain(Completions, load_artefact(path, "completions"), path)


_STOPWORDS = {
    "en": {"the", "and", "of", "to", "in", "that", "is", "was", "it", "for", "with", "his", "her"},
    "fr": {"le", "la", "les", "et", "de", "des", "un", "une", "est", "que", "qui", "dans", "il"},
    "es": {"el", "la", "los", "las", "y", "de", "un", "una", "es", "que", "en", "por", "con"},
}


_MARKUP = re.compile(r"</?[a-zA-Z][^>]*>|&[a-z]+;|\b(?:div|span|class|href)=")


def measure_text(text: str, prompt: Prompt) -> TextMeasures:
    """Measure one completion of a prompt."""
    words = re.findall(r"\w+", text.lower())
    markup = sum(len(match.group()) for match in _MARKUP.finditer(text))
    asked, given = guess_language(prompt.text), guess_language(text)
    return TextMeasures(
        words=len(words),
        distinct_1=_distinct(words, 1),
        distinct_2=_distinct(words, 2),
        distinct_3=_distinct(words, 3),
        repetition=1 - _distinct(words, 4),
        markup_share=markup / max(len(text), 1),
        language=given,
        language_drift=asked is not None and given is not None and asked != given,
    )


def _distinct(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def guess_language(text: str) -> str | None:
    """English, French or Spanish by function words; None if they do not tell."""
    words = Counter(re.findall(r"\w+", text.lower()))
    scores = {name: sum(words[w] for w in common) for name, common in _STOPWORDS.items()}
    best = max(scores, key=lambda name: scores[name])
    rivals = sorted(scores.values())
    return best if rivals[-1] > rivals[-2] else None


def mean_measures(rows: Sequence[Completion]) -> dict[str, dict[str, float]]:
    """Means of the measures over prompts, for all and for each category."""
    groups = {"all": [row.measures for row in rows]}
    for row in rows:
        groups.setdefault(row.category, []).append(row.measures)
    return {
        category: {
            name: sum(float(getattr(m, name)) for m in group) / len(group) for name in _AVERAGED
        }
        for category, group in groups.items()
    }


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Identity of a prompt set."""
    return hashlib.sha256("\0".join(p.text for p in prompts).encode()).hexdigest()
