"""Kernels are written for the oldest Triton that pyproject allows, which the CPU's need not be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = sorted(
    path
    for package in ("attention", "workers")
    for path in (ROOT / package).rglob("*.py")
    if "tl.zeros(" in path.read_text()
)


def is_zeros(node):
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "zeros"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_blocks_of_zeros_have_sizes_that_are_names(path) -> None:
    """Triton 3.6 compiles tl.zeros as a function of its own, which a tuple's attribute reaches as
    an integer that it refuses; tl.full has no such limit."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if is_zeros(node)]
    assert calls
    assert not [node.lineno for node in calls if any(map(is_attribute, sizes(node)))]


def sizes(call):
    return call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args[:1]


def is_attribute(node):
    return isinstance(node, ast.Attribute)
