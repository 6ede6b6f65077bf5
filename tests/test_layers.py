"""The shape of the source: one direction of imports, small files and functions, no drawers."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headwise"

# A package imports only what stands above it; the loose modules of the top are the ground floor.
ORDER = """
    errors ranks alarms bundled integrity artefacts values provenance settings
    heads intervals frames sheets progress workers drawing
    models
    forward
    passes
    texts
    diagnosis
    watch
    surgery
    plasticity
    proof
    therapy
    studies
    report
    handover
    bench
    __init__ cli __main__
""".split()  # noqa: SIM905

MAX_FUNCTION, P90_FUNCTION, MAX_FILE, MAX_MODULES = 60, 25, 400, 16
DRAWERS = {"utils", "util", "common", "helpers", "base", "manager", "misc"}

MODULES = sorted(path for path in SOURCE.rglob("*.py"))
ids = [str(path.relative_to(SOURCE)) for path in MODULES]


def room(path: Path) -> str:
    """The package, or the loose module, that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree):
    """headwise modules that are imported when the code runs; types alone do not count."""
    for node in tree.body if isinstance(tree, ast.Module) else ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headwise":
            yield from [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [a.name for a in node.names if a.name.split(".")[0] == "headwise"]
        yield from imported(node)


def functions(text):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return {node.name: node.end_lineno - node.lineno + 1 for node in found}


def test_every_package_has_a_place():
    missing = sorted({room(path) for path in MODULES} - set(ORDER))
    assert not missing, f"place {missing} in ORDER in {Path(__file__).name}"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_package_imports_only_what_stands_before_it(path):
    allowed = ORDER[: ORDER.index(room(path)) + 1]
    rooms = {name.split(".")[1] for name in imported(ast.parse(path.read_text()))}
    wrong = sorted(name for name in rooms & set(ORDER) if name not in allowed)
    assert not wrong, f"{path.name} imports {wrong}, which stand after it"


def module_name(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_by_a_detour():
    names = {module_name(path): path for path in MODULES}
    graph = {
        name: {
            target if target in names else target.rpartition(".")[0]
            for target in imported(ast.parse(path.read_text()))
        }
        for name, path in names.items()
    }
    state: dict[str, int] = {}

    def visit(name, trail):
        assert state.get(name) != 1, f"a cycle: {' -> '.join([*trail, name])}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for target in sorted(graph.get(name, set()) & set(names)):
            visit(target, [*trail, name])
        state[name] = 2

    for name in sorted(names):
        visit(name, [])


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    assert not {name: n for name, n in functions(text).items() if n > MAX_FUNCTION}


def test_most_functions_are_short():
    lengths = [n for path in MODULES for n in functions(path.read_text()).values()]
    assert statistics.quantiles(lengths, n=10)[-1] <= P90_FUNCTION


def test_a_package_fits_in_the_head():
    counts = {p: len(list(p.glob("*.py"))) for p in {path.parent for path in MODULES}}
    assert not {str(p): n for p, n in counts.items() if n > MAX_MODULES}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_says_what_it_is(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc
    assert "═" not in path.read_text()  # no banners


def test_there_is_no_drawer():
    assert not DRAWERS & {path.stem for path in SOURCE.rglob("*")}


def test_the_formatter_wins():
    assert not [path.name for path in MODULES if "fmt: " + "skip" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_only_the_command_line_draws(path):
    """The library reports through a callback; what is shown, and where, is its caller's choice."""
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert room(path) == "cli" or not modules & {"rich", "typer", "tqdm"}
