"""The house rules that no linter checks: import direction, sizes, docstrings, forbidden calls."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("attention", "workers", "service")
LAYERS = {"attention": 0, "workers": 1, "service": 2}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_CALLS = {
    ("pickle", "loads"),
    ("pickle", "load"),
    ("cloudpickle", "loads"),
    ("dill", "loads"),
    ("torch", "load"),
    ("yaml", "load"),
    ("marshal", "loads"),
}
FORBIDDEN_BUILTINS = {"eval", "exec"}


def source_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if "_pb2" not in path.name]


PRODUCT = source_files(*PACKAGES)
EVERYTHING = PRODUCT + source_files("tests", "benchmarks")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_packages(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_imports_point_down_lazy_and_type_checking_ones_included(path: Path) -> None:
    own = LAYERS[path.relative_to(ROOT).parts[0]]
    tree = ast.parse(path.read_text())
    upward = {name for name in imported_packages(tree) if LAYERS.get(name, -1) > own}
    assert not upward


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_nothing_executes_or_unpickles_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_BUILTINS
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            assert (node.func.value.id, node.func.attr) not in FORBIDDEN_CALLS
