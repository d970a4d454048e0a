"""The training text: the Python standard library, cut into documents and split by whole files.

Knows where the sources lie and which of them are worth reading. Knows nothing of tokens, models or
the chat format. Everything collected here is covered by PSF-2.0 (see LICENSE.PSF-2.0.txt).
"""

import ast
import hashlib
import importlib
import inspect
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HELD_OUT_ONE_IN = 20
"""One document group in this many is never trained on."""

_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_EXCLUDED_FILES = frozenset({"html/entities.py", "pydoc_data/topics.py"})
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "__phello__", "lib-dynload")

_COMPILED_MODULES = (
    "_collections _csv _datetime _functools _io _json _operator _random _socket _sqlite3 _struct"
    " _thread array atexit binascii builtins cmath errno faulthandler fcntl gc itertools marshal"
    " math mmap posix pwd pyexpat resource select signal sys syslog termios time unicodedata zlib"
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus.

    `group` decides the split: documents that tell the same story (`datetime.py` and
    `_pydatetime.py`, a module and its docstrings) share it, so that neither leaks into the other.
    `module` is the dotted import name, or the title of a prose topic.
    """

    group: str
    module: str
    kind: str  # "source", "topic" or "compiled"
    text: str


def is_held_out(group: str) -> bool:
    """Whether the group belongs to validation: a hash of its name alone, stable across machines."""
    digest = hashlib.sha256(group.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 over every document in order: two runs with equal digests read the same text."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.kind, document.module, document.text):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def collect_corpus(stdlib: Path) -> list[Document]:
    """Every document under `stdlib` plus the docstrings of compiled modules, in a fixed order.

    Raises FileNotFoundError when the folder holds no Python sources (a stripped interpreter).
    """
    documents = [*_sources(stdlib), *_topics(stdlib), *_compiled()]
    if not any(document.kind == "source" for document in documents):
        raise FileNotFoundError(f"no standard library sources under {stdlib}")
    return documents


def _sources(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if _is_excluded(relative):
            continue
        with tokenize.open(path) as file:
            text = file.read().strip()
        if text:
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            yield Document(_group_of(module), module, "source", text)


def _is_excluded(relative: Path) -> bool:
    return (
        not _EXCLUDED_FOLDERS.isdisjoint(relative.parts)
        or relative.as_posix() in _EXCLUDED_FILES
        or relative.parts[0].startswith(_EXCLUDED_PREFIXES)
    )


def _group_of(module: str) -> str:
    """`_pydatetime` and `_datetime` are told apart from `datetime` by nothing but the prefix."""
    return module.lstrip("_").removeprefix("py") or module


def _topics(stdlib: Path) -> Iterator[Document]:
    """The language reference that `help()` shows, as prose: one document a topic."""
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.exists():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            topics: dict[str, str] = ast.literal_eval(node.value)
            for title in sorted(topics):
                yield Document(f"topic:{title}", title, "topic", topics[title].strip())


def _compiled() -> Iterator[Document]:
    """Docstrings of what is written in C: `module` is the full name of the documented object."""
    for module_name in _COMPILED_MODULES.split():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue  # a platform module, such as `resource`, that this build does not have
        public_name = "os" if module_name == "posix" else module_name.lstrip("_")
        yield from _documented_members(module, public_name)


def _documented_members(module: ModuleType, public_name: str) -> Iterator[Document]:
    group = _group_of(public_name)
    prefix = "" if public_name == "builtins" else f"{public_name}."
    for name, member in sorted(vars(module).items()):
        if name.startswith("_") or not callable(member):
            continue
        yield from _docstring_of(group, prefix + name, member)
        if inspect.isclass(member) and not issubclass(member, BaseException):
            for method_name, method in sorted(vars(member).items()):
                if not method_name.startswith("_") and callable(method):
                    yield from _docstring_of(group, f"{prefix}{name}.{method_name}", method)


def _docstring_of(group: str, name: str, member: object) -> Iterator[Document]:
    docstring = inspect.getdoc(member)
    if docstring:
        yield Document(group, name, "compiled", docstring.strip())
