"""Server-sent events, as far as OpenAI streams use them: the data of each event, as bytes.

Follows the WHATWG event stream format for CR LF and LF line ends; `event`, `id` and `retry` fields
and comments are skipped. Knows no JSON.
"""


class SseParser:
    """Feed bytes in any cut, get the data of the events they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that end in this chunk, several data lines joined by LF."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
