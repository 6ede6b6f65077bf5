"""Heads and sets of heads: names, per-head maps and the selection language.

`L5H14` is layer 5, query head 14, both from 0. Layers bear the model's own numbers; in a hybrid,
where only some layers have attention, the rows of a map are those layers and `layers` names them.
A selection is a comma list of such names with ranges (`L5-22H9-15,L23H0`), the words `all`, `sick`,
`dead`, `sink`, `low_entropy`, `healthy`, `band`, and the operators `&` (and), `-` (without) and `,`
(or) with parentheses. A hyphen between digits is a range; a hyphen with spaces or before a word is
the operator. A measure with a bound (`first_token_mass > 0.9`, `entropy < 1`, `layer >= 4`) is the
set of heads that keep it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Real

from headwise.errors import SelectionError

JOINT = "joint:"  # in front of the name of a set of heads that is silenced together


@dataclass(frozen=True, order=True)
class Head:
    """One query head of one layer; prints as `L5H14`."""

    layer: int
    index: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"

    @staticmethod
    def parse(name: str) -> Head:
        """Read `L5H14`."""
        match = re.fullmatch(r"L(\d{1,6})H(\d{1,6})", name.strip())
        if match is None:
            raise SelectionError(f"{_shown(name)} is not a head", fix="write it like L5H14")
        return Head(int(match[1]), int(match[2]))


def heads_where(
    mask: Bool[np.ndarray, "layer head"], layers: Sequence[int] | None = None
) -> list[Head]:
    """The heads at which `mask` is true, in order; `layers` are the numbers of its rows."""
    numbers = range(len(mask)) if layers is None else layers
    return [Head(int(numbers[row]), int(index)) for row, index in np.argwhere(np.asarray(mask))]


def all_heads(num_layers: int, num_heads: int, layers: Sequence[int] | None = None) -> list[Head]:
    """Every head of a model, in order."""
    numbers = range(num_layers) if layers is None else layers
    return [Head(layer, index) for layer in numbers for index in range(num_heads)]


_TOKEN = re.compile(
    r"\s*(?:(?P<measure>[a-z_]+\s*(?:[<>]=?)\s*-?\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,3})?)"
    r"|(?P<heads>L\d{1,6}(?:-\d{1,6})?(?:H\d{1,6}(?:-\d{1,6})?)?|H\d{1,6}(?:-\d{1,6})?)"
    r"|(?P<word>[a-z_]+)|(?P<op>[&,()+-]))",
    re.ASCII,
)

_LONGEST, _DEEPEST = 100_000, 50  # of a selection, and of its parentheses


def select_heads(
    selection: str,
    *,
    num_layers: int,
    num_heads: int,
    layers: Sequence[int] | None = None,
    sets: Mapping[str, Iterable[Head]] | None = None,
    maps: Mapping[str, Real[np.ndarray, "layer head"]] | None = None,
) -> list[Head]:
    """Evaluate a selection; `sets` gives meaning to words, `maps` to measures.

    `layers` are the numbers of the layers with attention, where these are not all.
    """
    if len(selection) > _LONGEST:
        raise SelectionError(
            f"the selection has more than {_LONGEST:,} characters", fix="name ranges: L5-22H9-15"
        )
    numbers = tuple(range(num_layers) if layers is None else layers)
    rows, indices = np.indices((num_layers, num_heads))
    known = {"layer": np.array(numbers)[rows], "head": indices, **(maps or {})}
    words = {"all": frozenset(all_heads(num_layers, num_heads, layers))}
    words |= {name: frozenset(heads) for name, heads in (sets or {}).items()}
    parser = _Selection(_tokens(selection), selection, words, known, numbers, num_heads)
    return sorted(parser.parse())


def select_in_layers(
    layers: str | None, heads: str | None, attending: Sequence[int], num_heads: int
) -> list[Head]:
    """Heads by `layers` ("0-5,29") and `heads`: indices ("0-3,7") or a whole selection.

    `attending` are the numbers of the layers with attention.
    """

    def numbers(text: str, letter: str) -> str:
        if not re.fullmatch(r"[\d,\s-]+", text):
            return text
        return ",".join(f"{letter}{part.strip()}" for part in text.split(","))

    given = [(text, letter) for text, letter in ((layers, "L"), (heads, "H")) if text is not None]
    if not all(text.strip() for text, _ in given):
        raise SelectionError("the selection is empty", fix="leave it out for all heads")
    parts = [numbers(text, letter) for text, letter in given]
    selection = " & ".join(f"({part})" for part in parts) or "all"
    return select_heads(selection, num_layers=len(attending), num_heads=num_heads, layers=attending)


def named_ranges(
    selection: str, *, num_layers: int, num_heads: int, layers: Sequence[int] | None = None
) -> list[Head]:
    """The heads of all ranges that a selection spells out (`L5-22H9-15` of `L5-22H9-15 & sick`)."""
    ranges = [token for token in _tokens(selection) if token[0] in "LH"]
    if not ranges:
        return []
    return select_heads(",".join(ranges), num_layers=num_layers, num_heads=num_heads, layers=layers)


def _shown(text: str) -> str:
    """A text as an error can quote it."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _tokens(selection: str) -> deque[str]:
    tokens: deque[str] = deque()
    at = 0
    text = selection.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SelectionError(
                f"cannot read {_shown(selection)} at {_shown(text[at:].strip())}",
                fix="example: L5-22H9-15 & sick, L23H0",
            )
        tokens.append(match.group().strip())
        at = match.end()
    return tokens


