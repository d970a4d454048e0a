"""Parameters that both generation endpoints share, and how each one is honoured or refused.

Fields of a model are honoured. Names in HARMLESS are accepted with the values listed, because those
ask for nothing, and refused with `unsupported_parameter` otherwise; every other name is refused
with `unknown_parameter`.
"""

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from service.api.lifted_lists import LiftedLists
from service.errors import ApiError, ApiErrorCode
from service.handler.beams import BeamOptions
from service.handler.repetition import RepetitionDetection
from workers.sampling.params import MAX_SEED
from workers.speculation.config import MAX_DRAFT_TOKENS

INT32_MAX = 2**31 - 1
MAX_OBJECT_FIELDS = 1024


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""1.0 is 1: some languages know no other numbers."""
Seed = Annotated[Whole, Field(ge=-MAX_SEED, le=MAX_SEED)]
Int32 = Annotated[Whole, Field(ge=-INT32_MAX, le=INT32_MAX)]
PositiveInt32 = Annotated[Whole, Field(ge=1, le=INT32_MAX)]
Count = Annotated[Whole, Field(ge=0, le=INT32_MAX)]
Speculative = bool | Annotated[Whole, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None
"""Of a request: false, or the most drafts of a step that are verified for it."""
TokenId = Annotated[Whole, Field(ge=0, le=INT32_MAX)]
TokenIdList = Annotated[list[TokenId], Field(fail_fast=True)]
TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_UNION_TAGS = ("str", "int", "float", "bool")

# What is not built, or means nothing there (docs/api.md says why): the values that ask for nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "ec_transfer_params": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "media_io_kwargs": (None, {}),
    "mm_payload": (None,),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "reasoning_effort": (None, "none"),
    "return_mm_kwargs": (None, False),
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False),
    "return_weight_versions": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "store": (None, False),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "watermarking": (None,),
    "web_search_options": (None,),
}


class StrictModel(BaseModel):
    """No coercion, no unknown names, no NaN or infinity, and no flood of anything.

    A body of megabytes must not become a million validation errors: lists stop at their first
    misfit and objects are measured before they are read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_floods(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for one in (data, *data.values()):
                if isinstance(one, dict) and len(one) > MAX_OBJECT_FIELDS:
                    raise ApiError(
                        ApiErrorCode.LIMIT_EXCEEDED,
                        f"an object may have at most {MAX_OBJECT_FIELDS} fields",
                    )
        return data


class LenientModel(StrictModel):
    """harmless: values that ask for nothing, of names that are not fields. prefix: before names in
    messages."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        return without_harmless(data, cls.harmless, cls.prefix, cls.model_fields)


class StreamOptions(StrictModel):
    """include_usage: a last chunk with usage. continuous_usage_stats: usage in every chunk.

    include_obfuscation: chunks are never padded here, so only false can be had.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionParameters(StrictModel):
    """A choice ends with finish_reason "repetition" once its last tokens are min_count times the
    same min_pattern_size to max_pattern_size ones. max_pattern_size 0: never."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0

    def to_detection(self) -> RepetitionDetection | None:
        if self.max_pattern_size == 0:
            return None
        return RepetitionDetection(
            self.max_pattern_size, max(1, self.min_pattern_size), self.min_count
        )


class SamplingFields(LenientModel):
    """Those that OpenAI, vLLM and SGLang call the same."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIdList | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    n: Whole | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_biases(self) -> dict[int, float]:
        """Raises ApiError unless every key is a token id in decimal."""
        given = self.logit_bias or {}
        if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in given):
            raise _invalid("logit_bias keys must be token ids", f"{self.prefix}logit_bias")
        return {int(key): bias for key, bias in given.items()}


