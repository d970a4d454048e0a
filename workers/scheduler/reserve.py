"""How much room admission leaves for the tokens that running requests will still bring.

With too little, requests are admitted only to be retracted; with too much, memory lies idle.
The adaptive share of the possible output follows SGLang's new-token ratio.
"""

import numpy as np

from workers.kv_cache.radix_node import IntArray

_INITIAL_RATIO = 0.4
_MIN_RATIO = 0.1
_DECAY_PER_STEP = 0.001
_RISE_PER_RETRACTION = 0.1
_MAX_COUNTED_TOKENS = 4096


class NewTokenReserve:
    """A share of the output that is still possible, falling every step, rising on retraction."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._ratio = _INITIAL_RATIO

    @property
    def ratio(self) -> float:
        return self._ratio

    def on_step(self) -> None:
        self._ratio = max(_MIN_RATIO, self._ratio - _DECAY_PER_STEP)

    def on_retraction(self) -> None:
        self._ratio = min(1.0, self._ratio + _RISE_PER_RETRACTION)

    def num_pages(self, max_new_tokens: IntArray) -> int:
        """Pages to leave for requests that may bring max_new_tokens (n,) more, int32.

        Counts at most 4096 tokens a request: few use a context to its end.
        """
        expected = self._ratio * float(np.minimum(max_new_tokens, _MAX_COUNTED_TOKENS).sum())
        return int(-(-expected // self._page_size))
