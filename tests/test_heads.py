"""The selection language: what it reads, what it refuses, and that what it writes it reads back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headwise.errors import SelectionError
from headwise.heads import Head, all_heads, format_heads, heads_where, select_heads

LAYERS, HEADS = 6, 8
SETS = {
    "sick": [Head(1, 2), Head(1, 3), Head(4, 7)],
    "dead": [Head(4, 7)],
    "band": [Head(layer, 7) for layer in range(LAYERS)],
}


def select(selection):
    chosen = select_heads(selection, num_layers=LAYERS, num_heads=HEADS, sets=SETS)
    return [str(head) for head in chosen]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("L5H1", ["L5H1"]),
        ("L0-1H6-7", ["L0H6", "L0H7", "L1H6", "L1H7"]),
        ("L5H1,L0H0", ["L0H0", "L5H1"]),
        ("L5H1 + L0H0", ["L0H0", "L5H1"]),
        ("L2H0,L2H0", ["L2H0"]),
        ("dead", ["L4H7"]),
        ("sick & dead", ["L4H7"]),
        ("sick - dead", ["L1H2", "L1H3"]),
        ("sick -dead", ["L1H2", "L1H3"]),
        ("sick - L1H2-3", ["L4H7"]),
        ("band & L0-1", ["L0H7", "L1H7"]),
        ("(sick,band) & L4", ["L4H7"]),
        ("band - sick & L0", ["L0H7"]),  # left to right: (band - sick) & L0
        ("H7 & L3", ["L3H7"]),
        ("all - L1-5 - H1-7", ["L0H0"]),
        ("dead & L0", []),
    ],
)
def test_a_selection_means_what_it_says(selection, expected):
    assert select(selection) == expected


def test_all_is_every_head_in_order():
    assert select("all") == [str(head) for head in all_heads(LAYERS, HEADS)]
    assert len(select("L3")) == HEADS
    assert len(select("H3")) == LAYERS


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("", "the selection is empty"),
        ("   ", "the selection is empty"),
        ("L6H0", "L6H0 is out of range: the model has layers 0 to 5"),
        ("L0H8", "L0H8 is out of range: the model has heads 0 to 7"),
        ("L3-1H0", "the smaller one first"),
        ("sleepy", "'sleepy' is not known"),
        ("sick &", "ends too early"),
        ("(sick", "open parenthesis"),
        ("sick)", r"at '\)'"),
        ("sick dead", "at 'dead'"),
        ("L1H2 ? dead", r"at '\? dead'"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused_with_the_reason(selection, message):
    with pytest.raises(SelectionError, match=message):
        select(selection)


def test_a_word_without_its_set_names_the_words_that_exist():
    with pytest.raises(SelectionError, match="known words: all"):
        select_heads("sick", num_layers=2, num_heads=2)


def test_a_head_prints_and_parses():
    assert Head.parse(" L5H14 ") == Head(5, 14)
    assert str(Head(5, 14)) == "L5H14"
    for wrong in ("5H14", "L5", "L-1H0", "l5h14"):
        with pytest.raises(SelectionError, match="is not a head"):
            Head.parse(wrong)


def test_heads_are_read_off_a_mask():
    values = np.arange(6.0).reshape(2, 3)
    assert heads_where(values > 3) == [Head(1, 1), Head(1, 2)]


def test_heads_are_written_as_the_shortest_blocks():
    block = [Head(layer, index) for layer in range(5, 23) for index in range(9, 16)]
    assert format_heads([*block, Head(23, 0)]) == "L5-22H9-15,L23H0"
    assert format_heads([Head(0, 0), Head(0, 2), Head(1, 0), Head(1, 2)]) == "L0-1H0,L0-1H2"
    assert format_heads([]) == ""


@settings(deadline=None, max_examples=200)
@given(st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, HEADS - 1)), min_size=1))
def test_written_heads_read_back_as_the_same_heads(pairs):
    heads = sorted(Head(*pair) for pair in pairs)
    text = format_heads(heads)
    assert select_heads(text, num_layers=LAYERS, num_heads=HEADS) == heads
