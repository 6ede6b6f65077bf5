"""What heads do: the one table of roles, a row each, with the keys it counts. No torch.

A role is the attention on a set of keys minus chance, which is what attention spread evenly over
the keys that a query sees gives them. Only queries that have a choice count: those that see keys
inside the set and outside it. The first token and the last three are positional roles; roles that
look for tokens leave the first out, and copies the last three too, or a sink would be a sentence
start and every previous-token head would copy `the the`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

LOCAL_WINDOW = 3  # t-2 .. t
COPIES = 8  # earlier copies of a token that are looked at, the latest ones: linear in the length
FIXED = 16  # positions below this are asked whether they are a fixed target
PROBE = "induction_probe"  # induction on random tokens that are repeated
NO_ROLE = "none"


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of a padded batch, and what each token is."""

    ids: Int[np.ndarray, "text position"]
    lengths: Int[np.ndarray, "text"]
    delimiter: Bool[np.ndarray, "text position"]
    sentence_start: Bool[np.ndarray, "text position"]


@dataclass(frozen=True)
class KeySet:
    """Keys that a role counts, in one of three ways."""

    offsets: tuple[int, ...] = ()  # so many places before the query
    # the same keys for every query; of several columns the strongest counts
    columns: Bool[np.ndarray, "text key column"] | None = field(default=None, repr=False)
    pairs: Int[np.ndarray, "pair 3"] | None = field(default=None, repr=False)  # text, query, key


@dataclass(frozen=True)
class Role:
    """One row: what the map is called, how it is drawn, and which keys it counts."""

    name: str
    letter: str
    colour: str
    counts: str  # the keys in words
    keys: Callable[[TokenBatch], KeySet] = field(repr=False)

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")


def _positions(batch: TokenBatch, positions: range) -> KeySet:
    """Fixed positions, one column each."""
    length = batch.ids.shape[1]
    columns = np.arange(length)[:, None] == np.array(positions)[None]
    return KeySet(columns=np.broadcast_to(columns, (len(batch.ids), *columns.shape)))


def _tokens(which: Bool[np.ndarray, "text position"]) -> KeySet:
    """Tokens of a kind, the first position aside."""
    chosen = which.copy()
    chosen[:, 0] = False
    return KeySet(columns=chosen[:, :, None])


def copies(batch: TokenBatch, after: int) -> KeySet:
    """The keys `after` places behind the latest earlier copies of each query's token."""
    pairs = []
    for text, (row, length) in enumerate(zip(batch.ids, batch.lengths, strict=True)):
        earlier: dict[int, list[int]] = {}
        for query, token in enumerate(row[:length].tolist()):
            places = earlier.setdefault(token, [])
            keys = [place + after for place in places[-COPIES - LOCAL_WINDOW :]]
            near = [key for key in keys if 0 < key <= query - LOCAL_WINDOW][-COPIES:]
            pairs += [(text, query, key) for key in near]
            places.append(query)
    return KeySet(pairs=np.array(pairs, dtype=np.int64).reshape(-1, 3))


ROLES = (
    Role(
        "induction",
        "i",
        "#D55E00",
        "the token after an earlier copy of this one",
        lambda batch: copies(batch, 1),
    ),
    Role(
        "duplicate_token",
        "d",
        "#CC79A7",
        "an earlier copy of this token",
        lambda batch: copies(batch, 0),
    ),
    Role(
        "previous_token",
        "p",
        "#0072B2",
        "the token before",
        lambda batch: KeySet(offsets=(1,)),
    ),
    Role(
        "sentence_start",
        "b",
        "#F0E442",
        "the first word of each sentence but the first",
        lambda batch: _tokens(batch.sentence_start),
    ),
    Role(
        "delimiter",
        ",",
        "#E69F00",
        "punctuation and line breaks",
        lambda batch: _tokens(batch.delimiter),
    ),
    Role(
        "fixed_position",
        "f",
        "#8DA0CB",
        f"the strongest of positions 1 to {FIXED - 1}",
        lambda batch: _positions(batch, range(1, FIXED)),
    ),
    Role(
        "local",
        "l",
        "#56B4E9",
        f"this token and the {LOCAL_WINDOW - 1} before",
        lambda batch: KeySet(offsets=tuple(range(LOCAL_WINDOW))),
    ),
    Role(
        "first_token",
        "1",
        "#BBBBBB",
        "position 0",
        lambda batch: _positions(batch, range(1)),
    ),
)
ROLE_NAMES = (NO_ROLE, *(role.name for role in ROLES))


def role_grid(
    maps: Mapping[str, Float[np.ndarray, "layer head"]], threshold: float
) -> tuple[tuple[str, ...], ...]:
    """[layer][head] of the role that a head plays most, `none` where nothing passes `threshold`.

    Any other role comes before the first token's: that says where a head rests. Induction counts
    by text or by the probe, and local without the previous token that it holds.
    """
    known = [role.name for role in ROLES if role.name in maps]
    if not known:
        return ()
    strength = {name: maps[name] for name in known}
    if PROBE in maps and "induction" in strength:
        strength["induction"] = np.maximum(strength["induction"], maps[PROBE])
    if {"local", "previous_token"} <= set(strength):
        strength["local"] = strength["local"] - np.maximum(strength["previous_token"], 0)
    resting = strength.pop("first_token", None)
    names = np.full(maps[known[0]].shape, NO_ROLE, dtype=object)
    if resting is not None:
        names[resting > threshold] = "first_token"
    if strength:
        stacked = np.stack(list(strength.values()))
        best = np.array(list(strength), dtype=object)[stacked.argmax(0)]
        names = np.where(stacked.max(0) > threshold, best, names)
    return tuple(tuple(str(name) for name in row) for row in names)
