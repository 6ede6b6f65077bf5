"""The first token of every text: a BOS or not, decided once when a model is loaded.

A model that was always trained behind a BOS may be useless without one (MiniMind2-Small: 14.0 nats
per token without, 4.5 with), and nothing in its files need say so: `add_bos_token: false` is what
tokenizers carry by habit. So a `true` settles it, and where nothing does the loss on a little
bundled text with and without a BOS decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from headwise.bundled import DATA
from headwise.errors import ArtefactError, ModelError
from headwise.models.architectures import device_of, max_positions
from headwise.models.stored_weights import stored_weights
from headwise.models.tokenizing import tokenise

NEEDED = 0.1  # nats per token that a BOS must be worth, or it is not worth having
_SAMPLES = ("01_prose_harbour", "02_prose_clockmaker", "03_science_tides", "09_dialogue")
_TOKENS = 64  # of each sample
DecidedBy = Literal["asked", "tokenizer", "metadata", "measured", "default", "inherited"]


@dataclass(frozen=True)
class FirstToken:
    """Whether texts start with a BOS, and why; `needed` asks for one before every later piece."""

    bos: bool
    reason: str
    origin: DecidedBy = "default"
    needed: bool = False

    def __str__(self) -> str:
        return f"first token: {_named(self.bos)} ({self.reason})"

    def inherited(self, bos: bool | None, source: str) -> FirstToken:
        """As an artefact has it; what was asked for on purpose and differs is refused."""
        if bos is None or bos == self.bos:
            return self
        if self.origin in ("asked", "inherited"):
            raise ArtefactError(
                f"the first token differs: {source} was made with {_named(bos)}, "
                f"this is {_named(self.bos)} ({self.reason})",
                fix=f"use --{'' if bos else 'no-'}bos here, or make the other again",
            )
        return FirstToken(bos, f"as in {source}", "inherited", bos)


def _named(bos: bool) -> str:
    return "a BOS" if bos else "no BOS"


def decide_first_token(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    bos: bool | None = None,
) -> FirstToken:
    """Asked for, else as the tokenizer or its metadata says, else by measuring.

    A model that is streamed from disk is not measured: it would be read eight times over.
    """
    token = None if tokenizer is None else tokenizer.bos_token_id
    if bos is not None:
        if bos and token is None:
            raise ModelError("--bos: the tokenizer has no BOS token", fix="run without --bos")
        if bos and token is not None and token >= num_embeddings(model):
            raise ModelError(
                f"--bos: the BOS is token {token}, the model embeds {num_embeddings(model)}",
                fix="load the tokenizer that belongs to these weights, or run without --bos",
            )
        return FirstToken(bos, "asked for", "asked", needed=bos)
    if tokenizer is None or token is None:
        return FirstToken(False, "the tokenizer has none")
    if token >= num_embeddings(model):
        return FirstToken(False, f"its BOS, token {token}, is outside of the embedding")
    streamed = stored_weights(model) is not None
    losses = None if streamed else measure_both(model, tokenizer)
    needed = losses is not None and losses[0] - losses[1] > NEEDED
    stated = _stated(tokenizer)
    if stated is not None:
        return replace(stated, needed=needed)
    if streamed:
        return FirstToken(False, "nothing asks for one; not measured on a streamed model: --bos")
    if losses is None:
        return FirstToken(False, "nothing asks for one, and measuring cannot tell")
    numbers = f"measured: {losses[1]:.2f} nats per token with one, {losses[0]:.2f} without"
    return FirstToken(needed, numbers, "measured", needed)


def _stated(tokenizer: PreTrainedTokenizerBase) -> FirstToken | None:
    if _ids(tokenizer, "a")[:1] == [tokenizer.bos_token_id]:
        return FirstToken(True, "the tokenizer adds one", "tokenizer")
    if _declared(tokenizer):
        return FirstToken(True, "the model's metadata asks for one", "metadata")
    return None


def _declared(tokenizer: PreTrainedTokenizerBase) -> bool:
    """`add_bos_token` as its file has it: transformers forgets it for a plain tokenizer.json."""
    try:
        config = get_tokenizer_config(tokenizer.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        config = {}
    return config.get("add_bos_token", tokenizer.init_kwargs.get("add_bos_token")) is True


def measure_both(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, float] | None:
    """Mean loss of the same tokens without and with a BOS; None where neither reads the text."""
    texts = [(DATA / "texts" / f"{name}.txt").read_text("utf-8") for name in _SAMPLES]
    length = min(_TOKENS, (max_positions(model) or _TOKENS + 1) - 1)
    bare = [_without_bos(tokenizer, text)[:length] for text in texts]
    rows = num_embeddings(model)
    if min(map(len, bare)) < 2 or max(map(max, bare)) >= rows:
        return None
    losses = (_mean_loss(model, bare, []), _mean_loss(model, bare, [tokenizer.bos_token_id]))
    # above uniform guessing a model does not read this text, and what it prefers says nothing
    return losses if min(losses) < math.log(rows) else None


@torch.inference_mode()
def _mean_loss(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], prefix: Sequence[int]
) -> float:
    """Over all tokens but the first of each text, whatever the prefix."""
    device = device_of(model)
    total, count, skipped = 0.0, 0, len(prefix)
    for ids in texts:
        row = torch.tensor([[*prefix, *ids]], device=device)
        logits: Tensor = model(input_ids=row, use_cache=False).logits[0, skipped:-1].float()
        targets = row[0, skipped + 1 :].to(logits.device)
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(ids) - 1
    return total / count


def num_embeddings(model: PreTrainedModel) -> int:
    """Tokens that the model has an embedding for."""
    shape = model.get_input_embeddings().weight.shape
    assert isinstance(shape, torch.Size)
    return shape[0]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenise(tokenizer, text)


def _without_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = _ids(tokenizer, text)
    return ids[1:] if ids[:1] == [tokenizer.bos_token_id] else ids
