"""structural_tag: what an output is put together of, in both of vLLM's shapes: structures with
triggers in free text, or a format of other formats."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from service.api.openai.format_grammar import ALL_TEXT, format_grammar
from service.api.openai.parameters import StrictModel
from service.api.openai.schema_sizes import JsonObject, json_object
from service.api.openai.structural_formats import AnyFormat
from service.chat.tools.grammar import LarkRules, UnwritableSchemaError
from service.limits import MAX_GRAMMAR_BYTES
from service.tokenizer.constraints import Marked

MAX_STRUCTURES = 128


def tag_object(value: Any) -> Any:
    """vLLM takes the text of the object."""
    return json_object(value) if isinstance(value, str) else value


class Structure(StrictModel):
    """begin: how it begins, with one of the triggers. schema: of the JSON between begin and end."""

    begin: str
    schema_: Annotated[JsonObject, Field(alias="schema")]
    end: str


class StructuresTag(StrictModel):
    """structures: what may stand in the text. triggers: texts behind which one of those that begin
    with it must follow. Text matches by its characters: a trigger that is one token of the model is
    written as text."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_STRUCTURES)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=MAX_STRUCTURES)]
    _constraint: Marked = PrivateAttr()

    @model_validator(mode="after")
    def _structures_have_triggers(self) -> Self:
        texts = [
            *self.triggers,
            *(text for one in self.structures for text in (one.begin, one.end)),
        ]
        if sum(map(len, texts)) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the texts may have at most {MAX_GRAMMAR_BYTES} characters")
        if not all(self.triggers):
            raise ValueError("a trigger must not be empty")
        for structure in self.structures:
            if not structure.begin.startswith(tuple(self.triggers)):
                raise ValueError(f"no trigger begins {structure.begin[:40]!r}")
        return self

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        """Here and not later, so that large grammars are written where large bodies are parsed."""
        lark = LarkRules({})
        try:
            triggers = dict.fromkeys(self.triggers)
            parts = [part for trigger in triggers if (part := self._behind(trigger, lark))]
            text = lark.add(ALL_TEXT)
        except UnwritableSchemaError as error:
            raise ValueError(str(error)) from error
        except RecursionError as error:
            raise ValueError("a schema is nested too deeply") from error
        self._constraint = lark.finish(f"({' | '.join(parts)})* {text}")
        return self

    @property
    def constraint(self) -> Marked:
        return self._constraint

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


class FormatTag(StrictModel):
    type: Literal["structural_tag"] = "structural_tag"
    format: AnyFormat
    _constraint: Marked = PrivateAttr()

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        """As for structures."""
        try:
            self._constraint = format_grammar(self.format)
        except UnwritableSchemaError as error:
            raise ValueError(str(error)) from error
        except RecursionError as error:
            raise ValueError("a schema is nested too deeply") from error
        return self

    @property
    def constraint(self) -> Marked:
        return self._constraint


def _shape(value: Any) -> str:
    """In brackets, for no field is called so: see from_validation_error()."""
    has_format = "format" in value if isinstance(value, dict) else isinstance(value, FormatTag)
    return "[format]" if has_format else "[structures]"


StructuralTag = Annotated[
    Annotated[StructuresTag, Tag("[structures]")] | Annotated[FormatTag, Tag("[format]")],
    Discriminator(_shape),
]
