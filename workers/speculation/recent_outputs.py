"""What requests have said lately, by salt: nobody finds an output under another salt.

Knows token ids only. Salts are forgotten, least recently used first, and so are old outputs.
"""

from collections import OrderedDict

import numpy as np

from workers.kv_cache.radix_node import EMPTY, IntArray

MAX_TOKENS = 1 << 15
"""Of a salt. A scan of so many takes tens of microseconds."""
MAX_SALTS = 64
MIN_OUTPUT_TOKENS = 8
END_OF_OUTPUT = -1


class RecentOutputs:
    """At most MAX_SALTS times MAX_TOKENS tokens of 4 bytes."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, IntArray] = OrderedDict()

    def add(self, salt: str, output: IntArray) -> None:
        """output: int32 (n,). What is too short to be worth it is left out."""
        if len(output) < MIN_OUTPUT_TOKENS:
            return
        end = np.array([END_OF_OUTPUT], dtype=np.int32)
        joined = np.concatenate([self._tokens.pop(salt, EMPTY), output, end])
        self._tokens[salt] = joined[-MAX_TOKENS:]
        if len(self._tokens) > MAX_SALTS:
            self._tokens.popitem(last=False)

    def tokens(self, salt: str) -> IntArray:
        """Its outputs, int32 (n,), each followed by END_OF_OUTPUT; the latest is the last."""
        found = self._tokens.get(salt)
        if found is None:
            return EMPTY
        self._tokens.move_to_end(salt)
        return found
