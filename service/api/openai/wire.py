"""Response bodies as OpenAI's clients read them, encoded by msgspec: about a microsecond a chunk.

UNSET fields are left out; None is sent as null. Pure data.
"""

from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from service.handler.directory import ServedModel
from service.handler.events import Usage
from service.handler.task import Task, task_of


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


class FunctionChunk(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallChunk(Struct, frozen=True):
    """id, type and name come with the first chunk of a call, and only there."""

    index: int
    function: FunctionChunk
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class FunctionBody(Struct, frozen=True):
    name: str
    arguments: str | Raw


class ToolCallBody(Struct, frozen=True):
    id: str
    function: FunctionBody
    type: str = "function"


class ChatMessageBody(Struct, frozen=True):
    """content: null where there are calls and nothing else."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


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


class ModelPermission(Struct, frozen=True):
    """What OpenAI's API once said of every model and vLLM's still does: it may be sampled."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, frozen=True):
    """created: when this server started, Unix seconds. ready: whether requests are taken now.

    root: the model's id at the hub, or its name. max_model_len: prompt and output tokens of the
    longest request; like vocab_size and task absent until a replica of the model was seen. task:
    what the model is for, a service.handler.task.Task. parent: of an adapter, its model.
    """

    id: str
    created: int
    root: str
    permission: list[ModelPermission]
    ready: bool
    max_model_len: int | UnsetType = UNSET
    vocab_size: int | UnsetType = UNSET
    task: Task | UnsetType = UNSET
    object: str = "model"
    owned_by: str = "tessera"
    parent: str | None = None


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
    return ModelCard(
        id=model.name,
        created=created_s,
        root=model.root,
        permission=[ModelPermission(f"modelperm-{model.name}", created_s)],
        ready=model.is_ready(),
        max_model_len=UNSET if info is None else info.max_request_len,
        vocab_size=UNSET if info is None else info.vocab_size,
        task=UNSET if info is None else task_of(info),
        parent=model.parent,
    )


def token_text(token: bytes) -> str:
    """A token that is no whole text is written "bytes:\\xe2\\x80", as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
