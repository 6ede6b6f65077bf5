"""What kind of token each id is: a piece of a word, punctuation, a number, white space.

Kinds are read from the tokenizer alone, so that the same rule holds for every model: the marker in
front of a token (a space, or what SentencePiece and byte-level tokenizers write for it) says
whether it starts a word, its characters say the rest.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

KINDS = ("special", "space", "delimiter", "number", "word", "piece")  # a code is a place here
DELIMITER = KINDS.index("delimiter")
SPACE = KINDS.index("space")
ENDS = 16  # added to the code of a token that ends a sentence
_MARKERS = (" ", "\u2581", "\u0120")  # a space, SentencePiece's, byte-level BPE's
_SENTENCE_ENDS = ".!?\u3002\uff01\uff1f\u0964\u061f"  # also CJK, Devanagari, Arabic


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """One token as a reader sees it, with its leading space."""
    raw = str(tokenizer.convert_ids_to_tokens(token))
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return f" {text}" if raw.startswith(_MARKERS) and not text.startswith(" ") else text


def token_codes(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> dict[int, int]:
    """The kind of every id as its place in `KINDS`, plus `ENDS` where it ends a sentence."""
    special = set(tokenizer.all_special_ids)
    texts = {one: token_text(tokenizer, one) for one in sorted(set(ids))}
    marked = any(text.startswith(" ") and text.strip() for text in texts.values())
    return {
        one: KINDS.index("special") if one in special else _code(text, marked)
        for one, text in texts.items()
    }


def _code(text: str, marked: bool) -> int:
    bare = text.strip()
    if not bare:
        return SPACE + (ENDS if "\n" in text else 0)
    if all(unicodedata.category(character)[0] in "PS" for character in bare):
        ends = "\n" in text or any(character in _SENTENCE_ENDS for character in bare)
        return DELIMITER + (ENDS if ends else 0)
    if all(unicodedata.category(character)[0] == "N" for character in bare):
        return KINDS.index("number")
    starts = text.startswith((" ", "\n")) or not marked
    return KINDS.index("word" if starts else "piece")
