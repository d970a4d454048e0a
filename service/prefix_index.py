"""An approximate radix index: which replica has probably cached which prompt prefix.

A prefix is a chain of fixed-size token blocks; each block is known by a keyed hash of its tokens
and of the block before it, so equal hashes mean equal prefixes and nobody outside can predict them.
Approximate, because replicas evict without telling. Bounded: the least recently used blocks go
first, leaves before their ancestors. Knows neither loads nor sockets.
"""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence

HASH_BYTES = 16


class PrefixIndex:
    """block_tokens: tokens per block. max_blocks: blocks remembered. max_match_tokens: how far into
    a prompt the index looks."""

    def __init__(self, block_tokens: int, max_blocks: int, max_match_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._max_match_blocks = max_match_tokens // block_tokens
        self._hash_key = secrets.token_bytes(32)
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
        """One hash per full block of the prompt, in order; salts never share any."""
        num_blocks = min(len(token_ids) // self._block_tokens, self._max_match_blocks)
        key = self._hash(cache_salt.encode())
        keys: list[bytes] = []
        for start in range(0, num_blocks * self._block_tokens, self._block_tokens):
            block = array("q", token_ids[start : start + self._block_tokens])
            key = self._hash(key + block.tobytes())
            keys.append(key)
        return keys

    def match(self, keys: Sequence[bytes], replica_ids: Collection[str]) -> dict[str, int]:
        """Tokens of the prefix that each of the replicas probably holds; absent means none."""
        matched: dict[str, int] = {}
        remaining = set(replica_ids)
        for num_blocks, key in enumerate(keys, start=1):
            holders = self._holders.get(key)
            if holders is None:
                break
            remaining &= holders
            if not remaining:
                break
            for replica_id in remaining:
                matched[replica_id] = num_blocks * self._block_tokens
        return matched

    def insert(self, keys: Sequence[bytes], replica_id: str) -> None:
        """Remember that the replica is about to hold this prefix."""
        for key in reversed(keys):  # ancestors end up more recent than their descendants
            self._holders.setdefault(key, set()).add(replica_id)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        orphaned = []
        for key, holders in self._holders.items():
            holders.discard(replica_id)
            if not holders:
                orphaned.append(key)
        for key in orphaned:
            del self._holders[key]

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._hash_key).digest()
