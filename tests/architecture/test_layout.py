"""The house rules that no linter checks: import direction, sizes, docstrings, forbidden calls."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
FORBIDDEN_NAMES = FORBIDDEN_BUILTINS | {f".{name}" for _, name in FORBIDDEN_CALLS}
BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def source_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if "_pb2" not in path.name]


PRODUCT = source_files(*PACKAGES)
EVERYTHING = PRODUCT + source_files("tests", "benchmarks")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """What the rules are about, of one file: it is parsed once, and its tree is not kept.

    imported: top-level packages. long_functions, forbidden_calls: by name.
    """

    num_lines: int
    has_docstring: bool
    imported: frozenset[str]
    long_functions: tuple[str, ...]
    forbidden_calls: tuple[str, ...]


@cache
def facts_of(path: Path) -> Facts:
    text = path.read_text()
    module = ast.parse(text)
    statements = list(statements_in(module))
    # Looking at every expression of every file takes longer than to parse them.
    may_call = any(name in text for name in FORBIDDEN_NAMES)
    return Facts(
        len(text.splitlines()),
        bool(ast.get_docstring(module)),
        frozenset(name for node in statements for name in imported_packages(node)),
        tuple(name for node in statements for name in long_function(node)),
        tuple(name for node in ast.walk(module) for name in forbidden_call(node))
        if may_call
        else (),
    )


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Those of the node's own body and of all bodies in it; no expression has any."""
    for field in BODIES:
        for statement in getattr(node, field, ()):
            yield statement
            yield from statements_in(statement)


def imported_packages(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.split(".")[0]


def long_function(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        assert node.end_lineno is not None
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
            yield node.name


def forbidden_call(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Name) and called.id in FORBIDDEN_BUILTINS:
        yield called.id
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        name = called.value.id, called.attr
        if name in FORBIDDEN_CALLS:
            yield ".".join(name)


def imported_from_above(path: Path) -> set[str]:
    own = LAYERS[path.relative_to(ROOT).parts[0]]
    return {name for name in facts_of(path).imported if LAYERS.get(name, -1) > own}


# One test for all files of a rule: a test of its own for each takes longer than the rules do.
def test_imports_point_down_lazy_and_type_checking_ones_included() -> None:
    found = {name_of(path): imported_from_above(path) for path in PRODUCT}
    assert {name: imported for name, imported in found.items() if imported} == {}


def test_files_are_small() -> None:
    num_lines = {name_of(path): facts_of(path).num_lines for path in EVERYTHING}
    assert {name: num for name, num in num_lines.items() if num > MAX_FILE_LINES} == {}


def test_functions_are_small() -> None:
    found = {name_of(path): facts_of(path).long_functions for path in EVERYTHING}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in EVERYTHING if not facts_of(path).has_docstring] == []


def test_nothing_executes_or_unpickles_data() -> None:
    found = {name_of(path): facts_of(path).forbidden_calls for path in PRODUCT}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_rules_have_files_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in EVERYTHING} == {
        *PACKAGES,
        "tests",
        "benchmarks",
    }
