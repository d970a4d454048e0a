"""One request inside the scheduler: its tokens, its limits and where it stands.

Knows nothing of pages: what a slot has is slot_pages.py.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from workers.adapters.ref import AdapterRef
from workers.constraints.matcher import TokenMatcher
from workers.engine.logprobs import PackedLogprobs
from workers.engine.media import MediaSpan
from workers.engine.protocol import FinishReason
from workers.kv_cache.radix_node import IntArray
from workers.pooling.params import Pooling, PoolingParams
from workers.pooling.vectors import PooledParts
from workers.sampling.params import SamplingParams
from workers.scheduler.content_keys import KeyRun, with_keys
from workers.scheduler.encoder_read import EncoderRead

NO_SLOT = -1

SortKey = tuple[int, bool, int]


@dataclass(slots=True, eq=False)
class Request:
    """Compared by identity: a request id may live again after its request ended.

    buffer[:num_tokens] int32 are the prompt and the output that the host knows. max_total_len:
    prompt plus the most output there can be. arrival: order of submission, kept over retractions.
    is_resumed: it came with output of another engine; whoever reads it has been waiting since.
    max_draft_tokens: of a step.
    prefill_len: tokens that this tenancy of the slot computes before it decodes.
    num_vouched_tokens: how many tokens' keys and values in the pool are known to be numbers,
    because a final state or logits that were computed from all of them are. has_nan: a state of its
    prompt is no number, and later tokens may not have seen that. encoder: what the encoder reads,
    where the model has one. content: where tokens stand for what is no text. media: what the model
    is given in their places, until the request ends: it may have to come again. adapter: what is
    added to the model for the request.
    """

    request_id: str
    sampling: SamplingParams
    priority: int
    cache_salt: str
    buffer: IntArray
    num_tokens: int
    num_prompt_tokens: int
    max_total_len: int
    stop_ids: frozenset[int]
    seed: int
    arrival: int
    submitted_s: float
    is_resumed: bool = False
    max_draft_tokens: int = 0
    encoder: EncoderRead | None = None
    content: tuple[KeyRun, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    adapter: AdapterRef | None = None
    slot: int = NO_SLOT
    prefill_len: int = 0
    num_vouched_tokens: int = 0
    has_nan: bool = False
    is_ended: bool = False
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[PackedLogprobs] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_queued_tokens(self) -> int:
        """What it wants computed when it comes out of the queue, cached or not."""
        return self.num_tokens + (0 if self.encoder is None else self.encoder.num_tokens)

    @property
    def num_media_bytes(self) -> int:
        items = {span.item.digest: span.item for span in self.media}
        return sum(len(item.values) for item in items.values())

    @property
    def sort_key(self) -> SortKey:
        """The smaller runs first; total, because no two arrivals are equal."""
        return self.priority, not self.is_resumed, self.arrival

    @property
    def known_tokens(self) -> IntArray:
        """Prompt and output so far, int32 (num_tokens,); a view that later tokens do not change."""
        return self.buffer[: self.num_tokens]

    def cache_keys(self, num_tokens: int) -> IntArray:
        """What the prefix cache knows the first num_tokens known tokens by, int32 (num_tokens,)."""
        token_ids = self.buffer[:num_tokens]
        return with_keys(token_ids, self.content) if self.content else token_ids

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities are asked for and not delivered yet."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether final states of all prompt tokens are wanted, so that no prefix may be found."""
        return self.wants_prompt_logprobs

    def append(self, token_id: int) -> None:
        n = self.num_tokens
        if n == len(self.buffer):
            grown = np.empty(min(max(2 * n, 16), self.max_total_len), dtype=np.int32)
            grown[:n] = self.buffer
            self.buffer = grown
        self.buffer[n] = token_id
        self.num_tokens = n + 1

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Whether token_id, just appended, is the last one."""
        if token_id in self.stop_ids and self.num_output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_len:
            return FinishReason.LENGTH
        return None

    @property
    def is_constrained(self) -> bool:
        return False

    @property
    def is_pooled(self) -> bool:
        """Whether it ends with its prompt, by a vector, and samples nothing."""
        return False

    def forget_progress(self) -> None:
        """Back to the queue: every known token will be brought into the pool again."""
        self.slot = NO_SLOT
        self.prefill_len = 0
        self.num_vouched_tokens = 0
        self.has_nan = False
        if self.num_output_tokens == 0:
            self.prompt_logprobs.clear()


@dataclass(slots=True, eq=False)
class ConstrainedRequest(Request):
    """A request whose output obeys a grammar, and ends when that allows no more.

    forced: tokens that must follow the known ones, in order, which the matcher has gone past.
    """

    matcher: TokenMatcher = field(kw_only=True)
    forced: deque[int] = field(default_factory=deque)
    failure: str = ""

    @property
    def is_constrained(self) -> bool:
        return True

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """ERROR where the grammar can be followed no further, which may have shown when the mask
        was made: matcher.failure says why."""
        if not self.forced and self._has_failed():
            return FinishReason.ERROR
        reason = Request.finish_reason_after(self, token_id)
        if reason is FinishReason.STOP:
            return reason
        if not self._go_on(token_id):
            return FinishReason.ERROR
        if self.forced or self.matcher.failure or not self.matcher.is_complete:
            return reason
        return FinishReason.STOP

    def known_token(self, position: int) -> int | None:
        """What stands there, None where that is known to the device at most."""
        if position < self.num_tokens:
            return int(self.buffer[position])
        return self.forced_token(position)

    def forced_token(self, position: int) -> int | None:
        """What must stand there, None where the matcher's masks say it."""
        ahead = position - self.num_tokens
        return self.forced[ahead] if ahead < len(self.forced) else None

    def look_ahead(self, token_id: int) -> None:
        """The mask of the next token allows token_id alone: find out what must follow. Not of a
        request with drafts, whose length may be in doubt."""
        if not (self.sampling.depends_on_output or self.max_draft_tokens):
            self.forced.extend(self.matcher.take_forced(token_id))

    def _go_on(self, token_id: int) -> bool:
        if not self.forced:
            self.matcher.consume(token_id)
            return not self._has_failed()
        expected = self.forced.popleft()
        if token_id != expected:
            self.failure = f"token {expected} must follow, and {token_id} was sampled"
        # A failure of the matcher is of a token behind the forced ones.
        return not self.failure

    def _has_failed(self) -> bool:
        self.failure = self.failure or self.matcher.failure
        return bool(self.failure)


@dataclass(slots=True, eq=False)
class PooledRequest(Request):
    """A request whose result is a vector. Its longest length is its prompt's: it never decodes.

    parts: of the vector, from steps that have been committed.
    """

    pooling: PoolingParams = field(kw_only=True)
    parts: PooledParts = field(init=False)

    def __post_init__(self) -> None:
        self.parts = PooledParts(self.pooling)

    @property
    def is_pooled(self) -> bool:
        return True

    @property
    def needs_whole_prompt(self) -> bool:
        return self.pooling.method is Pooling.MEAN

    def forget_progress(self) -> None:
        Request.forget_progress(self)
        self.parts.clear()
