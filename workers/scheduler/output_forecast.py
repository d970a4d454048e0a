"""How much memory running requests will still want: what admission must leave for them.

With too little left, requests are admitted only to be retracted; with too much, memory lies idle.
Requests give their pages back at different times, so the most that they hold together is less than
the sum of what each will hold at its end. After "Past-Future Scheduler for LLM Serving under SLA
Guarantees" (Gong et al., ASPLOS 2025).
"""

import numpy as np

from workers.kv_cache.radix_node import IntArray

_INITIAL_RATIO = 0.8
_MIN_RATIO = 0.1
_DECAY_PER_STEP = 0.0005
_RISE_PER_RETRACTION = 0.1
_FINISHED_WEIGHT = 1 / 32
_FINISHED_MARGIN = 1.1
_MAX_COUNTED_TOKENS = 4096


class OutputForecast:
    """The share of the output it may have that a request is expected to bring.

    At first a guess that falls every step, but never below what finished requests brought of theirs
    (a moving average, and a tenth more); it rises when a request is retracted.
    """

    def __init__(self) -> None:
        self._ratio = _INITIAL_RATIO
        self._finished_share = 0.0

    @property
    def ratio(self) -> float:
        return self._ratio

    def on_step(self) -> None:
        least = min(1.0, max(_MIN_RATIO, _FINISHED_MARGIN * self._finished_share))
        self._ratio = max(least, self._ratio - _DECAY_PER_STEP)

    def on_finish(self, num_tokens: int, max_tokens: int) -> None:
        """A request ended by itself after num_tokens of max_tokens > 0."""
        share = num_tokens / max_tokens
        self._finished_share += _FINISHED_WEIGHT * (share - self._finished_share)

    def on_retraction(self) -> None:
        self._ratio = min(1.0, self._ratio + _RISE_PER_RETRACTION)

    def new_tokens(self, max_new_tokens: IntArray) -> IntArray:
        """Tokens that requests will bring which may bring max_new_tokens (n,), int32.

        Counts at most 4096 tokens a request: few use a context to its end.
        """
        counted = np.minimum(max_new_tokens, _MAX_COUNTED_TOKENS)
        return np.ceil(self._ratio * counted).astype(np.int32)


def peak_growth_pages(
    num_tokens: IntArray, new_tokens: IntArray, given_back: IntArray, page_size: int
) -> int:
    """The most pages beyond today's that requests hold together at any one time.

    num_tokens (n,): what each holds today. new_tokens (n,): what it still brings, a token a step;
    then it ends. given_back (n,): pages of today's that are free again when it has ended. 0 for no
    requests. The time of the peak is found with pages of one token, the pages then are counted.
    """
    if len(num_tokens) == 0:
        return 0
    order = np.argsort(-new_tokens, kind="stable")
    lasting = new_tokens[order]
    # Just before the k-th of them ends, those before it are as far, those behind it have ended.
    growth = np.arange(1, len(order) + 1) * lasting / page_size
    returned = given_back.sum() - np.cumsum(given_back[order])
    peak = int(np.argmax(growth - returned))
    held = num_tokens[order[: peak + 1]]
    num_pages = -(-(held + lasting[peak]) // page_size) - -(-held // page_size)
    return max(0, int(num_pages.sum() - returned[peak]))
