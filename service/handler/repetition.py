"""Ends choices that say the same again and again. Knows token ids only."""

from dataclasses import dataclass

import numpy as np

MAX_PATTERN_SIZE = 1024


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A choice ends once its last tokens are min_count times the same pattern of min_pattern_size
    to max_pattern_size tokens. See check()."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    def check(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if not 1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            return (
                "needs min_pattern_size at least 1, at most max_pattern_size, and that at most "
                f"{MAX_PATTERN_SIZE}"
            )
        return "" if self.min_count >= 2 else "needs a min_count of at least 2"


class RepetitionDetector:
    """Of one choice.

    Keeps for each pattern size how many of the last tokens equal the ones that far before them: a
    pattern of p tokens stands there c times where that are (c - 1) * p or more.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = sizes * (detection.min_count - 1)
        self._num_equal = np.zeros(len(sizes), dtype=np.int64)
        # Newest first; -1 is no token.
        self._last = np.full(detection.max_pattern_size, -1, dtype=np.int64)
        self._first_size = detection.min_pattern_size

    def push(self, token_id: int) -> bool:
        """Whether the choice ends with this token."""
        is_equal = self._last[self._first_size - 1 :] == token_id
        self._num_equal += 1
        self._num_equal *= is_equal
        self._last[1:] = self._last[:-1]
        self._last[0] = token_id
        return bool((self._num_equal >= self._needed).any())
