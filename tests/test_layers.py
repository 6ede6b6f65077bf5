"""The shape of the source: one direction of imports, no drawers, no more concepts than before."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headwise"

# A package imports only what stands above it; the loose modules of the top are the ground floor.
ORDER = """
    errors keywords ranks bundled integrity artefacts values alarms provenance settings
    heads intervals staged frames tables progress workers drawing
    models
    texts
    forward
    cost
    diagnosis
    watch
    surgery
    triaging
    plasticity
    proof
    therapy
    pruning
    studies
    report
    checkups
    handover
    __init__ cli __main__
""".split()  # noqa: SIM905

RATCHET = Path(__file__).parent / "data" / "ratchet.json"
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


def is_record(node):
    """A dataclass or a pydantic model: a kind of value that a reader has to know."""
    return isinstance(node, ast.ClassDef) and (
        any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        or any("BaseModel" in ast.unparse(base) for base in node.bases)
    )


def signals():
    """How much there is to know: a number may fall; a rise needs a reason in its commit."""
    trees = [ast.parse(path.read_text()) for path in MODULES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    )
    return {
        "source lines": sum(path.read_text().count("\n") for path in MODULES),
        "record types": sum(map(is_record, nodes)),
        "functions with eight or more arguments": sum(
            len(f.args.args) + len(f.args.kwonlyargs) >= 8 for f in functions
        ),
        "public names defined twice": sum(count > 1 for count in names.values()),
    }


def test_concepts_do_not_multiply(capsys):
    """`HEADWISE_PIN=1 pytest tests/test_layers.py` writes the numbers of today."""
    found = signals()
    if os.environ.get("HEADWISE_PIN"):
        RATCHET.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads(RATCHET.read_text())
    with capsys.disabled():
        for name, number in found.items():
            print(f"\n{name}: {before[name]:,} -> {number:,}", end="")  # noqa: T201
    assert not {name: n for name, n in found.items() if n > before[name]}


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
