"""An approximate radix index: which replica has probably cached which prompt prefix.

A prefix is a chain of fixed-size token blocks; each block is known by a keyed hash of everything up
to its end, so equal hashes mean equal prefixes and nobody outside can predict them. Approximate,
because replicas evict without telling: what a replica last used before it wrote a whole cache full
of other tokens counts as evicted, several caches full for what requests share, which replicas keep
longer (workers/kv_cache/eviction_order.py). Bounded: the least recently used blocks go first,
leaves before their ancestors. Knows neither loads nor sockets.
"""

import hashlib
import math
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HASH_BYTES = 16
_TOKEN_BYTES = array("i").itemsize


class PrefixUse:
    """One request's use of a prefix at one replica.

    released_at: tokens that the replica had ever written to its KV memory when the request ended;
    infinite while it lives, for what a live request uses is not evicted.
    """

    __slots__ = ("released_at",)

    def __init__(self) -> None:
        self.released_at: float = math.inf


class Evicted(NamedTuple):
    """What a replica has evicted: uses with a PrefixUse.released_at below these. shared: of blocks
    from which requests went on in different ways, unshared: of all others."""

    unshared: float
    shared: float


@dataclass(slots=True)
class _Block:
    """uses: the last one at each replica that was sent it. next_key: the block that first followed,
    empty while none has. is_shared: another one has followed too, here or further on."""

    uses: dict[str, PrefixUse] = field(default_factory=dict)
    next_key: bytes = b""
    is_shared: bool = False


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

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
        """One hash per full block of the prompt, in order; salts never share any.

        token_ids: each fits in 32 bits.
        """
        num_blocks = min(len(token_ids) // self._block_tokens, self._max_match_blocks)
        tokens = array("i", token_ids[: num_blocks * self._block_tokens]).tobytes()
        # The salt is hashed first, so that none can pass for tokens.
        salt = hashlib.blake2b(cache_salt.encode(), key=self._hash_key).digest()
        prefix = hashlib.blake2b(salt, digest_size=HASH_BYTES, key=self._hash_key)
        keys: list[bytes] = []
        block_bytes = self._block_tokens * _TOKEN_BYTES
        for start in range(0, len(tokens), block_bytes):
            prefix.update(tokens[start : start + block_bytes])
            keys.append(prefix.digest())
        return keys

    def match(self, keys: Sequence[bytes], evicted: Mapping[str, Evicted]) -> dict[str, int]:
        """Tokens of the prefix that each of the replicas probably holds; absent means none."""
        matched: dict[str, int] = {}
        remaining = list(evicted.items())
        for num_blocks, key in enumerate(keys, start=1):
            block = self._blocks.get(key)
            if block is None:
                break
            uses, is_shared = block.uses, block.is_shared
            remaining = [
                (replica_id, before)
                for replica_id, before in remaining
                if replica_id in uses and uses[replica_id].released_at >= before[is_shared]
            ]
            if not remaining:
                break
            for replica_id, _ in remaining:
                matched[replica_id] = num_blocks * self._block_tokens
        return matched

    def insert(self, keys: Sequence[bytes], replica_id: str) -> PrefixUse:
        """Remember that the replica is about to hold this prefix; its user releases the use."""
        use = PrefixUse()
        next_key, is_shared = b"", False
        for key in reversed(keys):  # ancestors end up more recent than their descendants
            block = self._blocks.setdefault(key, _Block())
            block.uses[replica_id] = use
            block.next_key = block.next_key or next_key
            is_shared = is_shared or bool(next_key and block.next_key != next_key)
            block.is_shared = is_shared = is_shared or block.is_shared
            self._blocks.move_to_end(key)
            next_key = key
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return use

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        orphaned = []
        for key, block in self._blocks.items():
            block.uses.pop(replica_id, None)
            if not block.uses:
                orphaned.append(key)
        for key in orphaned:
            del self._blocks[key]
