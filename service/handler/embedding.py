"""Prompts that become vectors: what may be asked, what engines are told, what comes back."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypedDict, Unpack

from msgspec import structs

from service.errors import ApiError, ApiErrorCode, from_rejection, params_named
from service.handler.choice import raise_if_failed
from service.handler.events import ChoiceDelta
from service.handler.requests import EmbeddingOptions, GenerationRequest, Prompt
from service.limits import Limits
from service.tokenizer.jobs import EncodeText
from workers.engine.protocol import ModelInfo, StepOutput
from workers.errors import RequestRejectedError
from workers.pooling.params import EmbeddingInfo, Pooling, PoolingParams
from workers.sampling.params import SamplingParams

_OF_GENERATIONS = ("prompt", "n", "max_tokens")
# Of the engine's protocol; a vector is not sampled.
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


class RequestFields(TypedDict):
    """Of GenerationRequest, those that have a meaning for embeddings too."""

    model: str
    truncate_prompt_tokens: int | None
    keeps_beginning: bool | None
    priority: int
    cache_salt: str
    request_id: str


def embedding_request(
    prompts: tuple[Prompt, ...], options: EmbeddingOptions, **fields: Unpack[RequestFields]
) -> GenerationRequest:
    return GenerationRequest(prompts, _NO_SAMPLING, embedding=options, **fields)


def naming(param: str) -> AbstractContextManager[None]:
    """What is wrong with prompts, or too much of them, is told of the parameter they came by."""
    return params_named(dict.fromkeys(_OF_GENERATIONS, param))


def check_embedding(request: GenerationRequest, limits: Limits, info: ModelInfo) -> None:
    """Raise ApiError where the model gives no such vector, or the answer would be too large."""
    if request.embedding is None:
        if info.is_encoder_only:
            message = "this model is an encoder and generates no text"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "model")
        return
    size = _of_model(info).size
    params = _params(request.embedding, _of_model(info))
    _check_task(request.embedding, params)
    try:
        params.validate(size)
    except RequestRejectedError as error:
        raise from_rejection(error) from error
    max_inputs = limits.max_embedding_values // (params.dimensions or size)
    if len(request.prompts) > max_inputs:
        message = (
            f"{len(request.prompts)} vectors of {params.dimensions or size} values are more than "
            f"{limits.max_embedding_values} values; at most {max_inputs} inputs are allowed"
        )
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "prompt")


def _check_task(options: EmbeddingOptions, params: PoolingParams) -> None:
    is_classifier = params.method is Pooling.SCORES
    if options.task == "embed" and is_classifier:
        message = "this model gives scores of texts and no embeddings"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "model")
    if options.task == "classify" and not is_classifier:
        message = "this model gives embeddings of texts and no scores"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "task")
    if is_classifier and options.dimensions is not None:
        message = "scores have no dimensions to leave out"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "dimensions")


def with_prompt(request: GenerationRequest, info: ModelInfo) -> GenerationRequest:
    """The request, each of its texts behind the prompt that the model's folder puts before all.

    Token ids stay as they are: their client has made the whole of them.
    """
    prompt = "" if request.embedding is None else _of_model(info).prompt
    if not prompt:
        return request
    prompts = tuple(
        structs.replace(one, text=prompt + one.text) if isinstance(one, EncodeText) else one
        for one in request.prompts
    )
    return replace(request, prompts=prompts)


def pooling_of(request: GenerationRequest, info: ModelInfo) -> PoolingParams | None:
    """What engines are told of a checked request; None where tokens are wanted."""
    if request.embedding is None:
        return None
    return _params(request.embedding, _of_model(info))


def _params(options: EmbeddingOptions, own: EmbeddingInfo) -> PoolingParams:
    return PoolingParams(own.pooling, options.dimensions, options.is_normalised)


def _of_model(info: ModelInfo) -> EmbeddingInfo:
    if info.embedding is None:
        message = "this model gives no embeddings"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "model")
    return info.embedding


class VectorAssembler:
    """As ChoiceAssembler, of a prompt that becomes a vector: one output, one delta."""

    num_output_tokens = 0

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: StepOutput) -> ChoiceDelta | None:
        """None for an output that says nothing yet. Raises ApiError if it says that the request
        failed."""
        raise_if_failed(output)
        if output.finish_reason is None:
            return None
        if not output.embedding:
            raise ApiError(ApiErrorCode.INTERNAL, "the engine gave no embedding")
        self.finish_reason = output.finish_reason.value
        return ChoiceDelta(self.index, finish_reason=self.finish_reason, embedding=output.embedding)
