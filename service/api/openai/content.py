"""Content parts of OpenAI's chats: text and images. Parts of other kinds are refused by name."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from service.api.images import image_of_url
from service.api.openai.parameters import StrictModel
from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile
from service.limits import MAX_ITEMS

_KINDS = ("text", "image_url")


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImageUrl(StrictModel):
    """url: data:image/png;base64,... or, where the operator allows its host, https://...
    detail: low makes the image smaller than 512 x 512 pixels or so; high and auto do nothing."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl

    def to_file(self) -> ImageFile:
        """Raises ApiError."""
        return image_of_url(self.image_url.url, self.image_url.detail)


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_ITEMS, fail_fast=True)]
Content = str | Parts


def to_template(content: Content) -> str | list[dict[str, Any]]:
    """As chat templates read it: a text, or parts where images stand among them. Text parts alone
    are joined by line breaks."""
    if isinstance(content, str):
        return content
    if all(isinstance(part, TextPart) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in content
    ]


def images_in(contents: Sequence[Content | None]) -> list[ImageFile]:
    """Of all contents, in order. Raises ApiError."""
    return [
        part.to_file()
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, ImagePart)
    ]


def check_kinds(content: Any) -> None:
    """Raise ApiError for a part of a kind that there is, but not here."""
    if not isinstance(content, list):
        return
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in _KINDS:
            message = f"messages.content: parts of type {kind[:64]!r} are not supported"
            raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, "messages.content")
