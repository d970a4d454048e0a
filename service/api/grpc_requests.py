"""Protobuf requests to the handler's values, as strict as the HTTP schemas. Knows no server."""

from typing import Any, TypedDict

from google.protobuf.message import Message

from service.api.grpc_chats import to_chat_options, to_chat_prompt
from service.api.openai.sampling import distinct
from service.errors import ApiError, ApiErrorCode
from service.handler.beams import BeamOptions, EarlyStopping
from service.handler.embedding import embedding_request
from service.handler.repetition import RepetitionDetection
from service.handler.requests import (
    EmbeddingOptions,
    GenerationRequest,
    NamedConstraint,
    Prompt,
    TextOptions,
    TokenPrompt,
)
from service.handler.scoring import ScoredTexts, scoring_request
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.tokenizer.constraints import (
    JSON_OBJECT,
    Choices,
    Constraint,
    JsonSchema,
    Lark,
    Regex,
)
from service.tokenizer.jobs import EncodeText
from workers.engine.protocol import ModelInfo
from workers.sampling.params import MAX_SEED, SamplingParams
from workers.speculation.config import MAX_DRAFT_TOKENS

_PLAIN_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)


def to_generation_request(
    request: pb.GenerateRequest, limits: Limits, *, is_stream: bool
) -> GenerationRequest:
    """Raises ApiError."""
    sampling = request.sampling
    if is_stream and sampling.HasField("prompt_logprobs"):
        raise _invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    is_scoring_only = sampling.HasField("max_tokens") and sampling.max_tokens == 0
    if is_scoring_only and not request.echo:
        raise _invalid("max_tokens must be at least 1, or 0 together with echo", "max_tokens")
    if request.echo and request.text.suffix:
        raise _invalid("suffix excludes echo", "suffix")
    if request.echo and request.HasField("chat"):
        raise ApiError(
            ApiErrorCode.UNSUPPORTED_PARAMETER, "echo is not supported for chats", "echo"
        )
    return GenerationRequest(
        prompts=(to_prompt(request, limits),),
        sampling=_to_sampling(request, is_scoring_only=is_scoring_only),
        model=request.model,
        **_choices(request, is_stream=is_stream),
        text=TextOptions(
            stop=tuple(sampling.stop),
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=_or_true(sampling, "skip_special_tokens"),
            echo=request.echo,
        ),
        is_scoring_only=is_scoring_only,
        truncate_prompt_tokens=(
            request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        ),
        keeps_beginning=_keeps_beginning(request),
        unset=frozenset(name for name in _PLAIN_FIELDS if not sampling.HasField(name)),
        repetition=_to_repetition(sampling),
        stream_interval=request.stream_interval or 1,
        bad_words=tuple(sampling.bad_words),
        beams=_to_beams(request.beam_search, is_stream=is_stream),
        max_draft_tokens=_to_max_drafts(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        request_id=request.request_id,
        constraint=_to_constraint(request),
        chat=to_chat_options(request.chat, limits) if request.HasField("chat") else None,
    )


def to_embedding_request(request: pb.EmbedRequest, request_id: str) -> GenerationRequest:
    """request_id: of the call, for a message without one of its own. Raises ApiError."""
    return embedding_request(
        tuple(map(_to_input, request.input)),
        EmbeddingOptions(
            request.dimensions if request.HasField("dimensions") else None,
            _or_true(request, "normalize"),
            "embed",
        ),
        model=request.model,
        truncate_prompt_tokens=(
            request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        ),
        keeps_beginning=_keeps_beginning(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        request_id=request.request_id or request_id,
    )


def to_scored_texts(request: pb.ScoreRequest) -> ScoredTexts:
    return ScoredTexts(tuple(request.queries), tuple(request.documents), "documents")


def to_scoring_request(
    request: pb.ScoreRequest, texts: ScoredTexts, info: ModelInfo, request_id: str
) -> GenerationRequest:
    """As to_embedding_request(). info: of the model that is asked."""
    return scoring_request(
        texts,
        info,
        is_activated=True,
        model=request.model,
        truncate_prompt_tokens=(
            request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        ),
        keeps_beginning=_keeps_beginning(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        request_id=request.request_id or request_id,
    )


class _Choices(TypedDict):
    n: int
    num_best: int | None


def _to_max_drafts(request: pb.GenerateRequest) -> int | None:
    if not request.HasField("max_draft_tokens"):
        return None
    if request.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise _invalid(f"max_draft_tokens must be at most {MAX_DRAFT_TOKENS}", "max_draft_tokens")
    return request.max_draft_tokens


def _choices(request: pb.GenerateRequest, *, is_stream: bool) -> _Choices:
    n = request.n if request.HasField("n") else 1
    if not request.HasField("best_of"):
        return _Choices(n=n, num_best=None)
    if is_stream and request.best_of > n:
        raise _invalid("best_of cannot be streamed", "best_of")
    return _Choices(n=request.best_of, num_best=n)


_EARLY_STOPPING: dict[str, EarlyStopping] = {"false": False, "true": True, "never": "never"}


def _to_beams(search: pb.BeamSearch, *, is_stream: bool) -> BeamOptions | None:
    if not search.use_beam_search:
        return None
    if is_stream:
        raise _invalid("a beam search cannot be streamed", "use_beam_search")
    penalty = search.length_penalty if search.HasField("length_penalty") else 1.0
    if not abs(penalty) <= 10:
        raise _invalid("length_penalty must be in [-10, 10]", "length_penalty")
    stopping = search.early_stopping if search.HasField("early_stopping") else "false"
    if stopping not in _EARLY_STOPPING:
        raise _invalid(f"early_stopping is one of {', '.join(_EARLY_STOPPING)}", "early_stopping")
    return BeamOptions(penalty, _EARLY_STOPPING[stopping])


def _to_repetition(sampling: pb.SamplingParams) -> RepetitionDetection | None:
    given = sampling.repetition_detection
    if given.max_pattern_size == 0:
        return None
    return RepetitionDetection(
        given.max_pattern_size, max(1, given.min_pattern_size), given.min_count
    )


def _keeps_beginning(
    request: pb.EmbedRequest | pb.GenerateRequest | pb.ScoreRequest,
) -> bool | None:
    if not request.HasField("truncation_side"):
        return None
    side = request.truncation_side
    if side not in ("left", "right"):
        raise _invalid("truncation_side is left or right", "truncation_side")
    return side == "right"


def _to_input(given: pb.EmbedInput) -> Prompt:
    kind = given.WhichOneof("prompt")
    if kind == "text" and given.text.suffix:
        raise _invalid("suffix is for what is written, not for vectors", "suffix")
    if kind == "text":
        return _to_text(given.text)
    if kind == "token_ids":
        return TokenPrompt(given.token_ids.ids)
    raise _invalid("an input is a text or token ids", "input")


def _to_text(text: pb.Text) -> EncodeText:
    return EncodeText(
        text.text,
        add_special_tokens=_or_true(text, "add_special_tokens"),
        parse_special_tokens=_or_true(text, "parse_special_tokens"),
        suffix=text.suffix,
    )


def _to_constraint(request: pb.GenerateRequest) -> NamedConstraint | None:
    kind = request.WhichOneof("constraint")
    constraint: Constraint
    if kind is None:
        return None
    if kind == "json_schema":
        schema = request.json_schema
        constraint = JsonSchema(schema.schema, is_lenient=not _or_true(schema, "strict"))
    elif kind == "json_object":
        if not request.json_object:
            raise _invalid("json_object can only be true; leave it out", "json_object")
        constraint = JSON_OBJECT
    elif kind == "choice":
        constraint = Choices(tuple(request.choice.texts))
    else:
        constraint = Regex(request.regex) if kind == "regex" else Lark(request.grammar)
    return NamedConstraint(constraint, kind)


def to_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, limits: Limits) -> Prompt:
    """Raises ApiError if there is none or its messages are malformed."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return _to_text(request.text)
    if kind == "chat":
        return to_chat_prompt(request.chat, limits)
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        return TokenPrompt(request.token_ids.ids)
    raise _invalid("a prompt is required", "prompt")


def _to_sampling(request: pb.GenerateRequest, *, is_scoring_only: bool) -> SamplingParams:
    sampling = request.sampling
    fields: dict[str, Any] = {
        name: getattr(sampling, name) for name in _PLAIN_FIELDS if sampling.HasField(name)
    }
    if is_scoring_only:
        fields["max_tokens"] = 1
    if request.echo and "logprobs" in fields:
        fields["prompt_logprobs"] = max(fields["logprobs"], fields.get("prompt_logprobs", 0))
    if sampling.HasField("seed"):
        if abs(sampling.seed) > MAX_SEED:
            raise _invalid("seed must be a 64-bit integer above the smallest one", "seed")
        fields["seed"] = sampling.seed
    if sampling.logprob_token_ids:
        fields.setdefault("logprobs", 0)
    return SamplingParams(
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprob_token_ids=distinct(sampling.logprob_token_ids),
        allowed_token_ids=distinct(sampling.allowed_token_ids),
        **fields,
    )


def _or_true(message: Message, name: str) -> bool:
    """An optional bool whose default is true."""
    return not message.HasField(name) or bool(getattr(message, name))


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
