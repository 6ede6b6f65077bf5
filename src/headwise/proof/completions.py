"""Completions side by side: the same prompts, the same random numbers, several conditions.

Each prompt has its own generator, seeded by a stable hash of seed and prompt (Python's `hash` is
salted per process and would not reproduce). Simple measures stand beside the texts, so that
imprinting and degeneration are seen, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.artefacts import content_hash
from headwise.bundled import DATA
from headwise.errors import TextError
from headwise.models.architectures import architecture_of, device_of
from headwise.progress import track

PROMPTS = DATA / "prompts" / "completions.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One prompt and what kind of text it asks for."""

    text: str
    category: str = "given"


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; the defaults are the paper's."""

    new_tokens: int = 100
    temperature: float = 0.7
    top_p: float = 0.92
    seed: int = 42


def bundled_prompts() -> list[Prompt]:
    """50 prompts of our own: conceptual, technical, narrative, code, French and Spanish."""
    return read_prompts(PROMPTS)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a .jsonl file (`prompt`, optional `category`) or one a line from a text file."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"prompts cannot be read ({error})", where=path) from None
    if not lines:
        raise TextError("no prompts", where=path, fix="one prompt a line, or .jsonl with `prompt`")
    if path.suffix != ".jsonl":
        return [Prompt(line) for line in lines]
    try:
        rows = [json.loads(line) for line in lines]
        return [Prompt(str(row["prompt"]), str(row.get("category", "given"))) for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise TextError(
            f"not one JSON object with a `prompt` a line ({error})", where=path
        ) from None


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int = 10,
    quiet: bool = True,
) -> list[dict[str, Any]]:
    """One row a prompt: the completion and its measures."""
    rows: list[dict[str, Any]] = []
    starts = list(range(0, len(prompts), batch_size))
    for start in track(starts, "completing", quiet=quiet):
        part = prompts[start : start + batch_size]
        for prompt, text in zip(part, _sample(model, tokenizer, part, sampling), strict=True):
            row = {"prompt": prompt.text, "category": prompt.category, "completion": text}
            rows.append({**row, "measures": measure_text(text, prompt)})
    return rows


def completions_body(
    conditions: dict[str, list[dict[str, Any]]], sampling: Sampling, provenance: dict[str, Any]
) -> dict[str, Any]:
    """The body of `completions.json`."""
    return {
        "conditions": conditions,
        "summary": {name: summarise(rows) for name, rows in conditions.items()},
        "sampling": sampling.__dict__ | {},
        "provenance": provenance,
    }


def prompt_seed(prompt: str, seed: int) -> int:
    """A stable seed: the same on every machine and in every process."""
    return int(content_hash([str(seed), prompt])[:15], 16)


@torch.inference_mode()
def _sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> list[str]:
    device = device_of(model)
    encoded = [list(tokenizer(p.text, verbose=False)["input_ids"]) for p in prompts]
    eos = tokenizer.eos_token_id
    encoded = [e[:-1] if len(e) > 1 and e[-1] == eos else e for e in encoded]
    ids, mask = _left_padded(encoded, device)
    generators = [
        torch.Generator().manual_seed(prompt_seed(p.text, sampling.seed)) for p in prompts
    ]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, produced = None, [[] for _ in prompts]  # type: ignore[var-annotated]
    for _ in range(sampling.new_tokens):
        options = _position_options(model, positions)
        output = model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options
        )
        cache = output.past_key_values
        chosen = _draw(output.logits[:, -1].float().cpu(), sampling, generators)
        for row, token in enumerate(chosen.tolist()):
            if not (produced[row] and produced[row][-1] == eos):
                produced[row].append(token)
        if all(tokens and tokens[-1] == eos for tokens in produced):
            break
        ids = chosen.to(device)[:, None]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        positions = positions[:, -1:] + 1
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in produced]


def _position_options(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """Some families derive positions from the mask and take no position ids."""
    return {"position_ids": positions} if architecture_of(model).takes_position_ids else {}


def _left_padded(encoded: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, encoded))
    ids = torch.zeros(len(encoded), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    return ids.to(device), mask.to(device)


def _draw(
    logits: Float[Tensor, "row token"], sampling: Sampling, generators: list[torch.Generator]
) -> Int[Tensor, "row"]:
    """One token a row by nucleus sampling; temperature 0 is greedy."""
    if sampling.temperature <= 0:
        return logits.argmax(-1)
    p, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0.0)
    picks = [torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)]
    return order.gather(1, torch.stack(picks)).squeeze(1)


_STOPWORDS = {
    "en": {"the", "and", "of", "to", "in", "that", "is", "was", "it", "for", "with", "his", "her"},
    "fr": {"le", "la", "les", "et", "de", "des", "un", "une", "est", "que", "qui", "dans", "il"},
    "es": {"el", "la", "los", "las", "y", "de", "un", "una", "es", "que", "en", "por", "con"},
}


_MARKUP = re.compile(r"</?[a-zA-Z][^>]*>|&[a-z]+;|\b(?:div|span|class|href)=")


def measure_text(text: str, prompt: Prompt) -> dict[str, Any]:
    """Length, distinct-n, repetition, share of markup, and whether the language changed."""
    words = re.findall(r"\w+", text.lower())
    markup = sum(len(match.group()) for match in _MARKUP.finditer(text))
    asked, given = guess_language(prompt.text), guess_language(text)
    return {
        "words": len(words),
        **{f"distinct_{n}": _distinct(words, n) for n in (1, 2, 3)},
        "repetition": 1 - _distinct(words, 4),
        "markup_share": markup / max(len(text), 1),
        "language": given,
        "language_drift": asked is not None and given is not None and asked != given,
    }


def _distinct(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def guess_language(text: str) -> str | None:
    """English, French or Spanish by function words; None if they do not tell."""
    words = Counter(re.findall(r"\w+", text.lower()))
    scores = {name: sum(words[w] for w in found) for name, found in _STOPWORDS.items()}
    best = max(scores, key=lambda name: scores[name])
    rivals = sorted(scores.values())
    return best if rivals[-1] > rivals[-2] else None


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the measures over prompts, for all and for each category."""
    groups = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row["category"], []).append(row)
    names = (
        "words",
        "distinct_1",
        "distinct_2",
        "distinct_3",
        "repetition",
        "markup_share",
        "language_drift",
    )
    return {
        group: {name: sum(float(r["measures"][name]) for r in found) / len(found) for name in names}
        for group, found in groups.items()
    }


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Identity of a prompt set."""
    return hashlib.sha256("\0".join(p.text for p in prompts).encode()).hexdigest()
