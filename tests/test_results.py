"""docs/results.md: its measured tables are made anew from the small artefacts in docs/data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "data" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_artefacts_give(tables):
    page = tables.PAGE.read_text()
    found = tables.on_page(page)
    assert set(found) == set(tables.TABLES)
    for name, table in found.items():
        assert table == tables.TABLES[name](), f"{name}: python docs/data/tables.py --write"
    assert tables.written(page) == page


def test_the_artefacts_are_small():
    assert sum(path.stat().st_size for path in (DOCS / "data").rglob("*.json*")) < 600_000


def test_a_share_is_of_the_summed_harm_of_all_seeds(tables):
    """Seed 0 is half cured of a harm of 4, seed 1 wholly of one of 8: 10 of 12, not 75%."""
    rows = [
        {"seed": 1, "tokens": [9, 9], "healthy": [1, 1], "ill": [5, 5], "loss": [1, 1]},
        {"seed": 0, "tokens": [9, 9], "healthy": [1, 1], "ill": [3, 3], "loss": [2, 2]},
    ]
    assert tables.share(rows) == "83% (83 to 83); 50, 100 (seed 0, 1)"


def test_equal_values_share_their_rank(tables):
    scipy = pytest.importorskip("scipy.stats")
    values = np.array([0.0, 0.1, 0.1, 0.5, 0.3, 0.1])
    expected = scipy.spearmanr(np.arange(6), values)[0]
    assert tables._rank_correlation(values) == pytest.approx(expected)
