"""Content blocks of Anthropic's messages: text, image, thinking, tool_use and tool_result.

Blocks of other kinds are refused by name, and so are images among the results of tools. A
cache_control changes nothing: prefixes are cached wherever they are equal, marked or not.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from service.api.images import image_of_base64, image_of_url
from service.api.openai.parameters import LenientModel, StrictModel
from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile
from service.limits import MAX_ITEMS

_KINDS = ("text", "image", "thinking", "tool_use", "tool_result")


class CacheControl(StrictModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(LenientModel):
    harmless = {"citations": (None, [])}
    prefix = "messages.content."

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: str
    data: str

    def to_file(self) -> ImageFile:
        """Raises ApiError."""
        return image_of_base64(self.media_type, self.data)


class UrlSource(StrictModel):
    """url: of a host that the operator allows."""

    type: Literal["url"]
    url: str

    def to_file(self) -> ImageFile:
        """Raises ApiError."""
        return image_of_url(self.url, None)


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None


class ThinkingBlock(StrictModel):
    """What an assistant thought. signature: of any value, as nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(LenientModel):
    harmless = {"caller": (None, {"type": "direct"}), "toolset_name": (None,)}
    prefix = "messages.content."

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ToolResultBlock(LenientModel):
    """is_error: the model reads "Error: " before the content."""

    harmless = {"toolset_name": (None,)}
    prefix = "messages.content."

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | str | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            refuse_other_kinds(data.get("content"), ("text",))
        return data

    @property
    def text(self) -> str:
        text = self.content if isinstance(self.content, str) else joined(self.content or [])
        return f"Error: {text}" if self.is_error else text


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_ITEMS, fail_fast=True)]


def joined(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def refuse_other_kinds(content: Any, kinds: tuple[str, ...] = _KINDS) -> None:
    """Raise ApiError if content is a list with blocks of a kind that there is, but not here."""
    if not isinstance(content, list):
        return
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            message = f"messages.content: blocks of type {kind[:64]!r} are not supported"
            raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, "messages.content")
