"""Masks of one step: which tokens may be sampled in the rows that a grammar constrains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.kv_cache.radix_node import IntArray

WORD_BITS = 32

FillMasks = Callable[[Sequence[tuple[TokenMatcher, int]], MaskBits], None]
"""Write, for each matcher, which tokens may follow, into its row of the bits."""


class Constrained(Protocol):
    """A request whose output obeys a grammar."""

    @property
    def matcher(self) -> TokenMatcher: ...

    def forced_token(self, position: int) -> int | None:
        """What must stand there, None where the matcher's mask says it."""
        ...

    def look_ahead(self, token_id: int) -> None:
        """The mask of the next token allows token_id alone: find out what must follow."""
        ...


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A token that is to be sampled under a mask: at this position of this slot."""

    slot: int
    position: int
    request: Constrained


class StepMasks(msgspec.Struct, frozen=True):
    """Allowed tokens at positions of slots, int32 (n,) both, as words of 32 bits: bits int32
    (n * num words,)."""

    step_id: int
    slots: IntArray
    positions: IntArray
    bits: IntArray

    @property
    def rows(self) -> MaskBits:
        return self.bits.reshape(len(self.slots), -1)


class MaskFiller:
    """Fills the rows of a step's masks. vocab_size: columns of the logits."""

    def __init__(self, vocab_size: int, fill: FillMasks) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._fill = fill

    def fill(self, step_id: int, rows: Sequence[MaskRow]) -> StepMasks:
        bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        asked = []
        for index, row in enumerate(rows):
            forced = row.request.forced_token(row.position)
            if forced is None:
                asked.append((row.request.matcher, index))
            else:
                bits[index, forced // WORD_BITS] = np.uint32(1 << forced % WORD_BITS).view(np.int32)
        self._fill(asked, bits)
        places = np.array([(row.slot, row.position) for row in rows], dtype=np.int32)
        slots, positions = places.reshape(-1, 2).T
        return StepMasks(step_id, slots.copy(), positions.copy(), bits.reshape(-1))


def look_ahead(rows: Sequence[MaskRow], masks: StepMasks) -> None:
    """Where a mask of rows leaves one token, find out what must follow. masks: of these rows."""
    bits = masks.rows
    for index in np.flatnonzero(np.count_nonzero(bits, axis=1) == 1).tolist():
        row = rows[index]
        (word,) = np.flatnonzero(bits[index]).tolist()
        value = int(bits[index, word]) & 0xFFFFFFFF
        if value & (value - 1) == 0 and row.request.forced_token(row.position) is None:
            row.request.look_ahead(word * WORD_BITS + value.bit_length() - 1)
