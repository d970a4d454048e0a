"""What an expression in PromQL selects and how: enough of the grammar to check our own queries.

A scanner, not a parser: it knows selectors, ranges, calls and grouping clauses, and leaves judging
whether the whole is valid to promtool.
"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])"""
    r"""|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?[smhdwy]?)"""
    r"""|(?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])"""
)
_CLAUSES = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass(frozen=True, slots=True)
class Selector:
    """One selection of series. range: what stands in the brackets, None for an instant vector.

    functions: the calls around it, outermost first.
    """

    metric: str
    matchers: dict[str, tuple[str, str]]
    range: str | None
    functions: tuple[str, ...]

    @property
    def text(self) -> str:
        """The selector alone, as PromQL for an instant vector."""
        matchers = ", ".join(f"{k}{op}{value}" for k, (op, value) in self.matchers.items())
        return f"{self.metric}{{{matchers}}}"


@dataclass(slots=True)
class Scan:
    """Everything that one expression mentions."""

    selectors: list[Selector] = field(default_factory=list)
    grouping_labels: set[str] = field(default_factory=set)


def scan(expression: str) -> Scan:
    """Raises ValueError on a character that PromQL does not have."""
    return _Scanner(_tokens(expression)).run()


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ValueError(f"unexpected {expression[position]!r} in {expression}")
        if match.lastgroup != "space":
            tokens.append((match.lastgroup or "", match.group()))
        position = match.end()
    return tokens


class _Scanner:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._calls: list[str] = []
        self._pending = ""
        self._found = Scan()

    def run(self) -> Scan:
        while self._peek()[0] != "end":
            kind, text = self._next()
            if kind == "name":
                self._on_name(text)
            elif text == "(":
                self._calls.append(self._pending)
                self._pending = ""
            elif text == ")":
                self._calls.pop()
        return self._found

    def _on_name(self, name: str) -> None:
        if name in _CLAUSES:
            if self._peek()[1] == "(":
                self._found.grouping_labels |= self._labels()
        elif self._peek()[1] == "(" or self._peek()[1] in _CLAUSES:
            self._pending = name
        elif name.lower() not in _OPERATORS:
            self._on_selector(name)

    def _on_selector(self, metric: str) -> None:
        matchers = self._matchers() if self._peek()[1] == "{" else {}
        span = self._next()[1][1:-1] if self._peek()[0] == "range" else None
        functions = tuple(name for name in self._calls if name)
        self._found.selectors.append(Selector(metric, matchers, span, functions))

    def _labels(self) -> set[str]:
        labels = set()
        while self._next()[1] != ")":
            if self._peek()[0] == "name":
                labels.add(self._peek()[1])
        return labels

    def _matchers(self) -> dict[str, tuple[str, str]]:
        matchers = {}
        self._next()
        while self._peek()[1] != "}":
            label, operator, value = (self._next()[1] for _ in range(3))
            matchers[label] = (operator, value)
            if self._peek()[1] == ",":
                self._next()
        self._next()
        return matchers

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at]

    def _next(self) -> tuple[str, str]:
        token = self._tokens[self._at]
        self._at += 1
        return token
