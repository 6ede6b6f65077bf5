"""The notebooks run from top to bottom, cell by cell, with few steps and texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
# what the first cell of each sets, made small
SMALL = {"STEPS, TEXTS, LENGTH = ": "1, 4, 32", "TEXTS, LENGTH = ": "6, 32"}
SMALL |= {"STEPS, EVERY = ": "2, 1", "HEADS = ": '"L4H6"'}


def cells(path: Path) -> list[str]:
    """Code cells, the settings of the first one made small."""
    found = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    for name, value in SMALL.items():
        code[0] = re.sub(
            rf"^{re.escape(name)}[^#\n]*", name + value + " ", code[0], flags=re.MULTILINE
        )
    return code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    for number, text in enumerate(cells(path)):
        exec(compile(text, f"{path.name}, cell {number}", "exec"), names)


def test_there_are_three_and_none_carries_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs")
