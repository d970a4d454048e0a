"""Pairs of texts that are scored: what the handler is asked for, and scores of what it gives."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from service.errors import ApiError, ApiErrorCode
from service.handler.collect import ChoiceResult
from service.handler.embedding import RequestFields, embedding_request
from service.handler.requests import EmbeddingOptions, GenerationRequest
from service.tokenizer.jobs import EncodeText, EncodeTexts
from workers.engine.protocol import ModelInfo
from workers.pooling.params import Pooling
from workers.pooling.vectors import FloatArray, unpack_vector

_PAIRS_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """One text of a side goes with each of the other's, as many as those with theirs, in order.

    param: what clients call the second side.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    param: str

    def check(self) -> None:
        """Raise ApiError where the sides do not go together."""
        sizes = {len(self.first), len(self.second)} - {1}
        if len(sizes) > 1 or 0 in sizes:
            message = (
                f"{len(self.first)} and {len(self.second)} texts cannot be scored: one side has to "
                "be one text, or both as many"
            )
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, self.param)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Which text of each side."""
        num_pairs = max(len(self.first), len(self.second))
        return [
            (min(i, len(self.first) - 1), min(i, len(self.second) - 1)) for i in range(num_pairs)
        ]


def scoring_request(
    texts: ScoredTexts,
    info: ModelInfo,
    *,
    is_activated: bool,
    **fields: Unpack[RequestFields],
) -> GenerationRequest:
    """Of a model that gives vectors every text becomes one; of a classifier every pair a score,
    which is_activated makes of its logit. Raises ApiError."""
    texts.check()
    if not _scores_pairs(info):
        prompts = tuple(map(EncodeText, (*texts.first, *texts.second)))
        return embedding_request(prompts, EmbeddingOptions(), **fields)
    pairs = tuple(
        EncodeTexts([texts.first[first], texts.second[second]]) for first, second in texts.pairs
    )
    options = EmbeddingOptions(is_normalised=is_activated, task="classify")
    return embedding_request(pairs, options, **fields)


def _scores_pairs(info: ModelInfo) -> bool:
    """Raises ApiError for a classifier whose answer is more than a score."""
    own = info.embedding
    if own is None or own.pooling is not Pooling.SCORES:
        return False
    if own.size != 1:
        message = (
            f"this model gives {own.size} scores of a text and not one; /pooling has all of them"
        )
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "model")
    return True


async def scores_of(
    texts: ScoredTexts, info: ModelInfo, results: Sequence[ChoiceResult]
) -> list[float]:
    """Of each pair, of the results of its scoring_request."""
    if not _scores_pairs(info):
        return await cosines(texts, results)
    return [float(unpack_vector(result.embedding)[0]) for result in results]


async def cosines(texts: ScoredTexts, results: Sequence[ChoiceResult]) -> list[float]:
    """Of each pair, in [-1, 1]. results: unit vectors of both sides' texts, in order."""
    num_first = len(texts.first)
    scores = []
    for first, second in texts.pairs:
        one, other = results[first].embedding, results[num_first + second].embedding
        scores.append(_cosine(unpack_vector(one), unpack_vector(other)))
        if len(scores) % _PAIRS_PER_TURN == 0:
            await asyncio.sleep(0)
    return scores


def _cosine(one: FloatArray, other: FloatArray) -> float:
    return max(-1.0, min(1.0, float(np.dot(one, other))))
