"""A transport that counts what is written, so that one can tell whether anybody reads it.

asyncio says how much waits to be sent. While a stream goes on, only that and what was written tell
together how much has left.
"""

import asyncio
from typing import Any


class MeteredTransport(asyncio.Transport):
    """Hands everything on to `transport`. Times are of one monotonic clock, in seconds."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._num_written_bytes = 0
        # Since then something waits, and so much had left by then.
        self._since_s: float | None = None
        self._num_left_bytes = 0

    def is_unread(self, now_s: float, timeout_s: float, min_bytes_per_s: float) -> bool:
        """Whether the other end lets answers wait, and took less than that for timeout_s."""
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting == 0:
            self._since_s = None
            return False
        num_left = self._num_written_bytes - num_waiting
        if self._since_s is None:
            self._since_s, self._num_left_bytes = now_s, num_left
        passed_s = now_s - self._since_s
        if passed_s < timeout_s:
            return False
        is_unread = num_left - self._num_left_bytes < min_bytes_per_s * passed_s
        self._since_s, self._num_left_bytes = now_s, num_left
        return is_unread

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._num_written_bytes += len(data)
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
