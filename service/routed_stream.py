"""The outputs of one routed request, buffered between the channel and its reader.

Knows neither sockets nor replicas: the owner submits, resubmits and aborts.
"""

import asyncio
import time
from collections import deque
from typing import Protocol, Self

from service.api.errors import ApiError, ApiErrorCode
from service.merged_outputs import take_merged
from service.request_log.record import current_record
from service.session import session_key
from workers.errors import ErrorCode
from workers.protocol import GenerateRequest, StepOutput

# A replica that answers so has done nothing for the request: another one may take it.
_RETRYABLE = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.ENGINE_DRAINING, ErrorCode.ENGINE_FAILED})
_OUTPUT_BYTES = 96
_TOKEN_BYTES = 36
_TOP_LOGPROB_BYTES = 72


class StreamOwner(Protocol):
    """Who routes a stream."""

    def resubmit(self, stream: "RoutedStream", can_wait: bool) -> None:
        """Send the stream's request to another replica.

        If none takes it now: with can_wait it waits for one and fail() tells when it has waited
        long enough; otherwise raises ApiError.
        """

    def abort(self, stream: "RoutedStream") -> None:
        """End the request at its replica."""

    def on_first_output(self, stream: "RoutedStream") -> None:
        """Called at most once, before on_end."""

    def on_end(self, stream: "RoutedStream", engine_s: float | None) -> None:
        """Called exactly once. engine_s: see OutputSink.deliver; None if cut short."""


class RoutedStream:
    """Implements TokenStream for the reader and OutputSink for the channel."""

    def __init__(self, request: GenerateRequest, owner: StreamOwner, max_bytes: int) -> None:
        self.request = request
        self.replica_id = ""
        self.submitted_s = time.monotonic()
        # A retry runs in the context of the channel, not of the request.
        self.record = current_record()
        self.session_key = session_key()
        self.has_output = False
        self._owner = owner
        self._max_bytes = max_bytes
        self._outputs: deque[StepOutput] = deque()
        # Bytes pushed since the buffer was last empty: no less than what is unread.
        self._max_unread_bytes = 0
        self._is_retried = False
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

    def deliver(self, output: StepOutput, engine_s: float | None) -> None:
        if self.has_output and output.finish_reason is None and not self._is_ended:
            self._push(output)  # nearly every token of every stream
            return
        if self._is_ended:
            return
        if self._can_retry and output.error is not None and output.error.code in _RETRYABLE:
            self._retry(output)
            return
        self._mark_first_output()
        self._push(output)
        if output.finish_reason is not None and not self._is_ended:
            self._end(None, engine_s)

    def lose(self) -> None:
        if self._is_ended:
            return
        if self._can_retry:
            self._retry(None)
        else:
            message = "the replica that served this request was lost"
            self._end(ApiError(ApiErrorCode.REPLICA_LOST, message), None)

    def fail(self, error: ApiError) -> None:
        """End the stream with an error unless it has ended."""
        if not self._is_ended:
            self._end(error, None)

    def refuse(self) -> None:
        message = "the request is too large to be sent to a replica"
        self._end(ApiError(ApiErrorCode.PAYLOAD_TOO_LARGE, message), None)

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    @property
    def _can_retry(self) -> bool:
        return not self.has_output and not self._is_retried

    def _retry(self, refusal: StepOutput | None) -> None:
        """Once, elsewhere. If nobody else takes it, the first replica's own answer stands."""
        self._is_retried = True
        is_leaving = refusal is None or _is_code(refusal, ErrorCode.ENGINE_DRAINING)
        try:
            self._owner.resubmit(self, can_wait=is_leaving)
        except ApiError as error:
            if refusal is None:
                self._end(error, None)
            else:
                self._push(refusal)
                self._end(None, None)

    def _mark_first_output(self) -> None:
        if not self.has_output:
            self.has_output = True
            self._owner.on_first_output(self)

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
        self._is_ended = True
        self._error = error
        if not self.has_output:
            self._mark_first_output()
        self._owner.on_end(self, engine_s)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_code(refusal: StepOutput, code: ErrorCode) -> bool:
    return refusal.error is not None and refusal.error.code is code


def _size_bytes(output: StepOutput) -> int:
    """A fair estimate of what an unread output occupies."""
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
    entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return size + sum(_TOP_LOGPROB_BYTES * (1 + len(e.top_token_ids)) for e in entries if e)
