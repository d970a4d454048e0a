"""AuditLog: one JSON line for each administrative call. Knows neither the calls nor Ray."""

import getpass
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

import msgspec


class AuditLog:
    """Writes to `stream` at once. clock: Unix time in seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._clock = clock

    def record(self, action: str, by: str) -> None:
        """by: what the caller says it is; whoever reaches Ray is trusted to say the truth."""
        entry = {
            "log": "tessera.audit",
            "time": datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds"),
            "action": action,
            "by": by,
        }
        self._stream.write(msgspec.json.encode(entry).decode() + "\n")
        self._stream.flush()


def describe_this_process() -> str:
    """user@host and process id, for AuditLog.record. A user without a name is shown by number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"
