"""Where one request stands in its grammar, as llguidance keeps it."""

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from workers.constraints.matcher import MaskBits

_MAX_REASON_CHARS = 300


class GrammarMatcher:
    """A TokenMatcher around an LLMatcher of its own. template: the number of the one that it is a
    copy of, among those of its grammar. next_mask: what may follow, where that is known already,
    int32 (num words,). failure and is_complete are of when the matcher was last let go of: while
    another thread makes a mask, nobody may ask it."""

    def __init__(self, matcher: LLMatcher, template: int = 0) -> None:
        self.matcher = matcher
        self.template = template
        self.next_mask: MaskBits | None = None
        self.failure = ""
        self.is_complete = False
        self.look()

    def look(self) -> None:
        """Find out how it stands."""
        matcher = self.matcher
        # With an error it has stopped, too: most are asked once.
        self.is_complete = matcher.is_stopped()
        if self.is_complete and matcher.is_error():
            self.failure = short_reason(matcher.get_error())

    def make_next_mask(self, num_words: int) -> None:
        bits = np.zeros((1, num_words), dtype=np.int32)
        fill_next_token_bitmask(self.matcher, bits)
        self.next_mask = bits[0]
        self.look()

    def consume(self, token_id: int) -> None:
        self.next_mask = None
        self.matcher.consume_token(token_id)
        self.look()

    def take_forced(self, token_id: int) -> list[int]:
        """llguidance tokenizes the text that must follow, leaves out what a longer token might go
        beyond, and has each of these tokens alone in its mask; the tests hold it to that."""
        forced = self.matcher.compute_ff_tokens()
        if len(forced) < 2 or forced[0] != token_id:
            return []
        self.next_mask = None
        is_taken = self.matcher.consume_tokens(forced)
        self.look()
        return forced if is_taken else []


def short_reason(reason: str) -> str:
    """Without the parser's state, which follows in angle brackets; never empty."""
    return reason.partition("<state>")[0].strip()[:_MAX_REASON_CHARS] or "unknown"
