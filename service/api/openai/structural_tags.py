"""structural_tag: free text in which what follows a trigger obeys a schema, as vLLM takes it."""

import json
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from service.api.openai.parameters import StrictModel
from service.chat.tools.grammar import LarkRules, UnwritableSchemaError
from service.errors import ApiError, ApiErrorCode
from service.tokenizer.constraints import Marked

MAX_STRUCTURES = 128


def _object(value: Any) -> dict[str, Any]:
    try:
        document = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("must be an object, or the JSON text of one")
    return document


def tag_object(value: Any) -> Any:
    """vLLM takes the text of the object."""
    return _object(value) if isinstance(value, str) else value


JsonObject = Annotated[
    dict[str, Any],
    PlainValidator(_object),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]


class Structure(StrictModel):
    """begin: how it begins, with one of the triggers. schema: of the JSON between begin and end."""

    begin: str
    schema_: Annotated[JsonObject, Field(alias="schema")]
    end: str


class StructuralTag(StrictModel):
    """structures: what may stand in the text. triggers: texts behind which one of those that begin
    with it must follow. Text matches by its characters: a trigger that is one token of the model is
    written as text."""

    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_STRUCTURES)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=MAX_STRUCTURES)]

    @model_validator(mode="after")
    def _structures_have_triggers(self) -> Self:
        if not all(self.triggers):
            raise ValueError("a trigger must not be empty")
        for structure in self.structures:
            if not structure.begin.startswith(tuple(self.triggers)):
                raise ValueError(f"no trigger begins {structure.begin[:40]!r}")
        return self

    def constraint(self, param: str) -> Marked:
        """Raises ApiError for a schema that cannot be written into a grammar."""
        lark = LarkRules({})
        try:
            parts = [part for trigger in self.triggers if (part := self._behind(trigger, lark))]
            text = lark.add(r"/(.|\n)*/")
        except UnwritableSchemaError as error:
            message = f"{param}: {error}"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, param) from error
        return lark.finish(f"({' | '.join(parts)})* {text}")

    def _behind(self, trigger: str, lark: LarkRules) -> str:
        """Text up to the trigger and what may follow; empty where nothing begins with it. Of
        triggers that begin each other the first named one counts."""
        own = [one for one in self.structures if self._trigger_of(one) == trigger]
        if not own:
            return ""
        bodies = [
            f"{lark.text(one.begin[len(trigger) :])} {lark.json(one.schema_)} {lark.text(one.end)}"
            for one in own
        ]
        return f"{lark.until(trigger)} ({' | '.join(bodies)})"

    def _trigger_of(self, structure: Structure) -> str:
        return next(one for one in self.triggers if structure.begin.startswith(one))
