"""Principal components of captured heads, against numpy's SVD and a head made by hand."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from headwise.plasticity.components import COLUMNS, position_correlations
from headwise.plasticity.reader import VectorTable, find_heads, read_vectors
from headwise.plasticity.run import measure_plasticity
from test_plasticity import DATA


def table_of(vectors, position):
    zeros = np.zeros(len(position), np.int64)
    return VectorTable(vectors.astype(np.float32), position, zeros, zeros, None)


def test_a_direction_that_follows_the_position_is_found():
    rng = np.random.default_rng(0)
    position = np.arange(400)
    axis = np.array([0.0, 0.6, 0.0, 0.8])
    vectors = 0.1 * position[:, None] * axis + rng.normal(size=(400, 4))
    rows = position_correlations(table_of(vectors, position), 4)
    assert rows[0, 0] > 0.99  # the larger entry of the axis is positive, so it grows
    assert rows[0, 1] < 1e-100
    assert np.abs(rows[1:, 0]).max() < 0.05
    assert rows[:, 2].sum() == pytest.approx(1.0)


def test_the_numbers_are_those_of_numpys_singular_values():
    root = DATA / "log" / "data"
    out = read_vectors(next(iter(sorted(root.rglob("l*q/data.parquet")))))
    rows = position_correlations(out, 3)
    centred = out.vectors.astype(float) - out.vectors.astype(float).mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    for at in range(3):
        expected = np.corrcoef(u[:, at], out.position)[0, 1]
        assert abs(rows[at, 0]) == pytest.approx(abs(expected), abs=1e-9)
        assert rows[at, 2] == pytest.approx(s[at] ** 2 / (s**2).sum(), abs=1e-12)


def test_vectors_that_never_change_have_no_correlation():
    rows = position_correlations(table_of(np.ones((5, 3)), np.arange(5)), 2)
    assert np.isnan(rows).all()


def test_every_captured_head_has_its_rows(tmp_path):
    root = DATA / "log" / "data"
    measure_plasticity(root, out=tmp_path, pca=2, max_workers=1)
    with (tmp_path / "correlations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    folder = find_heads(root)
    heads = {(layer, head, "q") for layer, head in folder.queries}
    heads |= {(layer, head, "k") for layer, head in folder.keys}
    assert {(int(r["layer"]), int(r["head"]), r["kind"]) for r in rows} == heads
    assert len(rows) == 2 * len(heads)
