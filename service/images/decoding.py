"""Image files to pixels, by Pillow, once their headers say that they are small enough."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

from service.images.errors import ImageRefusedError
from service.images.headers import read_header

# What Pillow's readers raise on files that are not what they say.
_BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    Image.DecompressionBombError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """RGB, turned as its EXIF data says; of an animation the first frame.

    Transparency is dropped, not blended, as transformers' load_image() does. Raises
    ImageRefusedError.
    """
    header = read_header(data)
    _check_pixels(header.width, header.height, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=(header.format,)) as image:
            # A first frame may be larger than the screen that it is for.
            _check_pixels(*image.size, max_pixels)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except _BROKEN as error:
        raise ImageRefusedError(f"the image cannot be decoded as {header.format}") from error


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageRefusedError(
            f"the image has {width} x {height} pixels, {max_pixels} are allowed "
            "(limits.max_image_pixels)"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would cut values off at 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
