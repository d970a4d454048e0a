"""Masks of one step: which tokens may be sampled in the rows that a grammar constrains."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.kv_cache.radix_node import IntArray

NUM_FILL_THREADS = 4
WORD_BITS = 32


class StepMasks(msgspec.Struct, frozen=True):
    """Allowed tokens of slots int32 (n,), as words of 32 bits: bits int32 (n * num words,)."""

    step_id: int
    slots: IntArray
    bits: IntArray

    @property
    def rows(self) -> MaskBits:
        return self.bits.reshape(len(self.slots), -1)


class MaskFiller:
    """Fills the rows of a step's masks, several at once. vocab_size: columns of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._pool = ThreadPoolExecutor(NUM_FILL_THREADS, thread_name_prefix="tessera-masks")

    def fill(self, step_id: int, rows: Sequence[tuple[int, TokenMatcher]]) -> StepMasks:
        """rows: the slot and the matcher of each constrained row."""
        bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        if len(rows) == 1:
            rows[0][1].fill(bits, 0)
        else:
            matchers = (matcher for _, matcher in rows)
            for _ in self._pool.map(
                lambda row, one: one.fill(bits, row), range(len(rows)), matchers
            ):
                pass
        slots = np.array([slot for slot, _ in rows], dtype=np.int32)
        return StepMasks(step_id, slots, bits.reshape(-1))

    def close(self) -> None:
        self._pool.shutdown()
