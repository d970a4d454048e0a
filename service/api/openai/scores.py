"""POST /v1/score and /v1/rerank, shaped as vLLM's; the latter also as Cohere's and Jina's."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Self, cast

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from service.api.openai.json_parts import JsonParts
from service.api.openai.parameters import INT32_MAX, is_list_of
from service.api.openai.pooled import PooledParameters
from service.errors import ApiError, ApiErrorCode
from service.handler.events import Usage
from service.handler.generation import GenerationInfo
from service.handler.scoring import ScoredTexts

_MAX_ITEMS = 256
"""Scores, or documents with theirs, in one piece of an answer."""
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ]
}


def _check_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if is_list_of(value, str):
        return tuple(value)
    raise ValueError("must be a text or texts")


def _check_documents(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        texts = [item["text"] if _is_document(item) else item for item in value]
        if is_list_of(texts, str):
            return tuple(cast("list[str]", texts))
    raise ValueError('must be a list of texts, or of objects {"text": ...}')


def _is_document(item: Any) -> bool:
    return isinstance(item, dict) and item.keys() == {"text"}


Texts = Annotated[tuple[str, ...], PlainValidator(_check_texts), WithJsonSchema(_TEXTS)]
Documents = Annotated[
    tuple[str, ...],
    PlainValidator(_check_documents),
    WithJsonSchema({"type": "array", "items": _DOCUMENT}),
]
_SIDES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)


class ScoreRequest(PooledParameters):
    """The texts of both sides, by one of four pairs of names. One text is scored with each of the
    other side's, as many as those with theirs, in order. use_activation (on by default) makes
    scores of a classifier's logits and changes cosines in nothing.
    """

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if given not in map(set, _SIDES):
            pairs = ", ".join(f"{first} and {second}" for first, second in _SIDES)
            message = f"two sides are scored; give one of: {pairs}"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, min(given, default="queries"))
        return self

    @property
    def texts(self) -> ScoredTexts:
        """Raises ApiError where the sides do not go together."""
        first, second = next(
            pair for pair in _SIDES if all(getattr(self, name) is not None for name in pair)
        )
        return ScoredTexts(getattr(self, first), getattr(self, second), second)


class RerankRequest(PooledParameters):
    """documents: texts, or objects with a text. top_n: how many of the best are told; 0, as None:
    all. return_documents: on by default. use_activation as for scores.
    """

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None

    @property
    def texts(self) -> ScoredTexts:
        return ScoredTexts((self.query,), self.documents, "documents")


class ScoreBody(Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class ScoreList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoreBody]
    usage: ScoreUsage
    object: str = "list"


class DocumentBody(Struct, frozen=True):
    text: str


class RankedBody(Struct, frozen=True):
    """index: of the document among those of the request."""

    index: int
    relevance_score: float
    document: DocumentBody | UnsetType = UNSET


class RankedList(Struct, frozen=True):
    """results: the best first."""

    id: str
    model: str
    usage: ScoreUsage
    results: list[RankedBody]


def score_body(
    request: ScoreRequest, info: GenerationInfo, scores: Sequence[float], usage: Usage
) -> Iterator[bytes]:
    """Pieces of a ScoreList. scores: one a pair, in order."""
    parts = JsonParts()
    data = parts.array(
        list(enumerate(scores)), lambda some: [ScoreBody(*one) for one in some], _MAX_ITEMS
    )
    told = ScoreUsage(usage.num_prompt_tokens, usage.num_total_tokens)
    return parts.pieces(
        ScoreList(f"score-{info.request_id}", info.created_s, info.model, data, told)
    )


def rerank_body(
    request: RerankRequest, info: GenerationInfo, scores: Sequence[float], usage: Usage
) -> Iterator[bytes]:
    """Pieces of a RankedList. scores: one a document, in order; equal ones stay in theirs."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    parts = JsonParts()

    def ranked(index: int) -> RankedBody:
        if request.return_documents is False:
            return RankedBody(index, scores[index])
        return RankedBody(index, scores[index], DocumentBody(request.documents[index]))

    results = parts.array(
        order[: request.top_n or None], lambda some: list(map(ranked, some)), _MAX_ITEMS
    )
    told = ScoreUsage(usage.num_prompt_tokens, usage.num_total_tokens)
    return parts.pieces(RankedList(f"rerank-{info.request_id}", info.model, told, results))
