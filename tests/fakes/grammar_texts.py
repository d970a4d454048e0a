"""Texts that a grammar allows, drawn at random: what a model without any sense would write."""

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

NUM_BYTES = 256


def draw(grammar: str, seed: int, max_bytes: int = 4000) -> bytes:
    """One text, each byte drawn evenly from those that may come next; it ends as soon as it can
    go no further or the end is drawn. Raises AssertionError where that takes too long."""
    dice = random.Random(seed)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    text = bytearray()
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        chosen = int(dice.choice(allowed))
        if chosen >= NUM_BYTES:
            break
        matcher.consume_token(chosen)
        text.append(chosen)
        assert len(text) <= max_bytes, bytes(text[:100])
    assert not matcher.is_error(), matcher.get_error()
    return bytes(text)
