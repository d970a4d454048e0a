"""POST /v1/embeddings: the request, what it means to the handler, and its answer."""

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from service.api.openai.json_parts import MAX_VALUES, JsonParts
from service.api.openai.parameters import INT32_MAX, Int32, PositiveInt32, StrictModel
from service.api.openai.prompts import PromptValue, prompts_of
from service.api.openai.wire import PromptTokensDetails
from service.handler.collect import ChoiceResult
from service.handler.embedding import embedding_request
from service.handler.events import Usage
from service.handler.requests import AS_MANY_AS_FIT, EmbeddingOptions, GenerationRequest
from service.tokenizer.jobs import EncodeText
from workers.pooling.vectors import unpack_vector


class EmbeddingRequest(StrictModel):
    """input: a text, texts, token ids, or lists of token ids. None means the default.

    dimensions: keep that many values of each vector, from its beginning. encoding_format: base64 is
    of float32, little-endian. user changes nothing. The others are vLLM's: normalize (on by
    default) divides what is kept by its length; embed_dtype is float32;
    truncate_prompt_tokens keeps that many tokens of an input's end, -1 as many as the model takes;
    add_special_tokens, parse_special_tokens, priority, cache_salt and request_id as for
    completions.
    """

    input: PromptValue
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt32 | None = None
    user: str | None = None

    normalize: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=AS_MANY_AS_FIT, le=INT32_MAX)] | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def to_generation_request(self, request_id: str) -> GenerationRequest:
        """request_id: of the call, for a body without one of its own."""
        return embedding_request(
            prompts_of(self.input, self._text),
            EmbeddingOptions(self.dimensions, self.normalize is not False),
            model=self.model or "",
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            request_id=self.request_id or request_id,
        )

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


class EmbeddingList(Struct, frozen=True):
    """id: vLLM's; embd- and the request's."""

    id: str
    created: int
    model: str
    data: list[EmbeddingBody]
    usage: EmbeddingUsage
    object: str = "list"


def embeddings_body(
    request: EmbeddingRequest,
    request_id: str,
    created_s: int,
    model: str,
    results: Sequence[ChoiceResult],
    usage: Usage,
) -> Iterator[bytes]:
    """Pieces of an EmbeddingList, in the inputs' order."""
    of = _encoded if request.encoding_format == "base64" else _listed
    parts = JsonParts()
    num_values = max(len(result.embedding) // 4 for result in results)
    data = parts.array(
        results,
        lambda some: [EmbeddingBody(one.index, of(one.embedding)) for one in some],
        max(1, MAX_VALUES // num_values),
    )
    cached = PromptTokensDetails(usage.num_cached_tokens)
    told = EmbeddingUsage(usage.num_prompt_tokens, usage.num_total_tokens, cached)
    return parts.pieces(EmbeddingList(f"embd-{request_id}", created_s, model, data, told))


def _listed(embedding: bytes) -> list[float]:
    values: list[float] = unpack_vector(embedding).tolist()
    return values


def _encoded(embedding: bytes) -> str:
    return base64.b64encode(embedding).decode("ascii")