@dataclass
class _Selection:
    """Recursive descent: or-list of (term (& term | - term)*)."""

    tokens: deque[str]
    text: str
    words: dict[str, frozenset[Head]]
    maps: Mapping[str, Real[np.ndarray, "layer head"]]
    layers: tuple[int, ...]
    num_heads: int
    depth: int = 0

    def parse(self) -> frozenset[Head]:
        if not self.tokens:
            raise SelectionError("the selection is empty", fix="example: sick, or L5-22H9-15")
        heads = self._union()
        if self.tokens:
            raise SelectionError(
                f"cannot read {_shown(self.text)} at {_shown(self.tokens[0])}",
                fix="put `,` `&` or `-` between heads: L5-22H9-15 & sick, L23H0",
            )
        return heads

    def _union(self) -> frozenset[Head]:
        heads = self._difference()
        while self.tokens and self.tokens[0] in (",", "+"):
            self.tokens.popleft()
            heads |= self._difference()
        return heads

    def _difference(self) -> frozenset[Head]:
        operators: dict[str, Callable[[frozenset[Head], frozenset[Head]], frozenset[Head]]] = {
            "&": frozenset.intersection,
            "-": frozenset.difference,
        }
        heads = self._atom()
        while self.tokens and self.tokens[0] in operators:
            heads = operators[self.tokens.popleft()](heads, self._atom())
        return heads

    def _atom(self) -> frozenset[Head]:
        if not self.tokens:
            raise SelectionError(
                f"{_shown(self.text)} ends too early", fix="example: L5-22H9-15 & sick, all - dead"
            )
        token = self.tokens.popleft()
        if token == "(":
            self.depth += 1
            if self.depth > _DEEPEST:
                raise SelectionError(
                    f"more than {_DEEPEST} parentheses within each other", fix="write it flatter"
                )
            heads = self._union()
            self.depth -= 1
            if not self.tokens or self.tokens.popleft() != ")":
                raise SelectionError(f"{_shown(self.text)} has an open parenthesis")
            return heads
        if token[0] in "LH":
            return self._heads(token)
        if re.search("[<>]", token):
            return self._measured(token)
        if token not in self.words:
            raise SelectionError(
                f"{token!r} is not known in {_shown(self.text)}",
                fix=f"known words: {', '.join(sorted(self.words))}; heads look like L5H14",
            )
        return self.words[token]

    def _measured(self, token: str) -> frozenset[Head]:
        name, operator, bound = re.split(r"\s*([<>]=?)\s*", token)
        if name not in self.maps:
            raise SelectionError(
                f"{name!r} is no measure that is known here",
                fix=f"known: {', '.join(sorted(self.maps))}; ablation_cost comes with an "
                "evaluation.json",
            )
        compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
        return frozenset(heads_where(compare[operator](self.maps[name], float(bound)), self.layers))

    def _heads(self, token: str) -> frozenset[Head]:
        match = re.fullmatch(r"(?:L(\d+)(?:-(\d+))?)?(?:H(\d+)(?:-(\d+))?)?", token)
        assert match is not None  # the tokenizer let it through
        named = self._range(match[1], match[2], self.layers[-1] + 1, "layer", token)
        layers = [layer for layer in self.layers if layer in named]
        if not layers:
            raise SelectionError(
                f"{token}: the model has no attention there",
                fix=f"its layers with attention are {_ranges(list(self.layers), ', ')}",
            )
        indices = self._range(match[3], match[4], self.num_heads, "head", token)
        return frozenset(Head(layer, index) for layer in layers for index in indices)

    @staticmethod
    def _range(first: str | None, last: str | None, count: int, noun: str, token: str) -> range:
        if first is None:
            return range(count)
        start, stop = int(first), int(last if last is not None else first)
        if stop >= count or start > stop:
            raise SelectionError(
                f"{token} is out of range: the model has {noun}s 0 to {count - 1}",
                fix=f"choose {noun}s from 0 to {count - 1}, the smaller one first",
            )
        return range(start, stop + 1)


def format_heads(heads: Iterable[Head]) -> str:
    """Write heads as the shortest selection of per-layer ranges: `L5H9-11,L5H14`."""
    by_layer: dict[int, list[int]] = {}
    for head in sorted(set(heads)):
        by_layer.setdefault(head.layer, []).append(head.index)
    rows: dict[str, list[int]] = {}
    for layer, indices in by_layer.items():
        rows.setdefault(_ranges(indices, ",H"), []).append(layer)
    parts = []
    for indices_text, layers in rows.items():
        for layers_text in _ranges(layers, "|").split("|"):
            parts += [f"L{layers_text}H{indices}" for indices in indices_text.split(",H")]
    return ",".join(parts)


def format_indices(indices: Iterable[int]) -> str:
    """Head indices as ranges: `H2-3, H5-15`."""
    numbers = sorted(indices)
    return "H" + _ranges(numbers, ", H") if numbers else "none"


def _ranges(numbers: list[int], separator: str) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return separator.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
