"""What a generation yields: plain values that HTTP and gRPC render. Knows neither."""

import msgspec

from service.chat.parsed import ToolCallDelta
from service.tokenizer.pieces import TokenPieces
from workers.engine.logprobs import TokenLogprobs


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative at a position. token: the bytes the token stands for."""

    token_id: int
    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """The token at one position.

    logprob is None for a prompt's first token, which nothing predicts. rank 1 is the most likely
    token. text_offset: characters of the choice's text before the token.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int | None
    top: tuple[TopLogprob, ...]
    text_offset: int = 0


class ChoiceDelta(msgspec.Struct):
    """The next part of one choice; the last part of a choice has a finish_reason.

    text: of a chat, without its thinking (reasoning) and its calls. finish_reason: "stop", "length"
    or "tool_calls". stop_reason: the stop string or stop token id that ended the
    choice; None for the end-of-sequence token and for "length". prompt_logprobs: in order over a
    choice's first parts when they were asked for. num_output_tokens: of the whole choice so far.
    embedding: of a prompt that becomes a vector, whole: float32, little-endian.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    embedding: bytes = b""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request: each prompt once, every token its choices generated.

    The token that ends a choice counts; tokens behind a stop string that the engine had already
    computed do not.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def num_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def resolve_logprobs(
    pieces: TokenPieces, token_id: int, entry: TokenLogprobs | None, text_offset: int
) -> TokenLogprob:
    """Put token bytes to the ids of one position."""
    token = pieces.token_bytes(token_id)
    if entry is None:
        return TokenLogprob(token_id, token, None, None, (), text_offset)
    top = tuple(
        TopLogprob(top_id, pieces.token_bytes(top_id), logprob)
        for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    )
    return TokenLogprob(token_id, token, entry.logprob, entry.rank, top, text_offset)
