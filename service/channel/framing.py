"""Frames on a byte stream: four bytes of length, big endian, then the body."""

import asyncio

from service.channel.errors import ChannelError, FrameError

LENGTH_BYTES = 4
_MAX_JOINED_BYTES = 64 << 10
"""Of bodies that go out with their length in one call, for which asyncio copies them."""


async def read_frame(reader: asyncio.StreamReader, max_frame_bytes: int) -> bytes:
    """The next frame's body. Raises ChannelError at the end of the stream or a broken connection,
    FrameError if the frame is longer than max_frame_bytes; its body is then not read."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > max_frame_bytes:
            raise FrameError(f"frame of {length} bytes; at most {max_frame_bytes} are allowed")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ChannelError("the connection was closed") from error


def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queue one frame without waiting. The caller bounds what may pile up in the transport."""
    length = len(body).to_bytes(LENGTH_BYTES, "big")
    if len(body) <= _MAX_JOINED_BYTES:
        writer.writelines((length, body))
    else:
        writer.write(length)
        # What is left unsent is cut off a view without a copy: an image's bytes hold the loop else.
        writer.write(memoryview(body))
