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
    rows = zlib_of_zeros((1 + width) * height)
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", rows), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def zlib_of_zeros(num_bytes: int) -> bytes:
    """As zlib.compress(bytes(num_bytes), 9) would, of blocks that know nothing of each other: one
    is made and repeated.
    """
    block_bytes = 1 << 20
    num_blocks, num_left = divmod(num_bytes, block_bytes)
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = compressor.compress(bytes(block_bytes)) + compressor.flush(zlib.Z_FULL_FLUSH)
    end = compressor.compress(bytes(num_left)) + compressor.flush()
    # Adler-32 of zeros: the first sum stays 1, the second counts bytes.
    checksum = (num_bytes % 65521) << 16 | 1
    return b"\x78\xda" + block * num_blocks + end + struct.pack(">I", checksum)


def jpeg_of_scans(num_scans: int, width: int, height: int) -> bytes:
    """A progressive image whose last scan comes again and again; each goes over all of it."""
    plain = saved(Image.new("RGB", (width, height), (1, 99, 200)), "JPEG", progressive=True)
    last = plain.rindex(b"\xff\xda")
    return plain[:-2] + plain[last:-2] * num_scans + plain[-2:]


def webp_that_claims(width: int, height: int) -> bytes:
    """An extended header and nothing behind it."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def hostile_file(rng: np.random.Generator) -> bytes:
    """Of a real file some bytes replaced, cut off or doubled; now and then something worse."""
    kinds = ("PNG", "JPEG", "WEBP", "GIF")
    data = bytearray(saved(picture(int(rng.integers(99)), 61, 47), str(rng.choice(kinds))))
    match int(rng.integers(8)):
        case 0:
            return png_of_zeros(int(rng.integers(1, 60_000)), int(rng.integers(1, 2_000)))
        case 1:
            return webp_that_claims(int(rng.integers(1, 1 << 24)), int(rng.integers(1, 1 << 24)))
        case 2:
            return jpeg_of_scans(int(rng.integers(1, 200)), 512, 512)
        case 3:
            return rng.bytes(int(rng.integers(0, 5000)))
        case 4:
            return bytes(data[: int(rng.integers(len(data)))])
        case 5:
            place = int(rng.integers(len(data)))
            return bytes(data[:place] + data[place // 2 :])
        case _:
            for place in rng.integers(0, len(data), int(rng.integers(1, 20))):
                data[place] = rng.integers(0, 256)
            return bytes(data)
