"""Mutants of a source file, as mutmut makes them, and which of them count.

A mutant that changes nothing but words does not count: a text for people (any string or f-string
with a space in it, anything named message), or what a call of a logger is given. mutmut itself
leaves out docstrings, annotations, module and class level, and functions that are decorated with
anything but staticmethod and classmethod.
"""

import ast
import os
import textwrap
from contextlib import chdir
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from mutmut.configuration import reset_config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

LOGGERS = {"logger", "_log"}


@dataclass(frozen=True)
class Mutant:
    """name: mutmut's. original, mutated: source of the function without and with the change."""

    name: str
    path: str
    original: str
    mutated: str

    @property
    def change(self) -> tuple[str, str]:
        """Lines that only the original has, and those that only the mutant has."""
        lines = list(self._diff())[2:]
        return tuple(  # type: ignore[return-value]
            "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
        )

    @property
    def diff(self) -> str:
        return "\n".join(self._diff())

    def _diff(self) -> list[str]:
        before, after = self.original.splitlines(), self.mutated.splitlines()
        return list(unified_diff(before, after, self.path, self.name, lineterm="", n=2))


def counted_mutants(tree: Path, path: str) -> list[Mutant]:
    """Of the file at this path, relative to a tree that has mutmut's configuration."""
    with chdir(tree):
        reset_config()
        code = Path(path).read_text()
        made = mutate_file_contents(path, code)
    lines = made.code.splitlines()
    sources = {
        name: textwrap.dedent("\n".join(lines[span.start - 1 : span.end]))
        for name, span in made.line_span_by_function_name.items()
    }
    mutants = []
    for name in made.mutant_names:
        function, _, _ = name.rpartition("__mutmut_")
        original = sources[f"{function}__mutmut_orig"].replace("__mutmut_orig", "")
        mutated = sources[name].replace(name.removeprefix(function), "")
        if not changes_words_only(ast.parse(original), ast.parse(mutated)):
            mutants.append(Mutant(get_mutant_name(Path(path), name), path, original, mutated))
    return mutants


def changes_words_only(original: ast.AST, mutated: ast.AST) -> bool:
    """Whether the only difference of two trees lies in a text or in a call of the logger."""
    if _is_text(original) or _is_log_call(original):
        return True
    if type(original) is not type(mutated):
        return False
    differing = [
        (before, after)
        for name in original._fields
        if not _equal(before := getattr(original, name), after := getattr(mutated, name))
    ]
    if len(differing) != 1:
        return False
    before, after = differing[0]
    if isinstance(before, list) and isinstance(after, list):
        return _lists_differ_in_words(before, after)
    return isinstance(before, ast.AST) and changes_words_only(before, after)


def _lists_differ_in_words(before: list[ast.AST], after: list[ast.AST]) -> bool:
    if len(before) == len(after):
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if not _equal(a, b)]
        return len(pairs) == 1 and changes_words_only(*pairs[0])
    left = list(map(_dump, after))
    removed = [node for node in before if _dump(node) not in left]
    return len(removed) == 1 and _is_text(removed[0])


def _is_text(node: object) -> bool:
    if isinstance(node, ast.keyword):
        return _is_text(node.value)
    if isinstance(node, ast.JoinedStr):
        return any(map(_is_text, node.values))
    if isinstance(node, ast.Name):
        return node.id == "message"
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _is_log_call(node: object) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    )


def _equal(before: object, after: object) -> bool:
    if isinstance(before, list) and isinstance(after, list):
        return list(map(_dump, before)) == list(map(_dump, after))
    return _dump(before) == _dump(after)


def _dump(node: object) -> str:
    return ast.dump(node) if isinstance(node, ast.AST) else repr(node)


def python_files(tree: Path, patterns: tuple[str, ...]) -> list[str]:
    """Paths relative to the tree, sorted."""
    found = (path for pattern in patterns for path in tree.glob(pattern))
    return sorted(os.path.relpath(path, tree) for path in found)
