"""What a choice begins with when the client asked about its prompt: the text of the prompt, its
tokens' log probabilities. In parts of a few thousand values, so that nobody waits for all of them.

Knows no stream.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from service.handler.events import ChoiceDelta, TokenLogprob, resolve_logprobs
from service.tokenizer.detokenizer import make_detokenizer
from service.tokenizer.pieces import TokenPieces
from workers.engine.logprobs import PackedLogprobs, TokenLogprobs

MAX_VALUES = 4096
"""Of log probabilities in one part: a few milliseconds, resolved and rendered."""
MAX_CHARS = 64 << 10


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """text: the prompt's, if it is to be shown. is_echoed: its tokens' log probabilities are the
    choice's own first ones too, where those were asked for."""

    index: int
    text: str
    token_ids: list[int]
    is_echoed: bool

    async def deltas(
        self, pieces: TokenPieces, packed: PackedLogprobs | None
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Nothing if nothing was asked. Other tasks run between two parts."""
        for start in range(0, len(self.text), MAX_CHARS):
            yield ChoiceDelta(self.index, self.text[start : start + MAX_CHARS])
            await asyncio.sleep(0)
        if packed is None:
            return
        detokenizer = make_detokenizer(pieces, skip_special_tokens=False)
        num_chars = 0
        step = max(1, MAX_VALUES // (packed.num_top + 1))
        for start in range(0, len(self.token_ids), step):
            resolved: list[TokenLogprob] = []
            token_ids = self.token_ids[start : start + step]
            for token_id, entry in zip(token_ids, _entries(packed, start, step), strict=True):
                resolved.append(resolve_logprobs(pieces, token_id, entry, num_chars))
                num_chars += len(detokenizer.push(token_id))
            own = resolved if self.is_echoed else None
            yield ChoiceDelta(self.index, logprobs=own, prompt_logprobs=resolved)
            await asyncio.sleep(0)


def _entries(packed: PackedLogprobs, start: int, num: int) -> list[TokenLogprobs | None]:
    """Of prompt positions from start on; nothing predicts the first."""
    if start == 0:
        return [None, *packed.unpack(0, num - 1)]
    return [*packed.unpack(start - 1, start - 1 + num)]
