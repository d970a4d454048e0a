"""When an engine sleeps and wakes: orders in, and what requests are told meanwhile.

As vLLM has it: level 1 keeps weights in host memory, level 2 drops them; KV memory goes at both.
Knows no tensor. Used on the engine's thread alone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from workers.engine.protocol import FinishReason, OutputError, StepOutput
from workers.errors import ErrorCode, RequestRejectedError

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
LEVELS = (1, 2)
_MESSAGE = "the model sleeps"


class SleepOrder(msgspec.Struct, frozen=True, array_like=True):
    """level: of LEVELS, 0 to wake. aborts: requests that run are ended; else they end first."""

    level: int
    aborts: bool


class RestingMemory(Protocol):
    """What an engine gives back while it sleeps. level: 0 for awake."""

    level: int

    def release(self, level: int) -> None: ...

    def restore(self, on_progress: OnProgress) -> None:
        """Everything as it was but what was cached."""


class RestingEngine(Protocol):
    """has_work: nothing is released while there is any."""

    @property
    def has_work(self) -> bool: ...

    @property
    def sleep_level(self) -> int: ...

    def live_request_ids(self) -> Sequence[str]: ...

    def abort(self, request_id: str) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, on_progress: OnProgress) -> None: ...


class NoRest:
    """Of an engine whose info says why it cannot sleep."""

    level = 0

    def release(self, level: int) -> None:
        raise RuntimeError("an engine that cannot sleep was told to")

    def restore(self, on_progress: OnProgress) -> None:
        """Nothing was given back."""


class Rest:
    """Brings the engine to what was ordered last, as soon as it has no work."""

    def __init__(self, engine: RestingEngine) -> None:
        self._engine = engine
        self._wanted = 0
        self._ended: set[str] = set()

    @property
    def is_quiet(self) -> bool:
        """Whether requests are refused: asleep, or about to be."""
        return self._wanted > 0

    @property
    def is_pending(self) -> bool:
        return self._wanted != self._engine.sleep_level

    @property
    def must_wake(self) -> bool:
        """Before anything else is done: what comes next finds no memory."""
        return self._wanted == 0 < self._engine.sleep_level

    @property
    def has_ended_any(self) -> bool:
        """Whether told() has something to say."""
        return bool(self._ended)

    def take(self, order: SleepOrder) -> None:
        """Asleep without weights, level 1 changes nothing."""
        if order.level == 0:
            self._wanted = 0
            return
        self._wanted = max(order.level, self._engine.sleep_level)
        if order.aborts:
            for request_id in self._engine.live_request_ids():
                self._ended.add(request_id)
                self._engine.abort(request_id)

    def check(self) -> None:
        """Raises RequestRejectedError for a request that comes now."""
        if self.is_quiet:
            raise RequestRejectedError(ErrorCode.ENGINE_SLEEPING, _MESSAGE)

    def settle(self, on_progress: OnProgress) -> None:
        """The engine has no work, or must_wake. Raises what releasing and loading raise: then it
        is of no use."""
        started_s = time.perf_counter()
        if self._wanted:
            self._engine.sleep(self._wanted)
        else:
            self._engine.wake_up(on_progress)
        seconds = time.perf_counter() - started_s
        logger.info("the engine is at sleep level %d after %.2f s", self._wanted, seconds)

    def told(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """What ended for the sleep says so."""
        return [self._told(output) for output in outputs]

    def _told(self, output: StepOutput) -> StepOutput:
        if output.finish_reason is None or output.request_id not in self._ended:
            return output
        self._ended.discard(output.request_id)
        if output.finish_reason is not FinishReason.ABORT:
            return output
        return StepOutput(
            output.request_id,
            [],
            FinishReason.ERROR,
            error=OutputError(ErrorCode.ENGINE_SLEEPING, _MESSAGE),
        )
