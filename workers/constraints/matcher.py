"""What a grammar allows next, token by token. Knows no grammar."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

MaskBits = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 says whether token t may follow: int32 (n, num words)."""


class TokenMatcher(Protocol):
    """Where one request stands in its grammar. Only the thread that drives the engine uses it; what
    may follow, of many at once, is asked of who made them (GrammarDesk.fill)."""

    @property
    def failure(self) -> str:
        """Why nothing can be said any more; empty while all is well."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""
        ...

    def consume(self, token_id: int) -> None:
        """Go on by a token. One that the grammar does not allow is a failure."""
        ...

    def take_forced(self, token_id: int) -> list[int]:
        """Go past the tokens that must follow one after the other, the first of them token_id: the
        only one in the mask of each place. Empty, and nothing is gone past, where only one is
        known."""
        ...