class GenerationParameters(SamplingFields):
    """Shared by /v1/completions and /v1/chat/completions. None means the default.

    model: may be left out where only one can be meant.
    Sampling: as workers.sampling.params. user, safety_identifier and metadata are information for
    the operator and change nothing. session_id, or else prompt_cache_key, keeps requests together
    at one replica where no session header does. service_tier may ask for the only tier there is.
    spaces_between_special_tokens has no effect on fast tokenizers, which never put any there.
    priority: lower runs first. cache_salt: cached prefixes are shared only with requests of the
    same salt. request_id: becomes part of the response's id. truncate_prompt_tokens: -1 keeps what
    there is room for. return_tokens_as_token_ids: tokens of log probabilities are "token_id:7".
    best_of: so many choices are made of each prompt, and the n likeliest returned; not streamed.
    stream_interval: tokens between two chunks of a choice. allowed_token_ids: no other token is
    sampled. use_beam_search: choices are the n best beams, as length_penalty and early_stopping
    say; not streamed. bad_words: texts that are not said, as sequences of tokens.
    logprob_token_ids: log probabilities of these tokens instead of the likeliest ones. speculative:
    false, or the most drafts of a step that are verified for it; texts are the same.
    """

    harmless = HARMLESS

    model: str | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None

    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Count | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    allowed_token_ids: TokenIdList | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    logprob_token_ids: TokenIdList | None = None
    best_of: Whole | None = None
    repetition_detection: RepetitionParameters | None = None
    stream_interval: PositiveInt32 | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    speculative: Speculative = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options needs stream: true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise _unsupported("stream_options.include_obfuscation")
        if self.service_tier not in (None, "auto", "default"):
            raise _unsupported("service_tier")
        if self.stream and self.prompt_logprobs is not None:
            raise _invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise _invalid("best_of cannot be streamed", "best_of")
        return self

    @model_validator(mode="after")
    def _refuse_what_no_search_has(self) -> Self:
        if self.stream and self.use_beam_search:
            raise _invalid("a beam search cannot be streamed", "use_beam_search")
        if not self.use_beam_search:
            # 1 and false, which some clients always send, ask for nothing.
            if self.length_penalty not in (None, 1.0):
                raise _invalid("length_penalty needs use_beam_search: true", "length_penalty")
            if self.early_stopping:
                raise _invalid("early_stopping needs use_beam_search: true", "early_stopping")
        if self.length_penalty is not None and abs(self.length_penalty) > 10:
            raise _invalid("length_penalty must be in [-10, 10]", "length_penalty")
        return self

    @property
    def beams(self) -> BeamOptions | None:
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamOptions(penalty, self.early_stopping or False)


def max_draft_tokens(speculative: bool | int | None) -> int | None:
    """None: as many as the server's engine verifies."""
    if speculative is None or isinstance(speculative, bool):
        return 0 if speculative is False else None
    return speculative


def token_ids_or(value: Any, lifted: LiftedLists | None) -> Any:
    """What was taken out of the body for its length, if that is what the value is a name of.

    Raises ValueError if it is a list of anything but integers.
    """
    if lifted is None or not lifted.is_name(value):
        return value
    token_ids = lifted.take(value)
    if token_ids is None:
        raise ValueError("a list of numbers must be of integers")
    return token_ids


def is_list_of(value: Any, kind: type) -> bool:
    """Whether `value` is a list, maybe empty, of exactly that type (so no bool is an int)."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}


def is_harmless(
    name: str, value: Any, table: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> bool:
    """Whether the value asks for nothing. Raises ApiError if it asks for what is not built.

    table: of such values. prefix: of the object that the name stands in, for the message.
    """
    if name not in table:
        return False
    if any(value == allowed and type(value) is type(allowed) for allowed in table[name]):
        return True
    raise _unsupported(prefix + name)


def without_harmless(
    data: Any, table: Mapping[str, tuple[Any, ...]], prefix: str, fields: Container[str] = ()
) -> Any:
    """An object without what is_harmless(), except its fields."""
    # Most objects have none of these names, and there are thousands in a body.
    if not isinstance(data, dict) or table.keys().isdisjoint(data):
        return data
    return {
        name: value
        for name, value in data.items()
        if name in fields or not is_harmless(name, value, table, prefix)
    }


def _unsupported(param: str) -> ApiError:
    return ApiError(
        ApiErrorCode.UNSUPPORTED_PARAMETER, f"{param} with this value is not supported", param
    )


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first problem of a request body, with the place where it is."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Locations inside a union also name the alternative tried, such as list[str].
    parts = [str(part) for part in problem["loc"] if part not in _UNION_TAGS]
    param = ".".join(part for part in parts if "[" not in part)[:256] or None
    if problem["type"] == "json_invalid":
        why = problem["msg"].removeprefix("Invalid JSON: ")
        return ApiError(ApiErrorCode.INVALID_JSON, f"the body is not JSON: {why}")
    if problem["type"] == "extra_forbidden":
        return ApiError(ApiErrorCode.UNKNOWN_PARAMETER, f"unknown parameter {param}", param)
    why = problem["msg"].removeprefix("Value error, ")
    message = why if param is None else f"{param}: {why}"
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
