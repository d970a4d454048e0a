"""Conversations made from the standard library itself: questions about it, answered by its text.

Knows how to read definitions and docstrings out of a document. Knows no tokens and no files; the
caller says which documents may be used, so held-out files never reach the training conversations.
"""

import ast
import copy
import inspect
import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.builtin.corpus import Document
from workers.builtin.tokenizer import Message

MAX_ANSWER_CHARS = 800
MAX_SOURCE_LINES = 40
_DOCSTRING_TASK_ONE_IN = 3
_TWO_TURNS_ONE_IN = 6
_SYSTEM_ONE_IN = 4
_PERSONA_REPEATS = 12

_ALIASES = {
    "posixpath": "os.path",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_pyio": "io",
}
_SELDOM_ASKED = ("idlelib", "lib2to3", "turtledemo")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "You answer questions about the Python standard library.",
    "Answer briefly.",
)
_MEANING_QUESTIONS = (
    "What does {} do?",
    "What is {}?",
    "Explain {}.",
    "What is {} for?",
    "How does {} work?",
    "Tell me about {}.",
    "Describe {}.",
    "what does {} do",
)
_SOURCE_QUESTIONS = (
    "Write {}.",
    "Write {} in Python.",
    "Show me the source of {}.",
    "Implement {}.",
    "How is {} implemented?",
)
_TOPIC_QUESTIONS = (
    "Explain {} in Python.",
    "What does the Python reference say about {}?",
    "Tell me about {} in Python.",
    "How do {} work in Python?",
)
_PERSONA = (
    (
        ("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning"),
        "Hello! Ask me about the Python standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
        "I am the small model that ships with Tessera. I was trained on the Python standard"
        " library, so I can talk about Python code and little else.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help"),
        "I can describe modules, classes and functions of the Python standard library and write"
        " short pieces of Python. I am very small, so please check what I say.",
    ),
    (
        ("Thanks", "Thank you!", "Thanks a lot.", "Great, thank you"),
        "You are welcome!",
    ),
    (
        ("Goodbye", "Bye", "See you later!"),
        "Goodbye!",
    ),
    (
        ("What is Tessera?", "Tell me about Tessera.", "What does Tessera do?"),
        "Tessera serves large language models. I am its built-in model, here so that it runs"
        " without a download.",
    ),
    (
        ("What is Python?", "Tell me about Python.", "Explain Python."),
        "Python is a programming language. Its standard library holds modules for text, numbers,"
        " files, networks and much more.",
    ),
    (
        ("Tell me a joke.", "Tell me a story.", "Write a poem.", "Write a haiku."),
        "I only know the Python standard library, and the best line in it is this one:"
        " Beautiful is better than ugly.",
    ),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer; neither has leading or trailing white space."""

    question: str
    answer: str


def conversations(documents: Sequence[Document], seed: int) -> list[list[Message]]:
    """Every conversation the documents give, shuffled into turns; the same for the same seed."""
    rng = random.Random(seed)
    result: list[list[Message]] = []
    for document in documents:
        if document.module.startswith(_SELDOM_ASKED):
            continue
        exchanges = list(_exchanges(document, rng))
        while exchanges:
            num_turns = 2 if len(exchanges) > 1 and rng.randrange(_TWO_TURNS_ONE_IN) == 0 else 1
            turns = [exchanges.pop(rng.randrange(len(exchanges))) for _ in range(num_turns)]
            result.append(_messages(turns, rng))
    return result


def persona_conversations(seed: int) -> list[list[Message]]:
    """Greetings and what the model says of itself: the only text here that is not the library's."""
    rng = random.Random(seed)
    return [
        _messages([Exchange(question, answer)], rng)
        for questions, answer in _PERSONA
        for question in questions
        for _ in range(_PERSONA_REPEATS)
    ]


