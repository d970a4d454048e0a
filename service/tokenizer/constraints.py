"""What a client may want its output to be. Closed msgspec types: they travel to a process.

Knows neither how clients write them nor what an engine makes of them.
"""

import msgspec


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """schema: its JSON text. is_lenient: keywords that cannot be followed are ignored instead of
    refused, and oneOf is read as anyOf."""

    schema: str
    is_lenient: bool = False


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole text matches; dialect of Rust's regex crate, with \\d and \\w of ASCII."""

    pattern: str


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """The text is one of these."""

    texts: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """source: a grammar in llguidance's dialect of Lark, or in GBNF."""

    source: str


class Mark(msgspec.Struct, frozen=True):
    """A text that models write between the parts of an answer. rule: its name in the grammar.
    token_id: the token of the model that is this text; None where there is none."""

    rule: str
    text: str
    token_id: int | None


class Marked(msgspec.Struct, frozen=True, tag="marked"):
    """A grammar of ours around schemas of a client. source: Lark that leaves the marks' rules
    open."""

    source: str
    marks: tuple[Mark, ...]


Constraint = JsonSchema | Regex | Choices | Lark | Marked

JSON_OBJECT = JsonSchema('{"type":"object"}')


def constraint_bytes(constraint: Constraint) -> int:
    """UTF-8 bytes that a client has sent for it."""
    match constraint:
        case JsonSchema():
            return len(constraint.schema.encode("utf-8", "surrogatepass"))
        case Regex():
            return len(constraint.pattern.encode("utf-8", "surrogatepass"))
        case Choices():
            return sum(len(text.encode("utf-8", "surrogatepass")) for text in constraint.texts)
        case Lark() | Marked():
            return len(constraint.source.encode("utf-8", "surrogatepass"))
