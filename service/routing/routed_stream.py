"""The outputs of one routed request, buffered between the channel and its reader.

Whichever replica has the request, the reader gets one stream: what came so far stays, and what
comes next continues it. Knows neither sockets nor replicas: the owner sends, moves and aborts.
"""

import asyncio
import time
from array import array
from collections import deque
from typing import Protocol, Self

from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from service.routing.merged_outputs import take_merged
from service.routing.policy import RoutingReason
from service.routing.resumption import resumed
from service.routing.session import make_session_key
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ErrorCode

# What a replica answers that has done nothing more for the request: another one may take it.
_MOVE_REASONS = {
    ErrorCode.QUEUE_FULL: RoutingReason.REFUSED,
    ErrorCode.ENGINE_DRAINING: RoutingReason.DRAIN,
    ErrorCode.ENGINE_FAILED: RoutingReason.LOST,
    ErrorCode.ENGINE_SLEEPING: RoutingReason.SLEEP,
}
_OUTPUT_BYTES = 96
_TOKEN_BYTES = 36
_TOP_LOGPROB_BYTES = 72


class StreamOwner(Protocol):
    """Who routes a stream."""

    def move(self, stream: "RoutedStream", *, is_replica_lost: bool) -> None:
        """Send next_attempt() to another replica: the stream's own has its request no longer.

        is_replica_lost: it is gone; otherwise it has said that it does nothing more for it. If none
        takes it now it waits for one, and fail() tells when it has waited long enough.
        Raises ApiError if it is not to be sent again.
        """

    def abort(self, stream: "RoutedStream") -> None:
        """End the request wherever it is."""

    def on_answer(self, stream: "RoutedStream") -> None:
        """The replica that has the request has begun to answer: once an attempt, before on_end."""

    def on_end(self, stream: "RoutedStream", engine_s: float | None) -> None:
        """Called exactly once. engine_s: see OutputSink.deliver; None if cut short."""


