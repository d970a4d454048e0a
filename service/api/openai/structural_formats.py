"""Formats that a structural_tag is put together of in vLLM's newer shape, as clients write them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from service.api.openai.parameters import StrictModel
from service.api.openai.schema_sizes import json_object
from service.limits import MAX_GRAMMAR_BYTES

MAX_FORMATS = 128
MAX_FORMAT_DEPTH = 16
_PARTS = ("content", "elements", "tags")


def _schema(value: Any) -> dict[str, Any]:
    return {} if value is True else json_object(value)


def _measured(value: Any) -> Any:
    """Before anything reads it. Raises ValueError."""
    unseen, num_formats, num_chars = [(value, 1)], 0, 0
    while unseen:
        one, depth = unseen.pop()
        if isinstance(one, list):
            unseen += [(part, depth) for part in one[: MAX_FORMATS + 1]]
        elif isinstance(one, dict):
            num_formats += 1
            num_chars += sum(map(_num_chars, one.values()))
            unseen += [(one[name], depth + 1) for name in _PARTS if name in one]
        if num_formats > MAX_FORMATS or depth > MAX_FORMAT_DEPTH:
            raise ValueError(
                f"at most {MAX_FORMATS} formats are allowed, {MAX_FORMAT_DEPTH} in each other"
            )
        if num_chars > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the texts may have at most {MAX_GRAMMAR_BYTES} characters")
    return value


def _num_chars(value: Any) -> int:
    texts = value if isinstance(value, list) else [value]
    return sum(len(text) for text in texts if isinstance(text, str))


Nothing = Annotated[list[str], Field(max_length=0)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_FORMATS)]


class ConstString(StrictModel):
    type: Literal["const_string"]
    value: str


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: Annotated[
        dict[str, Any],
        PlainValidator(_schema),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"const": True}]}),
    ]
    style: Literal["json"] = "json"


class AnyText(StrictModel):
    """Up to the text behind it."""

    type: Literal["any_text"]
    excludes: Nothing = []


class RegexFormat(StrictModel):
    type: Literal["regex"]
    pattern: str
    excludes: Nothing = []


class Sequence(StrictModel):
    type: Literal["sequence"]
    elements: "Annotated[list[Format], Field(min_length=1, max_length=MAX_FORMATS)]"


class Or(StrictModel):
    type: Literal["or"]
    elements: "Annotated[list[Format], Field(min_length=1, max_length=MAX_FORMATS)]"


class Tag(StrictModel):
    """end: or one of several."""

    type: Literal["tag"] = "tag"
    begin: str
    content: "Format"
    end: str | Texts

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if isinstance(self.end, str) else tuple(self.end)


Tags = Annotated[list[Tag], Field(min_length=1, max_length=MAX_FORMATS)]


class TriggeredTags(StrictModel):
    """Text, in which one of the tags that begin with a trigger follows it."""

    type: Literal["triggered_tags"]
    triggers: Texts
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Nothing = []


class TagsWithSeparator(StrictModel):
    """Tags and nothing else."""

    type: Literal["tags_with_separator"]
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonFormat
    | AnyText
    | RegexFormat
    | Sequence
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]
AnyFormat = Annotated[Format, BeforeValidator(_measured)]
for _model in (Sequence, Or, Tag, TriggeredTags, TagsWithSeparator):
    _model.model_rebuild()
