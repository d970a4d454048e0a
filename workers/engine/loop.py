"""EngineLoop: the thread that drives an engine, with a thread-safe inbox.

Knows no asyncio and no sockets: outputs leave through one callback per step, on this thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from workers.engine.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputError,
    StepOutput,
)
from workers.engine.rest import OnProgress, Rest, SleepOrder
from workers.errors import EngineFailedError, ErrorCode, RequestRejectedError

IDLE_WAIT_S = 0.5
PREPARE_AFTER_S = 0.05


class SteppableEngine(Protocol):
    """What the loop drives; Engine is the one there is outside tests."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[StepOutput]: ...

    def prepare_while_idle(self) -> bool: ...

    @property
    def sleep_level(self) -> int: ...

    def live_request_ids(self) -> Sequence[str]: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, on_progress: OnProgress) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineLoop:
    """Runs engine.step() while there is work and sleeps on a condition otherwise.

    Whenever nothing has come for PREPARE_AFTER_S the engine may prepare for later requests, piece
    by piece: a request that comes meanwhile waits for one piece at most.
    on_outputs gets every step's outputs, also those of refused and aborted requests; each submitted
    request yields exactly one output with a finish_reason, unless it has reached the engine and
    that fails or is stopped. on_failure is called once if a step raises; the loop ends then. What
    comes too late for the engine is refused: ENGINE_FAILED, or ENGINE_DRAINING after a stop.
    """

    def __init__(
        self,
        engine: SteppableEngine,
        on_outputs: Callable[[list[StepOutput]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._wakeup = threading.Condition()
        self._inbox: deque[GenerateRequest | str | SleepOrder] = deque()
        self._rest = Rest(engine)
        # Of each request that has come since the snapshot in _stats, in their order.
        self._new_tokens: deque[int] = deque()
        self._is_stopping = False
        self._is_draining = False
        self._has_ended = False
        self._failure: BaseException | None = None
        self._stats = engine.stats()
        self._last_beat_s = time.monotonic()
        self._rest_s = PREPARE_AFTER_S
        self._thread = threading.Thread(target=self._run, name="tessera-engine", daemon=True)

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if anything did."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    @property
    def last_beat_s(self) -> float:
        """time.monotonic() of the last turn of the loop; it turns at least every IDLE_WAIT_S."""
        return self._last_beat_s

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue requests. Refusals come back as outputs with FinishReason.ERROR."""
        self._put(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Queue aborts; unknown ids are ignored, they may just have finished."""
        self._put(request_ids)

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted run to their end."""
        with self._wakeup:
            self._is_draining = True
            self._wakeup.notify()

    def set_sleep(self, order: SleepOrder) -> None:
        """Queue an order to sleep or wake; stats() say when it has been done. Requests are refused
        from its turn on until the engine is awake: ENGINE_SLEEPING. RuntimeError, which ends the
        loop, where the engine cannot sleep."""
        self._put([order])

    def is_drained(self) -> bool:
        return self._is_draining and not self._inbox and not self._engine.has_work

    def stats(self) -> EngineStats:
        """The snapshot after the last step, and what has come since as waiting; from any thread."""
        with self._wakeup:
            stats, num_new, new_tokens = self._stats, len(self._new_tokens), sum(self._new_tokens)
        if not num_new:
            return stats
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + num_new,
            queued_tokens=stats.queued_tokens + new_tokens,
        )

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the current step, then close the engine. Unfinished requests die.

        Raises EngineFailedError when that step does not end within timeout_s: nothing is released
        then, and the process should end.
        """
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineFailedError(f"the step under way did not end within {timeout_s:g} s")
        self._end()
        self._engine.close()

    def _put(self, items: Sequence[GenerateRequest] | Sequence[str] | Sequence[SleepOrder]) -> None:
        with self._wakeup:
            if not self._has_ended:
                self._inbox.extend(items)
                self._new_tokens.extend(
                    item.num_input_tokens for item in items if isinstance(item, GenerateRequest)
                )
                self._wakeup.notify()
                return
        self._refuse(items)

    def _refuse(self, items: Iterable[GenerateRequest | str | SleepOrder]) -> None:
        """On whichever thread found out that the loop has ended."""
        code, message = ErrorCode.ENGINE_DRAINING, "the engine has been stopped"
        if self._failure is not None:
            code, message = ErrorCode.ENGINE_FAILED, str(self._failure)
        requests = [item for item in items if isinstance(item, GenerateRequest)]
        if requests:
            self._on_outputs([_refusal(one.request_id, code, message) for one in requests])

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as failure:  # noqa: BLE001  the thread's border: reported, never lost
            self._failure = failure
            self._on_failure(failure)
        finally:
            self._end()

    def _end(self) -> None:
        """From now on nothing enters the inbox; what is in it is refused. Again: nothing to do."""
        with self._wakeup:
            self._has_ended = True
            left = list(self._inbox)
            self._inbox.clear()
        self._refuse(left)

    def _turn(self) -> None:
        self._last_beat_s = time.monotonic()
        num_taken, outputs = self._take_inbox()
        if self._engine.has_work:
            outputs += self._engine.step()
        if self._rest.has_ended_any:
            outputs = self._rest.told(outputs)
        if self._rest.is_pending and not self._engine.has_work:
            self._rest.settle(self._beat)
        self._take_stats(num_taken)
        if outputs:
            self._on_outputs(outputs)
        if not self._rests():
            self._rest_s = PREPARE_AFTER_S
        elif self._rest.is_quiet or not self._engine.prepare_while_idle():
            self._rest_s = IDLE_WAIT_S

    def _beat(self, bytes_done: int, bytes_total: int) -> None:
        """Weights come."""
        self._last_beat_s = time.monotonic()

    def _rests(self) -> bool:
        """Wait for something to do; whether nothing came all the while."""
        with self._wakeup:
            is_idle = not self._inbox and not self._engine.has_work and not self._is_stopping
            return is_idle and not self._wakeup.wait(self._rest_s)

    def _take_stats(self, num_taken: int) -> None:
        """num_taken: requests of the inbox that the engine has been given since the last time."""
        stats = self._engine.stats()
        with self._wakeup:
            self._stats = stats
            for _ in range(num_taken):
                self._new_tokens.popleft()

    def _take_inbox(self) -> tuple[int, list[StepOutput]]:
        """How many requests were taken, and what those are told that the engine refuses."""
        num_taken = 0
        refused: list[StepOutput] = []
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, str):
                self._engine.abort(item)
                continue
            if isinstance(item, SleepOrder):
                self._rest.take(item)
                if self._rest.must_wake:
                    self._rest.settle(self._beat)
                continue
            num_taken += 1
            try:
                self._admit(item)
            except RequestRejectedError as error:
                refused.append(_refusal(item.request_id, error.code, error.message))
        return num_taken, refused

    def _admit(self, request: GenerateRequest) -> None:
        if self._is_draining:
            raise RequestRejectedError(ErrorCode.ENGINE_DRAINING, "the engine is shutting down")
        self._rest.check()
        self._engine.submit(request)


def _refusal(request_id: str, code: ErrorCode, message: str) -> StepOutput:
    return StepOutput(
        request_id=request_id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=OutputError(code, message),
    )
