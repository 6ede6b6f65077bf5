"""The shape of the source: one direction of imports, small files and functions, no drawers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headwise"

# A module imports only modules to its left or above. A new module is placed here once.
ORDER = """
    errors artefacts settings heads terminal patient resampling losses normality
    architectures attention gelu tap weights texts suffix models check
    measures dormancy diagnosis published survey figures
    plans recipes corpus qkfiles masters lora surgery training repair
    perplexity ablation evaluation completions harness trajectories comparison
    qkdata querymodel pairs cells plasticity_settings headgroup plasticity_tables plasticity
    plasticity_figures capture
    studies studyestimate studysummary studyrun
    papervalues reporttables reportdata papertables drifttables verdict paperfigures
    reportpayload reportpage report
    bench_diagnose bench_repair bench_ablation bench_plasticity benchmarks
    __init__ cli_app cli_options cli_heads cli_proof cli_study cli
""".split()  # noqa: SIM905

MAX_FUNCTION, MAX_FILE = 60, 400
DRAWERS = {"utils", "util", "common", "helpers", "base", "manager", "misc"}

MODULES = sorted(SOURCE.glob("*.py"))
ids = [path.stem for path in MODULES]


def imported(tree):
    """headwise modules that are imported when the code runs; types alone do not count."""
    for node in tree.body if isinstance(tree, ast.Module) else ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headwise":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from [parts[1] for parts in names if parts[0] == "headwise" and len(parts) > 1]
        yield from imported(node)


def test_every_module_has_a_place():
    missing = sorted({path.stem for path in MODULES} - set(ORDER))
    assert not missing, f"place {missing} in ORDER in {Path(__file__).name}"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_imports_only_what_stands_before_it(path):
    if path.stem not in ORDER:
        pytest.skip("has no place yet")
    before = ORDER[: ORDER.index(path.stem)]
    wrong = sorted(
        name
        for name in set(imported(ast.parse(path.read_text())))
        if name in ORDER and name not in before
    )
    assert not wrong, f"{path.stem} imports {wrong}, which stand after it"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    }
    assert not long


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_says_what_it_is(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc
    assert "═" not in path.read_text()  # no banners


def test_there_is_no_drawer():
    assert not DRAWERS & {path.stem for path in SOURCE.rglob("*")}
