"""POST /pooling, shaped as vLLM's: the rows that a model pools, embeddings or scores of labels."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from service.api.openai.embeddings import EmbeddingRequest, vectors_body
from service.handler.collect import ChoiceResult
from service.handler.events import Usage
from service.handler.generation import GenerationInfo


class PoolingRequest(EmbeddingRequest):
    """As for embeddings. task: what the rows are: "embed" vectors, "classify" a classifier's scores
    of each text, a label each; None: what the model gives."""

    task: Literal["embed", "classify"] | None = None

    @property
    def _task(self) -> Literal["embed", "classify"] | None:
        return self.task


class PooledBody(Struct, frozen=True):
    """data: the values of a vector, or them as base64."""

    index: int
    data: list[float] | str
    object: str = "pooling"


def pooling_body(
    request: PoolingRequest, info: GenerationInfo, results: Sequence[ChoiceResult], usage: Usage
) -> Iterator[bytes]:
    """Pieces of a VectorList, in the inputs' order."""
    return vectors_body("pool", PooledBody, request, info, results, usage)
