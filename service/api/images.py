"""Images as protocols bring them, to files for a tokenizer process. Nothing is decoded here."""

import re

from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageFile

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_DATA_URL = re.compile(r"data:([^;,]{0,64})(?:;[^;,]{0,64}){0,4};base64,", re.IGNORECASE)
_MAX_PREFIX_CHARS = 512
_MAX_URL_CHARS = 8192
_LOW_PIXELS = 512 * 512
_PARAM = "messages.content"


def image_of_url(url: str, detail: str | None) -> ImageFile:
    """A data URL, or the address of a file. detail "low": of 512 x 512 pixels at most.

    Raises ApiError."""
    max_pixels = _LOW_PIXELS if detail == "low" else 0
    if url[:5].lower() != "data:":
        if len(url) > _MAX_URL_CHARS:
            raise _invalid(f"a URL has at most {_MAX_URL_CHARS} characters")
        return ImageFile(url=url, max_pixels=max_pixels)
    found = _DATA_URL.match(url[:_MAX_PREFIX_CHARS])
    if found is None:
        raise _invalid("a data URL begins as data:image/png;base64, does")
    _check_type(found[1])
    return ImageFile(base64=url[found.end() :], max_pixels=max_pixels)


def image_of_base64(media_type: str, text: str) -> ImageFile:
    """Raises ApiError."""
    _check_type(media_type)
    if not text:
        raise _invalid("the image is empty")
    return ImageFile(base64=text)


def image_of_bytes(media_type: str, data: bytes, detail: str | None) -> ImageFile:
    """Raises ApiError."""
    _check_type(media_type)
    return ImageFile(data=data, max_pixels=_LOW_PIXELS if detail == "low" else 0)


def _check_type(media_type: str) -> None:
    """What the bytes are counts later; here it is what a client thinks that it sends."""
    if media_type.lower().replace("image/jpg", "image/jpeg") not in _TYPES:
        raise _invalid(f"an image is of type {', '.join(_TYPES)}, not {media_type[:64]!r}")


def _invalid(message: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, _PARAM)