def _messages(turns: Sequence[Exchange], rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.randrange(_SYSTEM_ONE_IN) == 0:
        messages.append(Message("system", rng.choice(_SYSTEM_PROMPTS)))
    for turn in turns:
        messages.append(Message("user", turn.question))
        messages.append(Message("assistant", turn.answer))
    return messages


def _exchanges(document: Document, rng: random.Random) -> Iterator[Exchange]:
    match document.kind:
        case "source":
            yield from _from_source(document, rng)
        case "topic":
            yield from _about_topic(document, rng)
        case "compiled":
            name = document.module
            yield from _about((name, name, f"`{name}`", f"{name}()"), document.text, 5, rng)


def _about_topic(document: Document, rng: random.Random) -> Iterator[Exchange]:
    body = document.text.partition("\n\n")[2]  # the first paragraph is an underlined title
    if answer := _shortened(body):
        title = f'"{document.module}"'
        yield Exchange(rng.choice(_TOPIC_QUESTIONS).format(title), answer)


def _about(
    spellings: Sequence[str], docstring: str, num_phrasings: int, rng: random.Random
) -> Iterator[Exchange]:
    """The same answer to several phrasings, each with one of the spellings of the name."""
    answer = _shortened(inspect.cleandoc(docstring))
    if answer:
        for question in rng.sample(_MEANING_QUESTIONS, num_phrasings):
            yield Exchange(question.format(rng.choice(spellings)), answer)


def _shortened(text: str) -> str:
    """Whole leading paragraphs of at most MAX_ANSWER_CHARS; empty when the first is longer."""
    answer = ""
    for paragraph in text.strip().split("\n\n"):
        candidate = f"{answer}\n\n{paragraph}" if answer else paragraph
        if len(candidate) > MAX_ANSWER_CHARS:
            break
        answer = candidate
    if answer.endswith(":") and "\n\n" in answer:
        answer = answer.rpartition("\n\n")[0]  # what it announces did not fit
    return answer.strip()


def _from_source(document: Document, rng: random.Random) -> Iterator[Exchange]:
    module = _ALIASES.get(document.module, document.module)
    tree = ast.parse(document.text)
    if docstring := ast.get_docstring(tree):
        names = (module, f"the module {module}", f"the {module} module")
        yield from _about(names, docstring, 3, rng)
    lines = document.text.split("\n")
    for owner, kind, node in _definitions(tree, module):
        name = f"{owner}.{node.name}"
        docstring = ast.get_docstring(node)
        if docstring and not node.name.startswith("_"):
            spellings = (name, name, f"`{name}`", f"the {kind} {name}")
            yield from _about(spellings, docstring, 3, rng)
        if isinstance(node, ast.ClassDef):
            yield from _methods_of(name, node)
        else:
            yield from _source_of(f"the {kind} {name}", node, lines, rng)


def _definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, str, _Definition]]:
    """(dotted owner, kind, node) of module-level definitions and of what classes define."""
    for node in tree.body:
        if isinstance(node, _Definition):
            yield module, "class" if isinstance(node, ast.ClassDef) else "function", node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _Function):
                    yield f"{module}.{node.name}", "method", member


def _methods_of(name: str, node: ast.ClassDef) -> Iterator[Exchange]:
    methods = [
        member.name
        for member in node.body
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
    ]
    if 2 <= len(methods) <= MAX_SOURCE_LINES:
        listed = ", ".join(methods[:-1]) + f" and {methods[-1]}"
        yield Exchange(
            f"Which methods does {name} have?", f"The class {name} has the methods {listed}."
        )


def _source_of(
    title: str, node: _Function, lines: Sequence[str], rng: random.Random
) -> Iterator[Exchange]:
    body = lines[node.lineno - 1 : node.end_lineno]
    if not 3 <= len(body) <= MAX_SOURCE_LINES:
        return
    source = textwrap.dedent("\n".join(body))
    question = rng.choice(_SOURCE_QUESTIONS).format(title)
    if not node.name.startswith("_") or node.name.endswith("__"):
        yield Exchange(question, f"```python\n{source}\n```")
    answer = _shortened(ast.get_docstring(node) or "")
    if answer and rng.randrange(_DOCSTRING_TASK_ONE_IN) == 0:
        yield Exchange(f"Write a docstring for this code:\n\n```python\n{_bare(node)}\n```", answer)


def _bare(node: _Function) -> str:
    """The definition as code alone: no docstring, no comments, no decorators, canonical layout."""
    bare = copy.copy(node)
    bare.body = node.body[1:] or [ast.Pass()]
    bare.decorator_list = []
    return ast.unparse(ast.fix_missing_locations(bare))
