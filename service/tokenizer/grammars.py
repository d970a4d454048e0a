"""What a client wants its output to be, as a grammar of llguidance; or why that cannot be had.

Nothing here bounds time or memory: it runs where both are bounded (grammar_worker.py). Knows no
model: whatever names a token of one is refused.
"""

import json
import re

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from service.tokenizer.constraints import Choices, Constraint, JsonSchema, Lark, Marked, Regex
from workers.constraints.limits import parser_limits

# One space at most, and only behind a comma or a colon: without a bound a model can fill its whole
# output with line breaks. x-guidance in a schema says otherwise (docs/decisions/0069).
JSON_DEFAULTS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_JSON_LENIENT = {"lenient": True, "coerce_one_of": True}
_LENIENT_HINT = (
    "; leave it out, or have what cannot be followed ignored: strict: false beside the schema, or "
    '"x-guidance": {"lenient": true, "coerce_one_of": true} in it'
)
_LENIENT_HELPS = ("Unimplemented keys", "Unknown format", "oneOf constraints")
_NO_TOKENIZER = "no tokenizer"
_PLAINER = {
    "Parser Error: Current row": "too many alternatives at one place; an object may have about 120 "
    "optional properties",
    "NoExtensionBias": "no text at all obeys it",
    "Expecting object schema": "a schema is a JSON object",
}
_OUR_PLACE = re.compile(r"^at \d+\(\d+\): (?=invalid regex)")
_EXCERPT_LINE = re.compile(r"\n\s*\d+ \|")
_MAX_MESSAGE_CHARS = 400


class GrammarRefusedError(Exception):
    """The message may go to a client; it does not name the parameter."""


class GrammarMaker:
    """Keeps the vocabulary that grammars are tried with: every byte is a token."""

    def __init__(self) -> None:
        self._tokenizer = LLTokenizer("byte")

    def make(self, constraint: Constraint) -> str:
        """In llguidance's serialised form. Raises GrammarRefusedError."""
        grammar = _convert(constraint)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, limits=parser_limits()
        )
        if is_error:
            raise GrammarRefusedError(_explain(messages[0]))
        if any(_NO_TOKENIZER in message for message in messages):
            raise GrammarRefusedError("tokens of a model, <...>, cannot be named; write text")
        self._try(grammar)
        return _for_engine(constraint) if isinstance(constraint, Marked) else grammar

    def _try(self, grammar: str) -> None:
        """Ask for the first masks: an engine that builds the same parser spends no more on them
        than was allowed here, and gets no grammar that allows nothing."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()
        matcher.consume_tokens(matcher.compute_ff_tokens())
        if not matcher.is_stopped():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarRefusedError(_explain(matcher.get_error()))


def _convert(constraint: Constraint) -> str:
    match constraint:
        case JsonSchema():
            return _from_schema(constraint)
        case Regex():
            return LLMatcher.grammar_from_regex(regex_to_lark(constraint.pattern, "dw"))
        case Choices():
            alternatives = "|".join(map(_escape, constraint.texts))
            return LLMatcher.grammar_from_regex(alternatives)
        case Lark():
            return LLMatcher.grammar_from_lark(_to_lark(constraint.source))
        case Marked():
            texts = [f"{mark.rule}: {json.dumps(mark.text)}" for mark in constraint.marks]
            return LLMatcher.grammar_from_lark("\n".join([constraint.source, *texts]))


def _for_engine(constraint: Marked) -> str:
    """What was tried with its marks spelled out, with tokens in their place: there are no other
    differences."""
    rules = [
        f"{mark.rule}: {json.dumps(mark.text) if mark.token_id is None else f'<[{mark.token_id}]>'}"
        for mark in constraint.marks
    ]
    return LLMatcher.grammar_from_lark("\n".join([constraint.source, *rules]))


def _from_schema(constraint: JsonSchema) -> str:
    overrides = _JSON_LENIENT if constraint.is_lenient else {}
    try:
        return LLMatcher.grammar_from_json_schema(
            constraint.schema,
            defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
            overrides=overrides,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise GrammarRefusedError(_explain(str(error))) from error


def _to_lark(source: str) -> str:
    try:
        return any_to_lark(source)
    except Exception as error:
        raise GrammarRefusedError(f"neither Lark nor GBNF: {_explain(str(error))}") from error


def _escape(text: str) -> str:
    """As a regular expression that matches just this."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _explain(message: str) -> str:
    """On one line, without the excerpt of the source; what to do about it, where that is known."""
    text = " ".join(_EXCERPT_LINE.split(message, maxsplit=1)[0].split())
    text = _OUR_PLACE.sub("", text)
    if len(text) > _MAX_MESSAGE_CHARS:
        half = _MAX_MESSAGE_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    for start, plain in _PLAINER.items():
        if text.startswith(start):
            return plain
    return text + _LENIENT_HINT if text.startswith(_LENIENT_HELPS) else text
