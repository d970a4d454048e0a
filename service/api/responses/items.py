"""Items of a response's input: messages, calls, results of calls, thinking, references.

What a response gave is taken back as it is. Items of other kinds are refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from service.api.images import image_of_url
from service.api.openai.parameters import LenientModel, StrictModel
from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile
from service.limits import MAX_ITEMS

_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = ("input_text", "output_text", "refusal", "reasoning_text", "summary_text", "text")
_PARTS = (*_TEXTS, "input_image")
MAX_ID_CHARS = 256
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class ItemModel(LenientModel):
    prefix = "input."


class TextPart(ItemModel):
    """logprobs: of what a response gave; they change nothing."""

    harmless = {"annotations": (None, []), "prompt_cache_breakpoint": (None,)}

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    logprobs: list[Any] | None = None


class RefusalPart(StrictModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImagePart(ItemModel):
    """image_url: as of a chat's image, data:image/png;base64,... for instance."""

    harmless = {"file_id": (None,), "prompt_cache_breakpoint": (None,)}

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None

    def to_file(self) -> ImageFile:
        """Raises ApiError."""
        return image_of_url(self.image_url, self.detail)


Part = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_ITEMS, fail_fast=True)]
TextParts = Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]


class MessageItem(ItemModel):
    """One turn; a text is short for one text part. developer is another name for system."""

    harmless = {"phase": (None, "commentary", "final_answer")}

    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts | str
    status: Status | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        refuse_other_parts(data, "content", _PARTS)
        return data

    @model_validator(mode="after")
    def _images_are_of_users(self) -> Self:
        if self.role != "user" and self.images:
            message = "parts of type input_image are for messages of role user"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "input.content")
        return self

    @property
    def images(self) -> list[ImagePart]:
        content = self.content if isinstance(self.content, list) else []
        return [part for part in content if isinstance(part, ImagePart)]


class FunctionCallItem(ItemModel):
    """arguments: the JSON text of an object, or "" for none."""

    harmless = {"async": (None, False), "caller": (None, {"type": "direct"}), "namespace": (None,)}

    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ItemId
    name: str
    arguments: str
    status: Status | None = None


class FunctionCallOutputItem(ItemModel):
    harmless = {"caller": (None, {"type": "direct"}), "name": (None,), "namespace": (None,)}

    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    output: TextParts | str
    status: Status | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, data: Any) -> Any:
        refuse_other_parts(data, "output", _TEXTS)
        return data


class ReasoningItem(ItemModel):
    """What an assistant thought: content, or summary where there is none."""

    harmless = {"encrypted_content": (None, "")}

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: TextParts = []
    content: TextParts | None = None
    status: Status | None = None


class ItemReference(StrictModel):
    """An item of a response that is stored."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _tag(value: Any) -> str:
    """An item's kind. Messages may go without, and so may references."""
    if not isinstance(value, Mapping):
        return str(getattr(value, "type", "message"))
    kind = value.get("type")
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise _unsupported(f"input: items of type {kind[:64]!r} are not supported", "input")
        return kind
    return "item_reference" if "role" not in value and "id" in value else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_tag),
]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]


def refuse_other_parts(data: Any, name: str, kinds: Sequence[str]) -> None:
    """Raise ApiError if data[name] is a list with parts of a kind that there is, but not here."""
    content = data.get(name) if isinstance(data, Mapping) else None
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            param = f"input.{name}"
            raise _unsupported(f"{param}: parts of type {kind[:64]!r} are not supported", param)


def joined(parts: Sequence[TextPart | RefusalPart]) -> str:
    return "\n".join(part.text for part in parts)


def _unsupported(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, param)
