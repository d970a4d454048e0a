"""What waits for a step, in order, and what is refused at the door.

A text has all of its tokens in one step and leaves nothing behind it, so that there is no memory to
account for: whoever waits is all that there is. Knows no tensors and no clock.
"""

from bisect import bisect_left, insort

import numpy as np

from workers.encoder_only.text import Text
from workers.engine.protocol import GenerateRequest, ModelInfo
from workers.errors import ErrorCode, IntegrityError, RequestRejectedError, id_in_use
from workers.kv_cache.radix_node import IntArray
from workers.pooling.params import EmbeddingInfo, Pooling


def _sort_key(text: Text) -> tuple[int, int]:
    return text.sort_key


class TextQueue:
    """Ordered by (priority, arrival).

    max_step_tokens: of texts that share a step; a longer one has a step of its own, as an encoder
    cannot be cut. max_step_texts: of one step.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        max_step_tokens: int,
        max_step_texts: int,
        max_texts: int,
        max_tokens: int,
    ) -> None:
        self._info = info
        self._max_step_tokens = max_step_tokens
        self._max_step_texts = max_step_texts
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._order: list[Text] = []
        self._by_id: dict[str, Text] = {}
        self._num_tokens = 0
        self._num_accepted = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def push(self, request: GenerateRequest, now_s: float) -> None:
        """Raises RequestRejectedError; then nothing was kept of it."""
        if request.request_id in self._by_id:
            raise id_in_use(request.request_id)
        pooling = request.pooling
        _check_kind(request)
        if pooling is None:
            raise _refused("this model is an encoder and generates no text", "model")
        _check_pooling(request, self._info.embedding)
        self._check_room(len(request.prompt_token_ids))
        text = Text(
            request_id=request.request_id,
            token_ids=self._checked_tokens(request.prompt_token_ids),
            second_start=request.second_text_start,
            pooling=pooling,
            priority=request.priority,
            arrival=self._num_accepted,
            submitted_s=now_s,
        )
        self._num_accepted += 1
        insort(self._order, text, key=_sort_key)
        self._by_id[text.request_id] = text
        self._num_tokens += len(text.token_ids)

    def remove(self, request_id: str) -> bool:
        """False where no such text waits."""
        text = self._by_id.pop(request_id, None)
        if text is None:
            return False
        del self._order[bisect_left(self._order, text.sort_key, key=_sort_key)]
        self._num_tokens -= len(text.token_ids)
        return True

    def take(self) -> list[Text]:
        """The next step's texts, which wait no more; none where nothing waits."""
        num_taken, num_tokens = 0, 0
        for text in self._order[: self._max_step_texts]:
            num_tokens += len(text.token_ids)
            if num_taken and num_tokens > self._max_step_tokens:
                break
            num_taken += 1
        taken, self._order = self._order[:num_taken], self._order[num_taken:]
        for text in taken:
            del self._by_id[text.request_id]
            self._num_tokens -= len(text.token_ids)
        return taken

    def check_integrity(self) -> None:
        """Raise IntegrityError unless texts, ids and their tokens fit together."""
        num_tokens = sum(len(text.token_ids) for text in self._order)
        if num_tokens != self._num_tokens or len(self._by_id) != len(self._order):
            raise IntegrityError(
                f"{len(self._order)} texts of {num_tokens} tokens wait, {len(self._by_id)} of "
                f"{self._num_tokens} are counted"
            )

    def _check_room(self, num_tokens: int) -> None:
        """An empty queue takes any text that the model takes."""
        longest = self._info.max_context_len
        if num_tokens > longest:
            raise RequestRejectedError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the text has {num_tokens} tokens and this model's context is {longest} tokens",
                "prompt",
            )
        if len(self) >= self._max_texts:
            raise RequestRejectedError(
                ErrorCode.QUEUE_FULL, f"{len(self)} requests are waiting already"
            )
        if len(self) and self._num_tokens + num_tokens > self._max_tokens:
            raise RequestRejectedError(
                ErrorCode.QUEUE_FULL,
                f"{self._num_tokens} tokens are waiting already, the queue takes "
                f"{self._max_tokens}",
            )

    def _checked_tokens(self, token_ids: list[int]) -> IntArray:
        if not token_ids:
            raise _refused("the prompt must have at least one token", "prompt")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._info.vocab_size:
            wrong = low if low < 0 else high
            raise _refused(f"token id {wrong} is not in [0, {self._info.vocab_size})", "prompt")
        return np.array(token_ids, dtype=np.int32)


def _refused(message: str, param: str) -> RequestRejectedError:
    return RequestRejectedError(ErrorCode.INVALID_REQUEST, message, param)


def _check_kind(request: GenerateRequest) -> None:
    for param, is_asked in (
        ("grammar", bool(request.grammar)),
        ("resumed_token_ids", bool(request.resumed_token_ids)),
        ("prompt_logprobs", request.sampling.prompt_logprobs is not None),
        ("encoder_input", request.encoder_input is not None),
        ("media", bool(request.media or request.content_spans)),
    ):
        if is_asked:
            raise _refused(f"this model is an encoder: a request for it has no {param}", param)
    if not 0 <= request.second_text_start <= max(0, len(request.prompt_token_ids) - 1):
        raise _refused("the second text begins outside of the prompt", "second_text_start")


def _check_pooling(request: GenerateRequest, own: EmbeddingInfo | None) -> None:
    pooling = request.pooling
    if pooling is None or own is None:
        return
    pooling.validate(own.size)
    if pooling.method is not own.pooling:
        raise _refused(f"this model is pooled by {own.pooling}, not by {pooling.method}", "pooling")
    if own.pooling is Pooling.SCORES and pooling.dimensions is not None:
        raise _refused("scores have no dimensions to leave out", "dimensions")
