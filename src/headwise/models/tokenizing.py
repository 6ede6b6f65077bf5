"""One text through any tokenizer: within a time that a sound one never needs, or an error in words.

A tokenizer is a stranger's regular expressions. A catastrophic one panics in the Rust library
(which is no Exception) or runs for hours there, where no signal reaches it.
"""

from __future__ import annotations

import threading

from transformers import PreTrainedTokenizerBase

from headwise.errors import TextError

PATIENCE = 60.0  # seconds for any text, and one more for so many characters:
_SLOWEST = 5_000  # slow tokenizers, written in Python, manage ten times as many


def tokenise(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = True
) -> list[int]:
    """The token ids of a text, uncut; a tokenizer that fails or takes for ever is an error."""
    ids: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        options = {"add_special_tokens": special_tokens, "truncation": False, "verbose": False}
        try:
            ids.extend(int(i) for i in tokenizer(text, **options)["input_ids"])
        except BaseException as error:  # noqa: BLE001 - Rust's panics are no Exceptions
            errors.append(error)

    # a daemon: a tokenizer that never ends must not keep the process from ending
    thread, patience = threading.Thread(target=work, daemon=True), PATIENCE + len(text) / _SLOWEST
    thread.start()
    thread.join(patience)
    fix = "check the regular expressions of its tokenizer.json, or leave this text out"
    if thread.is_alive():
        raise TextError(
            f"the tokenizer has not ended after {patience:.0f} s on a text of {len(text):,} "
            f"characters: {text[:40]!r}",
            fix=fix,
        )
    if errors:
        reason = f"{type(errors[0]).__name__}: {errors[0]}"
        raise TextError(f"the tokenizer fails on {text[:40]!r} ({reason[:200]})", fix=fix)
    return ids
