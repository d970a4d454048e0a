"""Image files to RGB, and those that are refused before or while they are decoded."""

import struct
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from service.images.decoding import decode
from service.images.errors import ImageRefusedError
from service.images.headers import read_header
from tests.fakes.pictures import (
    jpeg_of_scans,
    opened,
    picture,
    png_chunk,
    png_of_zeros,
    saved,
    webp_that_claims,
)

PIXELS = 1 << 20
RGB = picture(1, 61, 47)


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(image, "JPEG", exif=exif.tobytes(), quality=95)


FILES = {
    "png": saved(RGB),
    "jpeg": saved(RGB, "JPEG"),
    "progressive jpeg": saved(RGB, "JPEG", progressive=True),
    "webp": saved(RGB, "WEBP"),
    "lossless webp": saved(RGB, "WEBP", lossless=True),
    "gif": saved(RGB.quantize(16), "GIF"),
    "palette": saved(RGB.quantize(16)),
    "palette with transparency": saved(RGB.quantize(16), transparency=3),
    "grey": saved(RGB.convert("L")),
    "grey with alpha": saved(RGB.convert("LA")),
    "bits": saved(RGB.convert("1")),
    "alpha": saved(RGB.convert("RGBA")),
    "extended webp": saved(RGB.convert("RGBA"), "WEBP", exif=b"Exif\0\0"),
    "cmyk": saved(RGB.convert("CMYK"), "JPEG"),
    "turned": turned(RGB),
    "animated gif": saved(RGB, "GIF", save_all=True, append_images=[picture(2, 61, 47)]),
    "animated webp": saved(RGB, "WEBP", save_all=True, append_images=[picture(2, 61, 47)]),
    "animated png": saved(RGB, "PNG", save_all=True, append_images=[picture(2, 61, 47)]),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_pillow(name):
    expected = ImageOps.exif_transpose(opened(FILES[name])).convert("RGB")
    found = decode(FILES[name], PIXELS)
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("name", FILES)
def test_headers_say_the_size(name):
    header = read_header(FILES[name])
    assert (header.width, header.height) == opened(FILES[name]).size
    assert header.format == opened(FILES[name]).format


def test_a_photo_is_turned_as_it_says():
    assert decode(FILES["turned"], PIXELS).size == (47, 61)


def test_sixteen_bits_become_their_upper_eight():
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    found = np.asarray(decode(saved(Image.fromarray(values)), PIXELS))
    assert np.array_equal(found, np.repeat((values >> 8)[:, :, None], 3, axis=2))


def gif_with_a_larger_frame() -> bytes:
    data = bytearray(saved(picture(1, 2, 2).quantize(4), "GIF"))
    place = data.index(b",")
    data[place + 5 : place + 9] = struct.pack("<HH", 60_000, 60_000)
    return bytes(data)


def jpeg_of_empty_segments(count: int) -> bytes:
    return b"\xff\xd8" + b"\xff\xe1\x00\x02" * count + b"\xff\xd9"


def png_with_a_text_bomb() -> bytes:
    import zlib

    honest = saved(picture(1, 8, 8))
    body = b"k\0\0" + zlib.compress(bytes(80 << 20), 9)
    place = honest.index(b"IDAT") - 4
    return honest[:place] + png_chunk(b"zTXt", body) + honest[place:]


HOSTILE = {
    "nothing": b"",
    "text": b"hello" * 100,
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "bmp": saved(RGB, "BMP"),
    "tiff": saved(RGB, "TIFF"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "only a signature": b"\x89PNG\r\n\x1a\n",
    "riff of another kind": b"RIFF\0\0\0\0WAVEfmt ",
    "jpeg without a size": b"\xff\xd8\xff\xd9",
    "jpeg that ends early": saved(RGB, "JPEG")[:30],
    "jpeg of empty segments": jpeg_of_empty_segments(2_000_000),
    "png of no pixels": b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0)),
    "png that claims too much": b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)),
    "png with much text": png_with_a_text_bomb(),
    "webp that claims too much": webp_that_claims(1 << 24, 1 << 24),
    "webp without an image": webp_that_claims(64, 64),
    "gif with a larger frame": gif_with_a_larger_frame(),
    "jpeg of many scans": jpeg_of_scans(100, 64, 64),
    "bomb": png_of_zeros(20_000, 1_000),
    **{
        f"half a {name}": data[: len(data) // 2]
        for name, data in FILES.items()
        if "anim" not in name
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name(name):
    with pytest.raises(ImageRefusedError, match="image"):
        decode(HOSTILE[name], PIXELS)


def test_a_bomb_is_refused_unopened():
    bomb = png_of_zeros(20_000, 20_000)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ImageRefusedError, match="20000 x 20000 pixels, 1048576 are allowed"):
            decode(bomb, PIXELS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


@pytest.mark.parametrize("seed", range(20))
def test_broken_files_are_refused_or_decoded_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    for data in FILES.values():
        broken = bytearray(data)
        for place in rng.integers(0, len(broken), 8):
            broken[place] = rng.integers(0, 256)
        try:
            found = decode(bytes(broken), PIXELS)
        except ImageRefusedError:
            continue
        assert found.mode == "RGB"
        assert found.width * found.height <= PIXELS
