"""Quota: how much one API key may ask of one ingress process, and the lease of one request.

Single-threaded: the ingress's event loop. Refusals are ApiErrors, rendered by HTTP and gRPC.
"""

from collections.abc import Callable
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from service.errors import ApiError, ApiErrorCode
from service.security.token_bucket import TokenBucket

_CONCURRENCY_RETRY_S = 1.0


class KeyLimits(BaseModel):
    """Ceilings of one key in one ingress process; None is no ceiling.

    tokens_per_minute counts prompt tokens when they are submitted and output tokens when the
    request ends. max_concurrent_requests: accepted and not ended; every choice of every prompt is
    one of its own, as the engine runs it so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_concurrent_requests: int | None = Field(default=None, ge=1)


class Lease(Protocol):
    """What one admitted request holds of its caller's quota."""

    def take_sequences(self, num_sequences: int) -> None:
        """The request runs as many sequences as this at once, where one was counted so far.

        Raises ApiError: LIMIT_EXCEEDED if the caller may never run so many, RATE_LIMITED if there
        is no room for them now. Once a lease.
        """
        ...

    def take_up_to(self, num_sequences: int) -> int:
        """The request has so many sequences and may run them one after the other: how many it may
        run at once now, at least 1. Instead of take_sequences()."""
        ...

    def charge_prompt(self, num_tokens: int) -> None:
        """Raise ApiError RATE_LIMITED if the minute has no room for the prompt; once a lease."""
        ...

    def cancel(self) -> None:
        """The request failed before it was under way: its prompt is not held against the key."""
        ...

    def end(self, num_output_tokens: int) -> None:
        """The request ended. Harmless when called twice."""
        ...


class Quota(Protocol):
    def admit(self) -> Lease:
        """Count a request in, or raise ApiError RATE_LIMITED."""
        ...

    def rename(self, name: str) -> None:
        """Refusals call the key so from now on."""
        ...


class FreeLease:
    """Of callers without limits, and of requests that do not count."""

    def take_sequences(self, num_sequences: int) -> None: ...

    def take_up_to(self, num_sequences: int) -> int:
        return num_sequences

    def charge_prompt(self, num_tokens: int) -> None: ...

    def cancel(self) -> None: ...

    def end(self, num_output_tokens: int) -> None: ...


class UnlimitedQuota:
    """Admits everything and remembers nothing."""

    def admit(self) -> Lease:
        return FreeLease()

    def rename(self, name: str) -> None: ...


class KeyQuota:
    """The ceilings of KeyLimits. name: what refusals call the key. clock: never goes back."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._name = name
        self._max_concurrent = limits.max_concurrent_requests
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)
        self._num_live = 0

    def admit(self) -> Lease:
        if self._max_concurrent is not None and self._num_live >= self._max_concurrent:
            raise self._refusal("too many requests are under way", _CONCURRENCY_RETRY_S)
        if self._tokens is not None:
            # Also for requests whose prompt is yet unknown: a debt refuses before tokenising.
            self._require(self._tokens, 1, "the tokens of this minute are used up")
        if self._requests is not None:
            self._require(self._requests, 1, "the requests of this minute are used up")
            self._requests.take(1)
        self._num_live += 1
        return _KeyLease(self)

    def rename(self, name: str) -> None:
        self._name = name

    def grow(self, num_sequences: int) -> None:
        """A request that was admitted as one sequence runs so many. Raises ApiError."""
        ceiling = self._max_concurrent
        if ceiling is not None and num_sequences > ceiling:
            raise ApiError(
                ApiErrorCode.LIMIT_EXCEEDED,
                f"API key {self._name!r} may run {ceiling} sequences at once; the prompts and n "
                f"of this request make {num_sequences}",
                "n",
            )
        num_more = num_sequences - 1
        if ceiling is not None and self._num_live + num_more > ceiling:
            raise self._refusal("too many requests are under way", _CONCURRENCY_RETRY_S)
        self._num_live += num_more

    def grow_up_to(self, num_sequences: int) -> int:
        """As grow(), as far as there is room: how many sequences the request may run."""
        if self._max_concurrent is not None:
            num_sequences = min(num_sequences, 1 + max(0, self._max_concurrent - self._num_live))
        self._num_live += num_sequences - 1
        return num_sequences

    def charge(self, num_tokens: int) -> None:
        """Raise ApiError RATE_LIMITED if num_tokens cannot be taken now."""
        if self._tokens is not None:
            self._require(self._tokens, num_tokens, "this minute has no room for the prompt")
            self._tokens.take(num_tokens)

    def refund(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.put_back(num_tokens)

    def release(self, num_sequences: int, num_output_tokens: int) -> None:
        """A request ended; its output may leave a debt."""
        if self._tokens is not None:
            self._tokens.take(num_output_tokens)
        self._num_live -= num_sequences

    def _require(self, bucket: TokenBucket, amount: int, message: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            raise self._refusal(message, wait_s)

    def _refusal(self, message: str, retry_after_s: float) -> ApiError:
        return ApiError(
            ApiErrorCode.RATE_LIMITED,
            f"API key {self._name!r}: {message}",
            retry_after_s=retry_after_s,
        )


class _KeyLease:
    def __init__(self, quota: KeyQuota) -> None:
        self._quota = quota
        self._num_sequences = 1
        self._num_prompt_tokens = 0
        self._is_over = False

    def take_sequences(self, num_sequences: int) -> None:
        self._quota.grow(num_sequences)
        self._num_sequences = num_sequences

    def take_up_to(self, num_sequences: int) -> int:
        self._num_sequences = self._quota.grow_up_to(num_sequences)
        return self._num_sequences

    def charge_prompt(self, num_tokens: int) -> None:
        self._quota.charge(num_tokens)
        self._num_prompt_tokens = num_tokens

    def cancel(self) -> None:
        if not self._is_over:
            self._quota.refund(self._num_prompt_tokens)
        self.end(0)

    def end(self, num_output_tokens: int) -> None:
        if not self._is_over:
            self._is_over = True
            self._quota.release(self._num_sequences, num_output_tokens)


def make_quota(name: str, limits: KeyLimits, clock: Callable[[], float]) -> Quota:
    return UnlimitedQuota() if limits == KeyLimits() else KeyQuota(name, limits, clock)


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, clock)
