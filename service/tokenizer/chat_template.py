"""Chat templates: sandboxed Jinja with the dialect that Hugging Face templates are written in.

The template comes from the model folder and never from a request. Rendering stops once its output
passes a ceiling; the wall clock is the process pool's business. Knows no tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ADDED_ARGUMENTS = re.compile(
    r"\+\s*\w+(\['function'\]|\.function)?(\['arguments'\]|\.arguments)\s*(\+|-?\}\}|\))"
)


class ChatTemplateError(Exception):
    """The template refused the messages or cannot be rendered. The message may go to a client."""


class _GenerationBlock(Extension):
    """{% generation %} marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    takes_arguments_as_text: of calls, where others take an object; it adds them to a text.

    literals: every string the template's logic can compare its inputs with.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str], max_output_bytes: int) -> None:
        environment = _make_environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._named_tokens = dict(named_tokens)
        self._max_output_bytes = max_output_bytes
        self.takes_arguments_as_text = bool(_ADDED_ARGUMENTS.search(source))
        self.literals = frozenset(
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Text of the conversation. Raises ChatTemplateError."""
        chunks: list[str] = []
        size = 0
        values: dict[str, Any] = {
            "documents": None,
            **self._named_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        # A template computes on client input: whatever it trips over is that input's error.
        try:
            for chunk in self._template.generate(values):
                size += len(chunk.encode("utf-8"))
                if size > self._max_output_bytes:
                    raise ChatTemplateError("the rendered conversation is too large")
                chunks.append(chunk)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        return "".join(chunks)


def takes_tools(source: str) -> bool:
    """Whether a template reads the variable that has the tools; one that is broken does not."""
    try:
        tree = _make_environment().parse(source)
    except jinja2.TemplateError:
        return False
    return "tools" in meta.find_undeclared_variables(tree)
