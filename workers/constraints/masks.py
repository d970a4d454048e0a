"""Masks of one step: which tokens may be sampled in the rows that a grammar constrains."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.kv_cache.radix_node import IntArray

WORD_BITS = 32
_GLANCE_WORDS = 64


class AskedMasks(NamedTuple):
    """What may follow in a grammar, and what may follow behind each of some drafts. row: where the
    first mask goes; the others go behind it."""

    matcher: TokenMatcher
    row: int
    drafts: tuple[int, ...] = ()


FillMasks = Callable[[Sequence[AskedMasks], MaskBits], None]
"""Write, for each matcher, which tokens may follow, into all of its row of the bits; into the rows
behind it which may follow each of its drafts, up to one that may not. Matchers stay where they
are."""


class Constrained(Protocol):
    """A request whose output obeys a grammar."""

    @property
    def matcher(self) -> TokenMatcher: ...

    @property
    def is_ended(self) -> bool: ...

    def forced_token(self, position: int) -> int | None:
        """What must stand there, None where the matcher's mask says it."""
        ...

    def look_ahead(self, token_id: int) -> None:
        """The mask of the next token allows token_id alone: find out what must follow."""
        ...


class MaskRow(NamedTuple):
    """A token that is to be sampled under a mask: at this position of this slot. can_run_again:
    whether the row may be left out of this step's samples where its mask is late. drafts: which are
    verified in the row, each of which stands before a token under a mask of its own."""

    slot: int
    position: int
    request: Constrained
    can_run_again: bool = False
    drafts: tuple[int, ...] = ()


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


def look_ahead(rows: Sequence[MaskRow], masks: StepMasks) -> None:
    """Where a mask of rows leaves one token, find out what must follow. masks: of these rows. Where
    one has drafts nothing is found out: what must follow a proposer finds, too."""
    if not rows or any(row.drafts for row in rows):
        return
    bits = masks.rows
    for index in _single_words(bits):
        row = rows[index]
        (word,) = np.flatnonzero(bits[index]).tolist()
        value = int(bits[index, word]) & 0xFFFFFFFF
        if value & (value - 1) == 0 and row.request.forced_token(row.position) is None:
            row.request.look_ahead(word * WORD_BITS + value.bit_length() - 1)


def _single_words(bits: MaskBits) -> list[int]:
    """Rows of which one word has any token. Most have many, in their first words already."""
    few = np.count_nonzero(bits[:, :_GLANCE_WORDS], axis=1) < 2
    return [i for i in np.flatnonzero(few).tolist() if np.count_nonzero(bits[i]) == 1]
