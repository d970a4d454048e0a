"""Contents of gRPC messages that have images in them. Knows no server."""

from typing import Any

from service.api.images import image_of_bytes, image_of_url
from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile
from service.proto import inference_pb2 as pb

_DETAILS = ("auto", "low", "high")
_PARAM = "messages.parts"


def to_content(message: pb.Message) -> str | list[dict[str, Any]]:
    """As chat templates read it. Raises ApiError."""
    if not message.parts:
        text: str = message.content
        return text
    if message.content:
        raise _invalid("a message has content or parts, not both")
    kinds = [part.WhichOneof("part") for part in message.parts]
    if None in kinds:
        raise _invalid("a part is a text or an image")
    if "image" not in kinds:
        return "\n".join(part.text for part in message.parts)
    if message.role != "user":
        raise _invalid("images are for messages of role user")
    return [
        {"type": "text", "text": part.text} if kind == "text" else {"type": "image"}
        for part, kind in zip(message.parts, kinds, strict=True)
    ]


def images_in(chat: pb.Chat) -> list[ImageFile]:
    """Of all messages, in order. Raises ApiError."""
    return [
        _to_file(part.image)
        for message in chat.messages
        for part in message.parts
        if part.WhichOneof("part") == "image"
    ]


def _to_file(image: pb.Image) -> ImageFile:
    detail = image.detail if image.HasField("detail") else "auto"
    if detail not in _DETAILS:
        raise _invalid(f"detail is one of {', '.join(_DETAILS)}")
    kind = image.WhichOneof("source")
    if kind == "data":
        return image_of_bytes(image.media_type, image.data, detail)
    if kind == "url":
        return image_of_url(image.url, detail)
    raise _invalid("an image has data or a url")


def _invalid(message: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, _PARAM)
