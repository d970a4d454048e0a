"""Image files made on the spot, honest and hostile."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Smooth enough for lossy formats, with every colour in it."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, image_format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, image_format, **options)
    return out.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def png_of_zeros(width: int, height: int) -> bytes:
    """A grey image that is a thousandth of its pixels as a file, and claims its size honestly."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    compressor = zlib.compressobj(9)
    row = bytes(1 + width)
    rows = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", rows), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def webp_that_claims(width: int, height: int) -> bytes:
    """An extended header and nothing behind it."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body
