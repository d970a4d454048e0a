"""A grammar for models without a tokenizer: every third token, each time others of them."""

from collections.abc import Sequence

import numpy as np

from workers.constraints.masks import WORD_BITS, AskedMasks
from workers.constraints.matcher import MaskBits


class ThirdOfVocabulary:
    """The n-th token is n modulo 3. A TokenMatcher that is never complete."""

    failure = ""
    is_complete = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def consume(self, token_id: int) -> None:
        if not self.failure and token_id % 3 != self.num_tokens % 3:
            self.failure = f"token {token_id} came at {self.num_tokens}"
        self.num_tokens += 1

    def take_forced(self, token_id: int) -> list[int]:
        return []


class ThirdsCompiler:
    """A Compiler of that grammar, whatever the text."""

    def __init__(self, vocab_size: int) -> None:
        num_words = -(-vocab_size // WORD_BITS)
        tokens = np.arange(num_words * WORD_BITS)
        is_allowed = (tokens < vocab_size) & (tokens % 3 == np.arange(3)[:, None])
        packed = np.packbits(is_allowed, axis=1, bitorder="little")
        self._masks: MaskBits = packed.view("<i4").astype(np.int32)

    def prepare(self) -> None: ...

    def compile(self, grammar: str, token_ids: Sequence[int]) -> ThirdOfVocabulary:
        return ThirdOfVocabulary(len(token_ids))

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        for matcher, row, drafts in rows:
            assert isinstance(matcher, ThirdOfVocabulary)
            bits[row] = self._masks[matcher.num_tokens % 3]
            for ahead, token_id in enumerate(drafts, start=1):
                if token_id % 3 != (matcher.num_tokens + ahead - 1) % 3:
                    break
                bits[row + ahead] = self._masks[(matcher.num_tokens + ahead) % 3]
