"""Response bodies as OpenAI's clients read them, encoded by msgspec: about a microsecond a chunk.

UNSET fields are left out; None is sent as null. Pure data and the rendering of log probabilities.
"""

from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from service.handler.directory import ServedModel
from service.handler.events import TokenLogprob, Usage

_MIN_LOGPROB = -9999.0


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct, frozen=True):
    """vLLM's shape of one alternative at a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TopLogprobBody(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatMessageBody(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


C = TypeVar("C", CompletionChoice, ChatChoice, ChatChunkChoice)


class ResponseBody(Struct, Generic[C], kw_only=True):
    """One body or one chunk of either endpoint."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: UsageBody | None | UnsetType = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(Struct, frozen=True):
    """created: when this server started, Unix seconds. ready: whether requests are taken now.

    max_model_len, vocab_size: absent until a replica of the model was seen.
    """

    id: str
    created: int
    ready: bool
    max_model_len: int | UnsetType = UNSET
    vocab_size: int | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "tessera"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.num_prompt_tokens,
        usage.num_output_tokens,
        usage.num_total_tokens,
        PromptTokensDetails(usage.num_cached_tokens),
    )


def model_card(model: ServedModel, created_s: int) -> ModelCard:
    info = model.info
    if info is None:
        return ModelCard(model.name, created_s, model.is_ready())
    return ModelCard(model.name, created_s, model.is_ready(), info.max_context_len, info.vocab_size)


def token_text(token: bytes) -> str:
    """A token that is no whole text is written "bytes:\\xe2\\x80", as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def completion_logprobs(entries: list[TokenLogprob] | None) -> CompletionLogprobs | None:
    """The alternatives of a position always include the token that stands there."""
    if entries is None:
        return None
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        position = {token_text(other.token): _finite(other.logprob) for other in entry.top}
        position.setdefault(token_text(entry.token), _finite(entry.logprob))
        top.append(position)
    return CompletionLogprobs(
        tokens=[token_text(entry.token) for entry in entries],
        token_logprobs=[
            None if entry.logprob is None else _finite(entry.logprob) for entry in entries
        ],
        top_logprobs=top,
        text_offset=[entry.text_offset for entry in entries],
    )


def chat_logprobs(entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs(
        [
            ChatLogprob(
                entry.token.decode("utf-8", "replace"),
                _finite(entry.logprob or 0.0),
                list(entry.token),
                [
                    TopLogprobBody(
                        other.token.decode("utf-8", "replace"),
                        _finite(other.logprob),
                        list(other.token),
                    )
                    for other in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs_body(entries: list[TokenLogprob] | None) -> PromptLogprobs | UnsetType:
    if entries is None:
        return UNSET
    body: PromptLogprobs = []
    for entry in entries:
        if entry.logprob is None:
            body.append(None)
            continue
        position = {
            str(other.token_id): PromptLogprob(
                _finite(other.logprob), rank, token_text(other.token)
            )
            for rank, other in enumerate(entry.top, start=1)
        }
        position[str(entry.token_id)] = PromptLogprob(
            _finite(entry.logprob), entry.rank, token_text(entry.token)
        )
        body.append(position)
    return body


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999."""
    return max(logprob, _MIN_LOGPROB)
