"""What an image file says of itself in its first bytes: its format and its size.

Read before any decoder sees the file: some of them take memory for the whole image as soon as they
open it. A decoder's own word on the size counts as well (service.images.decoding). Of the standard
library alone.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from service.images.errors import ImageRefusedError

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_MAX_SEGMENTS = 4096
"""Of a JPEG before its size; a camera writes fewer than a hundred."""
_MAX_SCANS = 100
"""Of a progressive JPEG, each of which goes over the whole image; encoders write about ten."""
_NO_LENGTH = {0x01, *range(0xD0, 0xD8)}
_NOT_A_FRAME = {0xC4, 0xC8, 0xCC}
_FRAMES = set(range(0xC0, 0xD0)) - _NOT_A_FRAME
_END, _SCAN = 0xD9, 0xDA


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """format: a name of Pillow's. width, height: in pixels."""

    format: str
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes) -> ImageHeader:
    """Raises ImageRefusedError for what is none of the four formats, or broken in its header."""
    for signature, read in _READERS:
        if data.startswith(signature):
            try:
                return read(data)
            except (struct.error, IndexError) as error:
                raise ImageRefusedError("the image ends within its header") from error
    raise ImageRefusedError("the image is no PNG, JPEG, WebP or GIF")


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise ImageRefusedError("the image is no PNG: it does not begin with its size")
    width, height = struct.unpack_from(">II", data, 16)
    return _checked("PNG", width, height)


def _read_gif(data: bytes) -> ImageHeader:
    width, height = struct.unpack_from("<HH", data, 6)
    return _checked("GIF", width, height)


def _read_jpeg(data: bytes) -> ImageHeader:
    place = 2
    for _ in range(_MAX_SEGMENTS):
        while data[place] == 0xFF and data[place + 1] == 0xFF:  # fill bytes
            place += 1
        if data[place] != 0xFF:
            break
        marker = data[place + 1]
        place += 2
        if marker in _NO_LENGTH:
            continue
        if marker in (_END, _SCAN):
            break
        (length,) = struct.unpack_from(">H", data, place)
        if marker in _FRAMES:
            _check_scans(data)
            height, width = struct.unpack_from(">HH", data, place + 3)
            return _checked("JPEG", width, height)
        place += length
    raise ImageRefusedError("the image is no JPEG: its size is not found")


def _check_scans(data: bytes) -> None:
    """The two bytes stand nowhere in a scan itself."""
    if data.count(b"\xff\xda") > _MAX_SCANS:
        raise ImageRefusedError(f"the image has more than {_MAX_SCANS} scans")


def _read_webp(data: bytes) -> ImageHeader:
    """See RFC 9649, sections 2.5 to 2.7."""
    if data[8:12] != b"WEBP":
        raise ImageRefusedError("the image is no PNG, JPEG, WebP or GIF")
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(_exactly(data, 24, 3), "little") + 1
        height = int.from_bytes(_exactly(data, 27, 3), "little") + 1
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (size & 0x3FFF for size in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageRefusedError("the image is no WebP: it does not begin with its size")
    return _checked("WEBP", width, height)


def _exactly(data: bytes, start: int, length: int) -> bytes:
    found = data[start : start + length]
    if len(found) < length:
        raise IndexError
    return found


def _checked(image_format: str, width: int, height: int) -> ImageHeader:
    if not (width and height):
        raise ImageRefusedError(f"the image is {width} x {height} pixels")
    return ImageHeader(image_format, width, height)


_READERS: tuple[tuple[bytes, Callable[[bytes], ImageHeader]], ...] = (
    (_PNG, _read_png),
    (_JPEG, _read_jpeg),
    (b"GIF87a", _read_gif),
    (b"GIF89a", _read_gif),
    (b"RIFF", _read_webp),
)
