"""Frames on a byte stream: four bytes of length, big endian, then the body.

A long body passes in slices, with turns of the event loop between them: copying the megabytes of an
image at once would hold the loop and, with the interpreter lock, an engine's steps.
"""

import asyncio
from collections import deque

from service.channel.errors import ChannelError, FrameError

LENGTH_BYTES = 4
SLICE_BYTES = 256 << 10


async def read_frame(reader: asyncio.StreamReader, max_frame_bytes: int) -> bytes | bytearray:
    """The next frame's body. Raises ChannelError at the end of the stream or a broken connection,
    FrameError if the frame is longer than max_frame_bytes; its body is then not read."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > max_frame_bytes:
            raise FrameError(f"frame of {length} bytes; at most {max_frame_bytes} are allowed")
        if length <= SLICE_BYTES:
            return await reader.readexactly(length)
        body = bytearray()
        while len(body) < length:
            body += await reader.readexactly(min(SLICE_BYTES, length - len(body)))
            await asyncio.sleep(0)
        return body
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ChannelError("the connection was closed") from error


def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queue one short frame without waiting, where nothing else writes."""
    writer.writelines((len(body).to_bytes(LENGTH_BYTES, "big"), body))


class FrameWriter:
    """Frames to one peer, in order. Never waits; the caller bounds what may lie unread."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        # Behind a long body, until the transport has taken it. A view costs no copy.
        self._waiting: deque[bytes | memoryview] = deque()
        self._num_waiting_bytes = 0
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_unread_bytes(self) -> int:
        """Written, and still in this process."""
        return self._num_waiting_bytes + self._writer.transport.get_write_buffer_size()

    def write(self, body: bytes) -> None:
        """To nobody where the connection is lost: whoever reads from the peer learns that. uvloop
        raises then, and what is sent to others in the same call would be lost, too."""
        if self._writer.is_closing():
            return
        if self._pump is None and len(body) <= SLICE_BYTES:
            write_frame(self._writer, body)
            return
        view = memoryview(body)
        self._waiting.append(len(body).to_bytes(LENGTH_BYTES, "big"))
        self._waiting.extend(view[i : i + SLICE_BYTES] for i in range(0, len(body), SLICE_BYTES))
        self._num_waiting_bytes += LENGTH_BYTES + len(body)
        if self._pump is None:
            self._pump = asyncio.create_task(self._write_waiting())

    def abort(self) -> None:
        """Drop the connection at once, with whatever is still unsent."""
        self._forget()
        self._writer.transport.abort()

    async def finish(self) -> None:
        """Close after everything queued was sent or the peer has gone."""
        if self._pump is not None:
            await asyncio.gather(self._pump, return_exceptions=True)
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            # The peer left first: there is nobody to send the rest to.
            return

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                piece = self._waiting.popleft()
                self._num_waiting_bytes -= len(piece)
                self._writer.write(piece)
                await self._writer.drain()
                await asyncio.sleep(0)
        except OSError:
            # Whoever reads from the peer learns that it has gone.
            self._forget()
        finally:
            self._pump = None

    def _forget(self) -> None:
        self._waiting.clear()
        self._num_waiting_bytes = 0
