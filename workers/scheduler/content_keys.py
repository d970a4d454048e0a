"""Keys by which the prefix cache tells unlike content behind equal placeholder tokens apart.

A prefix is known by one int32 a token: its id, which is never negative, or for a placeholder a
negative number that stands for its content. Numbers are given out, not derived: 31 bits of a digest
could be met by trying.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.content import ContentSpan
from workers.errors import ErrorCode, RequestRejectedError
from workers.kv_cache.radix_node import IntArray

MAX_REMEMBERED = 1 << 16
"""Contents whose numbers are known: what has been forgotten gets another one, and is not found."""
_LAST_KEY = -(1 << 31)


@dataclass(frozen=True, slots=True)
class KeyRun:
    """key stands for tokens start .. stop - 1."""

    start: int
    stop: int
    key: int


class ContentKeys:
    """No two contents ever get the same number. There are 2**31 of them."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._next = -1

    def runs(self, spans: Sequence[ContentSpan]) -> tuple[KeyRun, ...]:
        """Raises RequestRejectedError when no number is left."""
        return tuple(KeyRun(span.start, span.stop, self._key(span)) for span in spans)

    def _key(self, span: ContentSpan) -> int:
        # With the length, so that a content twice is not taken for a longer one.
        content = span.digest, span.num_tokens
        key = self._keys.get(content)
        if key is None:
            key = self._keys[content] = self._take()
        self._keys.move_to_end(content)
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)
        return key

    def _take(self) -> int:
        key = self._next
        if key < _LAST_KEY:
            raise RequestRejectedError(
                ErrorCode.INTERNAL, "every number for content has been given out: start again"
            )
        self._next -= 1
        return key


def with_keys(token_ids: IntArray, runs: Sequence[KeyRun]) -> IntArray:
    """A copy of the first tokens of a prompt with the numbers of content in their places."""
    keys = token_ids.copy()
    for run in runs:
        keys[run.start : run.stop] = run.key
    return keys
