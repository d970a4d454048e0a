"""An approximate radix index: which replica has probably cached which prompt prefix.

A prefix is a chain of fixed-size token blocks; each block is known by a keyed hash of everything up
to its end, so equal hashes mean equal prefixes and nobody outside can predict them. Approximate,
because replicas do not tell what they evict, only how recently used it was: two times, one for what
requests share, which they keep longer (workers/kv_cache/eviction_order.py). Whether a prefix is
shared is decided for each replica by what went there, as the replica itself decides. Bounded: the
least recently used blocks go first, leaves before their ancestors. Knows neither loads nor sockets.
"""

import hashlib
import math
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.engine.content import ContentSpan

HASH_BYTES = 16
_TOKEN_BYTES = array("i").itemsize
_NO_TOKEN = -1


class PrefixUse:
    """One request's use of a prefix at one replica.

    released_at: tokens that the replica had ever written to its KV memory when the request ended;
    infinite while it lives, for what a live request uses is not evicted.
    """

    __slots__ = ("released_at",)

    def __init__(self) -> None:
        self.released_at: float = math.inf


class Evicted(NamedTuple):
    """What a replica has evicted: uses with a PrefixUse.released_at of these or less. shared: of
    blocks from which requests went on in different ways, ordinary: of all others."""

    ordinary: float
    shared: float


@dataclass(slots=True)
class _Copy:
    """A block at one replica. use: the last one. next_key: the block that first followed there,
    empty while none has. is_shared: another one has followed too, here or further on."""

    use: PrefixUse
    next_key: bytes = b""
    is_shared: bool = False


_Block = dict[str, _Copy]
"""By replica."""


class PrefixIndex:
    """block_tokens: tokens per block. max_blocks: blocks remembered. max_match_tokens: how far into
    a prompt the index looks."""

    def __init__(self, block_tokens: int, max_blocks: int, max_match_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._max_match_blocks = max_match_tokens // block_tokens
        self._hash_key = secrets.token_bytes(32)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(
        self, token_ids: Sequence[int], cache_salt: str, content: Sequence[ContentSpan] = ()
    ) -> list[bytes]:
        """One hash per full block of the prompt, in order; salts never share any, nor do blocks
        from the one on in which unlike content begins.

        token_ids: each fits in 32 bits and is not negative.
        """
        num_blocks = min(len(token_ids) // self._block_tokens, self._max_match_blocks)
        tokens = array("i", token_ids[: num_blocks * self._block_tokens]).tobytes()
        # The salt is hashed first, so that none can pass for tokens.
        salt = hashlib.blake2b(cache_salt.encode(), key=self._hash_key).digest()
        prefix = hashlib.blake2b(salt, digest_size=HASH_BYTES, key=self._hash_key)
        keys: list[bytes] = []
        block_bytes = self._block_tokens * _TOKEN_BYTES
        beginning = self._content_by_block(content)
        for number, start in enumerate(range(0, len(tokens), block_bytes)):
            prefix.update(tokens[start : start + block_bytes])
            for span in beginning.get(number, ()):
                prefix.update(array("i", [_NO_TOKEN, span.start, span.num_tokens]).tobytes())
                prefix.update(span.digest)
            keys.append(prefix.digest())
        return keys

    def _content_by_block(self, content: Sequence[ContentSpan]) -> dict[int, list[ContentSpan]]:
        """By the number of the block in which each begins."""
        by_block: dict[int, list[ContentSpan]] = {}
        for span in content:
            by_block.setdefault(span.start // self._block_tokens, []).append(span)
        return by_block

    def match(self, keys: Sequence[bytes], evicted: Mapping[str, Evicted]) -> dict[str, int]:
        """Tokens of the prefix that each of the replicas probably holds; absent means none."""
        matched: dict[str, int] = {}
        remaining = list(evicted.items())
        for num_blocks, key in enumerate(keys, start=1):
            block = self._blocks.get(key)
            if block is None:
                break
            remaining = [
                (replica_id, before)
                for replica_id, before in remaining
                if (copy := block.get(replica_id)) and copy.use.released_at > before[copy.is_shared]
            ]
            if not remaining:
                break
            for replica_id, _ in remaining:
                matched[replica_id] = num_blocks * self._block_tokens
        return matched

    def insert(self, keys: Sequence[bytes], replica_id: str, num_held_tokens: int) -> PrefixUse:
        """Remember that the replica is about to hold this prefix; its user releases the use.

        num_held_tokens: of the prefix, that match() found there. What follows them is written anew,
        and whatever shared it before does not count.
        """
        use = PrefixUse()
        next_key, is_shared = b"", False
        num_held_blocks = num_held_tokens // self._block_tokens
        for number in range(len(keys) - 1, -1, -1):  # ancestors end up more recent
            key = keys[number]
            block = self._blocks.setdefault(key, {})
            copy = block.get(replica_id)
            if copy is None or number >= num_held_blocks:
                block[replica_id] = _Copy(use, next_key)
            else:
                copy.use = use
                copy.next_key = copy.next_key or next_key
                is_shared = is_shared or bool(next_key and copy.next_key != next_key)
                copy.is_shared = is_shared = is_shared or copy.is_shared
            self._blocks.move_to_end(key)
            next_key = key
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return use

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        orphaned = []
        for key, block in self._blocks.items():
            block.pop(replica_id, None)
            if not block:
                orphaned.append(key)
        for key in orphaned:
            del self._blocks[key]
