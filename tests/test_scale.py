"""The bench of scale: its model on disk, its exponents, and the tables of what models need."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import (
    MACHINES,
    SHAPES,
    LayerRow,
    gpu_rows,
    measured_layer,
    memory_rows,
    shown_seconds,
    smallest_machine,
    times,
)
from benchmarks.harness import print_rows
from benchmarks.scale import Shape, fitted_exponent, limited, write_model
from headwise.models.loading import load_model
from headwise.models.stored_weights import stored_weights
from headwise.values import to_plain

TINY = Shape(layers=2, hidden=32, heads=4, vocabulary=2_000)
DOCS = Path(__file__).parent.parent / "docs"


def test_the_written_model_loads_whole_and_streamed_and_its_weights_differ(tmp_path):
    write_model(tmp_path, TINY)
    assert (
        0
        <= sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) - 4 * TINY.weights
        < 10_000
    )  # headers
    plain = load_model(str(tmp_path), bos=False, stream=False)
    streamed = load_model(str(tmp_path), bos=False, stream=True)
    assert streamed.describe().fingerprint == plain.describe().fingerprint
    assert stored_weights(streamed.model).num_bytes == 4 * TINY.weights
    first, second = (layer.mlp.dense_h_to_4h.weight for layer in plain.model.transformer.h)
    assert not torch.equal(first, second)
    assert len(plain.model.transformer.word_embeddings.weight.unique(dim=0)) == TINY.vocabulary
    assert plain.model(torch.arange(8)[None]).logits.std() > 0.01  # no norm is 0


def test_the_peak_of_a_limited_process_is_its_own_and_the_limit_holds(tmp_path):
    ours = np.ones(400_000_000, dtype=np.uint8)  # what the process is started from does not count
    small = [sys.executable, "-c", "x = bytearray(50_000_000)"]
    peak, seconds = limited(small, 2.0, tmp_path)
    assert 50_000_000 < peak < 150_000_000 < ours.nbytes
    assert seconds > 0
    with pytest.raises(subprocess.CalledProcessError, match="bytearray"):
        limited([sys.executable, "-c", "x = bytearray(3_000_000_000)"], 2.0, tmp_path)


def test_the_exponent_of_a_power_law_is_found():
    sizes = (4, 8, 16, 32)
    assert fitted_exponent(sizes, [0.3 * n**1.5 for n in sizes]) == pytest.approx(1.5)


def layers(rate=80.0, measured=5):
    """Rows as if the first shapes had been measured."""
    blank = [LayerRow(shape.name, 1.0, *(None,) * 5) for shape in SHAPES]
    return [replace(row, gflop_s=rate) if n < measured else row for n, row in enumerate(blank)]


def test_times_follow_from_operations_and_rates():
    rows = {row.model: row for row in times(layers())}
    bloom = next(shape for shape in SHAPES if shape.name == "BLOOM-1b7")
    operations = 65_536 * bloom.layers * (2 * 12 * bloom.hidden**2 + 4 * bloom.hidden * 512)
    assert rows["BLOOM-1b7"].here == shown_seconds(operations / 80e9)
    assert rows["BLOOM-1b7"].large_gpu == shown_seconds(operations / MACHINES[1].rate)
    assert rows["BLOOM-176B"].here.endswith("*")  # by the rate of another shape
    assert rows["BLOOM-176B"].large_gpu.endswith("offloaded")
    assert rows["BLOOM-176B"].repair_step == "offloaded"


def test_a_faster_device_has_shorter_times_and_no_device_none():
    slow, fast, none = (times(layers(rate))[0].here for rate in (1.0, 1e6, None))
    assert slow.endswith("h")
    assert fast.endswith("s")
    assert none == "*"


def test_seconds_are_shown_in_the_unit_that_suits_them():
    found = [shown_seconds(s) for s in (0.0123, 7, 119, 600, 7200, 86_400 * 3)]
    assert found == ["0.012 s", "7 s", "120 s", "10 min", "2 h", "3 d"]


def test_the_smallest_machine_that_holds_it_is_named():
    assert smallest_machine(10e9) == "16 GB GPU"
    assert smallest_machine(15e9) == "80 GB GPU"  # a tenth of a device is not ours
    assert smallest_machine(1e12) == "offloaded"


def test_a_layer_is_measured_where_it_fits(monkeypatch):
    small = replace(SHAPES[0], hidden=64, heads=4, kv_heads=4, inner=256)
    found = measured_layer(small, "cpu", tokens=32)
    assert found.diagnose_ms > 0
    assert found.gflop_s > 0
    huge = next(shape for shape in SHAPES if shape.name == "BLOOM-176B")
    assert measured_layer(huge, "cpu").gflop_s is None


def test_the_tables_are_readable_in_80_columns(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu.measured_layer", lambda shape, _: layers()[0])
    monkeypatch.setenv("COLUMNS", "80")
    print_rows("gpu", to_plain(gpu_rows("cpu")))
    text = capsys.readouterr().out
    assert "…" not in text
    assert "Llama-3-70B" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_page_has_the_memory_that_the_code_counts():
    page = (DOCS / "scale.md").read_text()
    for row in memory_rows():
        assert "| " + " | ".join(map(str, astuple(row))) + " |" in page


def test_the_times_on_the_page_follow_from_the_layers_on_the_page():
    lines = (DOCS / "scale.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    names = {shape.name for shape in SHAPES}
    tables = [row for row in cells if row and row[0] in names]
    measured = [row for row in tables if len(row) == len(fields(LayerRow))]
    rows = [
        LayerRow(row[0], *(float(cell) if cell else None for cell in row[1:])) for row in measured
    ]
    assert [row.model for row in rows] == [shape.name for shape in SHAPES]
    for row in times(rows):
        assert list(astuple(row)) in tables
