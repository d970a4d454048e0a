"""Where requests wait until their adapter is in rank 0's host memory, in nobody's way."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from workers.adapters.host import HostAdapter
from workers.adapters.ref import AdapterRef
from workers.adapters.store import AdapterStore
from workers.engine.protocol import FinishReason, GenerateRequest, OutputError, StepOutput
from workers.errors import AdapterError, ErrorCode, RequestRejectedError

Accept = Callable[[GenerateRequest], None]
"""Queue a request whose adapter is there. Raises RequestRejectedError."""


class AdapterDesk(Protocol):
    """Not thread-safe: who drives the engine calls it.

    num_waiting: requests that hand_over has something for, now or once their adapters are read.
    num_live: requests with an adapter that have not ended.
    """

    num_waiting: int

    @property
    def num_live(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int: ...

    def waiting_ids(self) -> list[str]:
        """Of the requests that abort() would end."""
        ...

    def is_known(self, request_id: str) -> bool:
        """Whether a request waits here, or has a last word to say."""
        ...

    def start(self, request: GenerateRequest) -> None:
        """Raises RequestRejectedError where no adapter can be had."""
        ...

    def abort(self, request_id: str) -> bool:
        """Whether the request waited here. Its last output comes from hand_over."""
        ...

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        """Give those whose adapters are there to accept; outputs of those that end here."""
        ...

    def settle(self, outputs: Iterable[StepOutput]) -> None:
        """These have been told: adapters of requests that have ended are free."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until an adapter is there, if anything waits."""
        ...

    def close(self) -> None: ...


class NoAdapters:
    """Of an engine that serves none."""

    num_waiting = 0
    num_live = 0
    num_waiting_tokens = 0

    def waiting_ids(self) -> list[str]:
        return []

    def is_known(self, request_id: str) -> bool:
        return False

    def start(self, request: GenerateRequest) -> None:
        raise RequestRejectedError(
            ErrorCode.INVALID_REQUEST, "this engine takes no adapters (max_loras)", "model"
        )

    def abort(self, request_id: str) -> bool:
        return False

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        return []

    def settle(self, outputs: Iterable[StepOutput]) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


NO_ADAPTERS_DESK = NoAdapters()


class ReadingDesk:
    """Over the store that the rank's steps take adapters from."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._live: dict[str, AdapterRef] = {}
        self._waiting: dict[str, tuple[GenerateRequest, Future[HostAdapter]]] = {}
        self._last_words: list[StepOutput] = []
        # Asked in every step, of which few have anything here.
        self.num_waiting = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(request.num_input_tokens for request, _ in self._waiting.values())

    def waiting_ids(self) -> list[str]:
        return list(self._waiting)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._waiting or any(
            output.request_id == request_id for output in self._last_words
        )

    def start(self, request: GenerateRequest) -> None:
        assert request.adapter is not None, "who has no adapter waits for none"
        future = self._store.pin(request.adapter)
        self._live[request.request_id] = request.adapter
        self._waiting[request.request_id] = request, future
        self.num_waiting += 1

    def abort(self, request_id: str) -> bool:
        if self._waiting.pop(request_id, None) is None:
            return False
        self._release(request_id)
        self._last_words.append(StepOutput(request_id, [], FinishReason.ABORT))
        return True

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        outputs, self._last_words = self._last_words, []
        ready = [waiting for waiting in self._waiting.values() if waiting[1].done()]
        self.num_waiting = len(self._waiting) - len(ready)
        for request, future in ready:
            del self._waiting[request.request_id]
            error = _failure_of(request, future, accept)
            if error is not None:
                self._release(request.request_id)
                outputs.append(StepOutput(request.request_id, [], FinishReason.ERROR, error=error))
        return outputs

    def settle(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request_id)

    def _release(self, request_id: str) -> None:
        ref = self._live.pop(request_id, None)
        if ref is not None:
            self._store.unpin(ref)

    def wait(self, timeout_s: float) -> None:
        futures = [future for _, future in self._waiting.values()]
        if futures and not self._last_words:
            wait(futures, timeout_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        self._store.close()


def _failure_of(
    request: GenerateRequest, future: Future[HostAdapter], accept: Accept
) -> OutputError | None:
    """What the request is told that cannot run."""
    try:
        future.result()
        accept(request)
    except AdapterError as error:
        assert request.adapter is not None
        message = f"the adapter {request.adapter.name!r} cannot be read: {error}"
        return OutputError(ErrorCode.ADAPTER_UNAVAILABLE, message)
    except RequestRejectedError as error:
        return OutputError(error.code, error.message)
    return None
