"""HTTP/2 frames written by hand: what gRPC's own clients never send."""

import asyncio
import struct
from collections import Counter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: dict[int, int] | None = None) -> bytes:
    pairs = (values or {}).items()
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in pairs))


def message(data: bytes, flag: int = 0) -> bytes:
    """A gRPC message: a flag for compression, a length, bytes."""
    return struct.pack(">BI", flag, len(data)) + data


def headers(stream: int, path: str, flags: int = END_HEADERS, more: tuple = ()) -> bytes:
    """Of a gRPC call; nothing is indexed, so every head is alike."""
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"a"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, flags, stream, block)


def _text(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, length = bytearray(), len(value) - 127
    while length > 127:
        rest.append(length & 127 | 128)
        length >>= 7
    return b"\x7f" + bytes((*rest, length)) + value


def _settings_of(payload: bytes) -> dict[int, int]:
    return dict(struct.iter_unpack(">HI", payload))


class Http2:
    """A connection that reads frames, answers pings and leaves all else to its user.

    reading: done when the server has closed it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames: list[tuple[int, int, int, bytes]] = []
        # Of the connection (0) and of streams; what the server's settings say is added to these.
        self._room: Counter[int] = Counter({0: 65_535})
        self._first_room = 65_535
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, port: int, window: int | None = None) -> "Http2":
        """window: of each stream, at first."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + settings({} if window is None else {INITIAL_WINDOW_SIZE: window}))
        return cls(reader, writer)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def send_data(self, stream: int, num_bytes: int) -> int:
        """Send as much of that as there is room for; returns how much."""
        num_bytes = min(num_bytes, self._room[0], self._first_room + self._room[stream])
        if num_bytes > 0:
            self._room[0] -= num_bytes
            self._room[stream] -= num_bytes
            self.send(frame(DATA, 0, stream, bytes(num_bytes)))
        return max(0, num_bytes)

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF
                self.frames.append((kind, flags, stream, payload))
                if kind == PING and not flags & ACK:
                    self.writer.write(frame(PING, ACK, 0, payload))
                if kind == SETTINGS and not flags & ACK:
                    self._first_room = _settings_of(payload).get(INITIAL_WINDOW_SIZE, 65_535)
                    self.writer.write(frame(SETTINGS, ACK, 0))
                if kind == WINDOW_UPDATE:
                    self._room[stream] += int.from_bytes(payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def closed(self) -> None:
        """Until the server has closed it."""
        await asyncio.shield(self.reading)

    def close(self) -> None:
        self.reading.cancel()
        self.writer.close()
