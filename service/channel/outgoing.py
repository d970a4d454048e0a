"""What a link has still to say to its replica. Knows no socket."""

from collections import deque
from collections.abc import Iterator

from workers.engine.encoder_input import SourceFeatures
from workers.engine.protocol import GenerateRequest

TURN_BYTES = 1 << 20
"""Of requests that are encoded at once: it takes a millisecond a megabyte and more."""
TOKEN_BYTES = 5


class Outgoing:
    """Requests that were submitted in one tick are one message, numbered by sequence; of more than
    TURN_BYTES they are several messages of that number, each in a turn of the loop. Aborts come
    after everything that was submitted before."""

    def __init__(self) -> None:
        self.sequence = 0
        self._submitted: list[GenerateRequest] = []
        self._parts: deque[list[GenerateRequest]] = deque()
        self._aborted: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._submitted or self._parts or self._aborted)

    def submit(self, request: GenerateRequest) -> int:
        """The number of its message."""
        self._submitted.append(request)
        return self.sequence + 1

    def abort(self, request_id: str) -> None:
        self._aborted.append(request_id)

    def next_requests(self) -> list[GenerateRequest]:
        """Those of one turn; the message has the number that sequence is then."""
        if not self._parts and self._submitted:
            self.sequence += 1
            self._parts.extend(_parts(self._submitted))
            self._submitted = []
        return self._parts.popleft() if self._parts else []

    def next_aborts(self) -> list[str]:
        """None as long as requests have to go before."""
        if self._parts or self._submitted:
            return []
        aborted, self._aborted = self._aborted, []
        return aborted


def _parts(requests: list[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    part: list[GenerateRequest] = []
    num_bytes = 0
    for request in requests:
        own_bytes = _body_bytes(request)
        if part and num_bytes + own_bytes > TURN_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(request)
        num_bytes += own_bytes
    yield part


def _body_bytes(request: GenerateRequest) -> int:
    """Roughly."""
    source = request.encoder_input
    num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids)
    num_bytes = len(source.values) if isinstance(source, SourceFeatures) else 0
    return TOKEN_BYTES * num_tokens + num_bytes + sum(len(item.values) for item in request.media)
