"""What the output has to be, as OpenAI, vLLM and older vLLM have clients say it: one of them.

response_format is OpenAI's; structured_outputs and guided_* are vLLM's.
"""

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from service.api.openai.parameters import GenerationParameters, LenientModel, StrictModel
from service.api.openai.schema_sizes import schema_bytes
from service.api.openai.structural_tags import FormatTag, StructuralTag, StructuresTag, tag_object
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import NamedConstraint
from service.limits import MAX_GRAMMAR_BYTES
from service.tokenizer.constraints import (
    JSON_OBJECT,
    Choices,
    Constraint,
    JsonSchema,
    Lark,
    Regex,
)


def _schema_text(value: Any) -> str:
    """A JSON schema, an object or the JSON text of one, as its text; the grammar process reads it.

    Here and not later, so that those of large bodies are written where these are parsed.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema: an object, or the JSON text of one")
    if schema_bytes(value) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a schema may have at most {MAX_GRAMMAR_BYTES} bytes")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


Schema = Annotated[
    str,
    PlainValidator(_schema_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
T = TypeVar("T")
# Of structured_outputs: the values that ask for nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (None, False),
    "disable_any_whitespace": (None, False),
    "whitespace_pattern": (None,),
}
ChoiceTexts = Annotated[list[str], Field(fail_fast=True)]


class JsonSchemaFormat(StrictModel):
    """name, description: for who reads the request. strict: whether everything in the schema must
    be followed (the default: what cannot be is refused), or what can be (false)."""

    name: str
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


_TAG: TypeAdapter[StructuresTag | FormatTag] = TypeAdapter(StructuralTag)


class ResponseFormat(StrictModel):
    """text: anything. json_object: some JSON object. json_schema: JSON of that schema.
    structural_tag: text in which what follows one of triggers is one of structures; or a format
    that is put together of others, as vLLM writes them."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None
    _tag: StructuresTag | FormatTag | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _has_a_schema_if_it_says_so(self) -> Self:
        param = "response_format.json_schema"
        if self.type == "json_schema" and self.json_schema is None:
            raise _invalid(f"{param} is needed: an object with name and schema", param)
        if self.type != "json_schema" and self.json_schema is not None:
            raise _invalid(f"{param} needs response_format.type json_schema", param)
        return self

    @model_validator(mode="after")
    def _has_a_tag_if_it_says_so(self) -> Self:
        own = {"structures": self.structures, "triggers": self.triggers, "format": self.format}
        given = {name: value for name, value in own.items() if value is not None}
        if self.type == "structural_tag":
            self._tag = _TAG.validate_python(given)
        elif given:
            param = f"response_format.{next(iter(given))}"
            raise _invalid(f"{param} needs response_format.type structural_tag", param)
        return self

    def constraint(self) -> Constraint | None:
        if self._tag is not None:
            return self._tag.constraint
        if self.json_schema is not None:
            return JsonSchema(self.json_schema.schema_, is_lenient=self.json_schema.strict is False)
        return JSON_OBJECT if self.type == "json_object" else None


class StructuredOutputs(LenientModel):
    """json: a schema. regex: the whole text matches. choice: one of these texts. grammar: Lark or
    GBNF. json_object: true. structural_tag: an object with structures and
    triggers or with a format, or its text."""

    harmless = _HARMLESS
    prefix = "structured_outputs."

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[StructuralTag | None, BeforeValidator(tag_object)] = None


class ConstrainedParameters(GenerationParameters):
    """At most one constraint: a response_format other than text, one of structured_outputs, or one
    of the four guided_*."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _has_one_constraint_at_most(self) -> Self:
        found = list(self._constraints())
        if len(found) > 1:
            names = " and ".join(each.param for each in found)
            raise _invalid(f"{names} exclude each other: keep one", found[1].param)
        if self.structured_outputs is not None and not found:
            param = "structured_outputs"
            raise _invalid(
                f"{param} needs json, regex, choice, grammar, json_object or structural_tag", param
            )
        return self

    @property
    def constraint(self) -> NamedConstraint | None:
        return next(self._constraints(), None)

    def _constraints(self) -> Iterator[NamedConstraint]:
        if self.model_fields_set.isdisjoint(_NAMES):
            return
        form = self.response_format or ResponseFormat(type="text")
        outputs = self.structured_outputs or StructuredOutputs()
        tag, tag_param = outputs.structural_tag, "structured_outputs.structural_tag"
        for param, constraint in (
            ("response_format", form.constraint()),
            ("structured_outputs.json", _if_given(JsonSchema, outputs.json_)),
            ("structured_outputs.regex", _if_given(Regex, outputs.regex)),
            ("structured_outputs.choice", _if_given(_choices, outputs.choice)),
            ("structured_outputs.grammar", _if_given(Lark, outputs.grammar)),
            ("structured_outputs.json_object", JSON_OBJECT if outputs.json_object else None),
            (tag_param, None if tag is None else tag.constraint),
            ("guided_json", _if_given(JsonSchema, self.guided_json)),
            ("guided_regex", _if_given(Regex, self.guided_regex)),
            ("guided_choice", _if_given(_choices, self.guided_choice)),
            ("guided_grammar", _if_given(Lark, self.guided_grammar)),
        ):
            if constraint is not None:
                yield NamedConstraint(constraint, param)


_NAMES = ConstrainedParameters.model_fields.keys() - GenerationParameters.model_fields.keys()


def _if_given(make: Callable[[T], Constraint], value: T | None) -> Constraint | None:
    return None if value is None else make(value)


def _choices(texts: list[str]) -> Choices:
    return Choices(tuple(texts))


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