class RoutedStream:
    """Implements TokenStream for the reader and OutputSink for the channel.

    attempt: what the replica was sent, under an id of its own. replica_id: "" while no replica has
    it. num_refusals: how often in a row, without an answer in between, a replica said that it does
    nothing for it. retry_s: monotonic time before which it is not sent again out of a waiting room.
    lost_s: monotonic time since which the stream has stood still because of a move; None while none
    is under way. move_reason: why its replica has the request no longer; None while every replica
    that was chosen has it.
    """

    def __init__(
        self, request: GenerateRequest, context: RequestContext, owner: StreamOwner, max_bytes: int
    ) -> None:
        self.request = self.attempt = request
        self.context = context
        self.session_key = make_session_key(
            context.caller.name, request.cache_salt, context.session
        )
        self.replica_id = ""
        self.sent_s = 0.0
        self.num_refusals = 0
        self.retry_s = 0.0
        self.move_reason: RoutingReason | None = None
        self.lost_s: float | None = None
        self._num_attempts = 0
        self._received = array("i", request.resumed_token_ids)
        self._num_received_before = len(self._received)
        self._is_answered = False
        self._is_lost = False
        self._owner = owner
        self._max_bytes = max_bytes
        self._outputs: deque[StepOutput] = deque()
        # Bytes pushed since the buffer was last empty: no less than what is unread.
        self._max_unread_bytes = 0
        self._is_ended = False
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        while not self._outputs:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return take_merged(self._outputs)

    async def aclose(self) -> None:
        if not self._is_ended:
            self._owner.abort(self)
            self._end(None, None)
        self._outputs.clear()
        self._error = None

    @property
    def id(self) -> str:
        """Of the request, whichever attempt is under way."""
        return self.request.request_id

    @property
    def has_output(self) -> bool:
        return bool(self._received)

    @property
    def is_answered(self) -> bool:
        """Whether the replica that has the request has begun to answer."""
        return self._is_answered

    @property
    def num_losses(self) -> int:
        """Lost replicas that count against its request."""
        return self.context.losses.num_replicas

    @property
    def num_tokens(self) -> int:
        """Of prompt and output so far."""
        return len(self.request.prompt_token_ids) + len(self._received)

    @property
    def num_new_tokens(self) -> int:
        """That came since the stream was last sent to a replica."""
        return len(self._received) - self._num_received_before

    @property
    def max_tokens_left(self) -> int | None:
        """Output tokens that may still come; None: up to the context's end."""
        max_tokens = self.request.sampling.max_tokens
        return None if max_tokens is None else max_tokens - len(self._received)

    def next_attempt(self) -> GenerateRequest:
        """The request as another replica is to go on with it."""
        self._num_attempts += 1
        return resumed(self.request, self._num_attempts, self._received)

    def pause(self) -> None:
        """What the stream's replica has said is all that counts of it."""
        if self.lost_s is None:
            self.lost_s = time.monotonic()

    def on_sent(self, attempt: GenerateRequest, replica_id: str) -> None:
        """What comes from now on is that replica's answer to the attempt."""
        self.attempt, self.replica_id = attempt, replica_id
        self.sent_s = time.monotonic()
        self._num_received_before = len(self._received)
        self._is_answered = False

    def deliver(self, output: StepOutput, engine_s: float | None) -> None:
        if self._is_answered and output.finish_reason is None:  # nearly every token of every stream
            self._received.fromlist(output.token_ids)
            self._push(output)
            return
        if self._is_ended:
            return
        reason = _move_reason(output)
        if reason is not None:
            self._move(reason, output)
            return
        self._mark_answered()
        self._received.fromlist(output.token_ids)
        self._push(output)
        if output.finish_reason is not None and not self._is_ended:
            self._end(None, engine_s)

    def lose(self) -> None:
        if not self._is_ended:
            self._move(RoutingReason.LOST)

    def fail(self, error: ApiError) -> None:
        """End the stream with an error unless it has ended."""
        if not self._is_ended:
            self._end(error, None)

    def refuse(self) -> None:
        message = "the request is too large to be sent to a replica"
        self._end(ApiError(ApiErrorCode.PAYLOAD_TOO_LARGE, message), None)

    def drop(self) -> None:
        self.fail(ApiError(ApiErrorCode.INTERNAL, "the request cannot be sent to a replica"))

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def _move(self, reason: RoutingReason, answer: StepOutput | None = None) -> None:
        """answer: the replica's own, which stands if nobody else takes a request without output;
        None if the replica is lost."""
        if not self._is_lost:
            # A hand-over's pause is no part of what may be waited from a loss on.
            self._is_lost, self.lost_s = True, None
        self._is_answered = False
        self.move_reason = reason
        self.pause()
        if answer is not None:
            self.num_refusals += 1
        try:
            self._owner.move(self, is_replica_lost=answer is None)
        except ApiError as error:
            if answer is None or self.has_output:
                self._end(error, None)
            else:
                self._push(answer)
                self._end(None, None)

    def _mark_answered(self) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._owner.on_answer(self)
            self._is_lost, self.num_refusals, self.lost_s = False, 0, None

    def _push(self, output: StepOutput) -> None:
        outputs = self._outputs
        if not outputs:
            self._max_unread_bytes = 0
        outputs.append(output)
        if output.logprobs is None and output.prompt_logprobs is None:
            self._max_unread_bytes += _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
        else:
            self._max_unread_bytes += _size_bytes(output)
        if self._max_unread_bytes > self._max_bytes:
            self._check_unread()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _check_unread(self) -> None:
        """The cheap bound was reached: count what is really unread, one huge output excepted."""
        self._max_unread_bytes = sum(map(_size_bytes, self._outputs))
        if self._max_unread_bytes > self._max_bytes and len(self._outputs) > 1:
            self._owner.abort(self)
            self._end(ApiError(ApiErrorCode.TIMEOUT, "the client reads too slowly"), None)

    def _end(self, error: ApiError | None, engine_s: float | None) -> None:
        self._is_ended, self._is_answered = True, False
        self._error = error
        self._owner.on_end(self, engine_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _move_reason(output: StepOutput) -> RoutingReason | None:
    if output.finish_reason is FinishReason.ABORT:  # nobody here has asked for it
        return RoutingReason.LOST
    return None if output.error is None else _MOVE_REASONS.get(output.error.code)


def _size_bytes(output: StepOutput) -> int:
    """A fair estimate of what an unread output occupies."""
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
    if output.prompt_logprobs is not None:
        packed = output.prompt_logprobs
        size += len(packed.logprobs) + len(packed.ranks) + 2 * len(packed.top_logprobs)
    return size + sum(
        _TOP_LOGPROB_BYTES * (1 + len(e.top_token_ids)) for e in output.logprobs or ()
    )
