"""POST /v1/embeddings: the request, what it means to the handler, and its answer."""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, Self, TypeVar

from msgspec import Struct
from pydantic import model_validator

from service.api.openai.json_parts import MAX_VALUES, JsonParts
from service.api.openai.parameters import PositiveInt32
from service.api.openai.pooled import PooledParameters
from service.api.openai.prompts import PromptValue, prompts_of
from service.api.openai.wire import PromptTokensDetails
from service.errors import ApiError, ApiErrorCode
from service.handler.collect import ChoiceResult
from service.handler.embedding import embedding_request
from service.handler.events import Usage
from service.handler.generation import GenerationInfo
from service.handler.requests import EmbeddingOptions, GenerationRequest
from service.tokenizer.jobs import EncodeText
from workers.pooling.vectors import unpack_vector


class EmbeddingRequest(PooledParameters):
    """input: a text, texts, token ids, or lists of token ids. None means the default.

    dimensions: keep that many values of each vector, from its beginning. encoding_format: base64 is
    of float32, little-endian. The others are vLLM's: normalize (on by default; its newer name is
    use_activation) divides what is kept by its length; embed_dtype is float32; add_special_tokens
    and parse_special_tokens as for completions.
    """

    input: PromptValue
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt32 | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _says_once_whether_to_normalise(self) -> Self:
        if None not in (self.normalize, self.use_activation) and (
            self.normalize is not self.use_activation
        ):
            message = "normalize and use_activation are two names of one parameter"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "use_activation")
        return self

    def to_generation_request(self, request_id: str) -> GenerationRequest:
        """request_id: of the call, for a body without one of its own."""
        is_normalised = False not in (self.normalize, self.use_activation)
        return embedding_request(
            prompts_of(self.input, self._text),
            EmbeddingOptions(self.dimensions, is_normalised, self._task),
            **self.common_fields(request_id),
        )

    @property
    def _task(self) -> Literal["embed", "classify"] | None:
        return "embed"

    def _text(self, text: str) -> EncodeText:
        return EncodeText(
            text,
            add_special_tokens=self.add_special_tokens is not False,
            parse_special_tokens=self.parse_special_tokens is not False,
        )


class EmbeddingBody(Struct, frozen=True):
    """embedding: its values, or them as base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> Self:
        cached = PromptTokensDetails(usage.num_cached_tokens)
        return cls(usage.num_prompt_tokens, usage.num_total_tokens, cached)


V = TypeVar("V", bound=Struct)


class VectorList(Struct, Generic[V], frozen=True):
    """id: vLLM's; embd- or pool- and the request's."""

    id: str
    created: int
    model: str
    data: list[V]
    usage: EmbeddingUsage
    object: str = "list"


def embeddings_body(
    request: EmbeddingRequest, info: GenerationInfo, results: Sequence[ChoiceResult], usage: Usage
) -> Iterator[bytes]:
    """Pieces of a VectorList, in the inputs' order."""
    return vectors_body("embd", EmbeddingBody, request, info, results, usage)


def vectors_body(
    prefix: str,
    made: Callable[[int, list[float] | str], Struct],
    request: EmbeddingRequest,
    info: GenerationInfo,
    results: Sequence[ChoiceResult],
    usage: Usage,
) -> Iterator[bytes]:
    """made: of an index and of the values of a vector, as they were asked for."""
    parts = JsonParts()
    of = _encoded if request.encoding_format == "base64" else _listed
    num_values = max(len(result.embedding) // 4 for result in results)
    data = parts.array(
        results,
        lambda some: [made(one.index, of(one.embedding)) for one in some],
        max(1, MAX_VALUES // num_values),
    )
    told = EmbeddingUsage.of(usage)
    body: VectorList[Struct] = VectorList(
        f"{prefix}-{info.request_id}", info.created_s, info.model, data, told
    )
    return parts.pieces(body)


def _listed(embedding: bytes) -> list[float]:
    values: list[float] = unpack_vector(embedding).tolist()
    return values


def _encoded(embedding: bytes) -> str:
    return base64.b64encode(embedding).decode("ascii")
