"""Which numbers of tokens fill the device: how many a step with decode rows had better hold.

Products take tokens by tiles, and multiprocessors take tiles by waves: 1,152 tokens can cost nearly
what 1,536 do. The runner times its products once, by tiles; a step is then as long as gives most
prompt tokens a second, beside the decode rows that it has anyway.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

TILE_TOKENS = 128
"""Products take tokens by tiles of so many: filling the last one costs nothing."""
MIN_FILLED_SHARE = 0.5
"""Of what a step may take of prompts: less would delay their first tokens for too little."""

_NOISE = 0.01
"""Of seconds a token: what no cut is worth."""

Seconds = npt.NDArray[np.float64]


class StepFilling(Protocol):
    """Chooses how many prompt tokens a step takes."""

    def num_tokens(self, num_waiting: int, most: int, num_decode_rows: int) -> int:
        """At least 1 and at most most, of num_waiting that are there. most: what time allows."""


class EvenSteps:
    """For devices whose products were not timed: as few steps as can be, each as long as the next,
    filled up to whole tiles with the decode rows where that stays within most."""

    def num_tokens(self, num_waiting: int, most: int, num_decode_rows: int) -> int:
        num_steps = -(-num_waiting // most)
        if num_steps <= 1:
            return most
        share = -(-num_waiting // num_steps) + num_decode_rows
        return min(-(-share // TILE_TOKENS) * TILE_TOKENS - num_decode_rows, most)


class FilledSteps:
    """product_s: seconds of a step's products with 1, 2, ... tiles of tokens; beyond them the mean
    of a tile. At least two."""

    def __init__(self, product_s: tuple[float, ...]) -> None:
        self._seconds = np.array((0.0, *product_s))

    def num_tokens(self, num_waiting: int, most: int, num_decode_rows: int) -> int:
        fits = max(1, min(num_waiting, most))
        first_tile = (int(MIN_FILLED_SHARE * fits) + num_decode_rows) // TILE_TOKENS + 1
        tiles = np.arange(first_tile, (fits + num_decode_rows) // TILE_TOKENS + 1)
        numbers = np.append(tiles * TILE_TOKENS - num_decode_rows, fits)
        token_s = self._of(numbers + num_decode_rows) / numbers
        chosen = int(numbers[token_s <= token_s.min() * (1.0 + _NOISE)][-1])
        # Less than a tile that is left of all prompts is not worth a step of its own.
        return fits if num_waiting - chosen < TILE_TOKENS and fits == num_waiting else chosen

    def _of(self, num_tokens: npt.NDArray[np.int64]) -> Seconds:
        """Seconds of products with so many tokens."""
        tiles = -(-num_tokens // TILE_TOKENS)
        last = len(self._seconds) - 1
        beyond = np.maximum(tiles - last, 0)
        seconds: Seconds = (
            self._seconds[np.minimum(tiles, last)] + beyond * self._seconds[-1] / last
        )
        return seconds
