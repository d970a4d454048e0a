"""Where requests with a grammar wait until it is compiled, in nobody's way."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from workers.constraints.masks import AskedMasks
from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.engine.protocol import FinishReason, GenerateRequest, OutputError, StepOutput
from workers.errors import ErrorCode, RequestRejectedError

logger = logging.getLogger(__name__)

NUM_COMPILE_THREADS = 2

_FAILED = OutputError(ErrorCode.INTERNAL, "the grammar could not be compiled")

Accept = Callable[[GenerateRequest, TokenMatcher], None]
"""Queue a request for its first step. Raises RequestRejectedError."""


class Compiler(Protocol):
    def prepare(self) -> None:
        """Whatever the first compile would take longer for. Any thread may call it."""
        ...

    def compile(self, grammar: str, token_ids: Sequence[int]) -> TokenMatcher:
        """A matcher that has gone past token_ids. Any thread may call it. Raises
        RequestRejectedError."""
        ...

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        """As FillMasks, of what compile made."""
        ...


class GrammarDesk(Protocol):
    """Not thread-safe: who drives the engine calls it.

    num_waiting: requests that hand_over has something for, now or once they are compiled.
    """

    num_waiting: int

    @property
    def num_waiting_tokens(self) -> int: ...

    def waiting_ids(self) -> list[str]:
        """Of the requests whose grammars are being compiled."""
        ...

    def prepare(self) -> Callable[[], None]:
        """Begin with what the first request would take longer for; what is returned waits for its
        end."""
        ...

    def is_known(self, request_id: str) -> bool: ...

    def start(self, request: GenerateRequest) -> None:
        """Raises RequestRejectedError where no grammar can be had."""
        ...

    def abort(self, request_id: str) -> bool:
        """Whether the request waited here. Its last output comes from hand_over."""
        ...

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        """Give what is compiled to accept; outputs of those that end here."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until something is compiled, if anything waits."""
        ...

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        """As FillMasks, of what was handed over."""
        ...

    def close(self) -> None: ...


class NoGrammars:
    """Of an engine whose steps cannot be masked."""

    num_waiting = 0
    num_waiting_tokens = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def prepare(self) -> Callable[[], None]:
        return lambda: None

    def waiting_ids(self) -> list[str]:
        return []

    def is_known(self, request_id: str) -> bool:
        return False

    def start(self, request: GenerateRequest) -> None:
        raise RequestRejectedError(ErrorCode.INVALID_REQUEST, self._reason, "grammar")

    def abort(self, request_id: str) -> bool:
        return False

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        return []

    def wait(self, timeout_s: float) -> None: ...

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        raise AssertionError(f"nothing was handed over: {self._reason}")

    def close(self) -> None: ...


NO_GRAMMARS = NoGrammars("this engine takes no grammars")


class CompilingDesk:
    """Compiles in threads of its own. Requests leave in the order in which they are compiled."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="tessera-grammar")
        self._waiting: dict[str, tuple[GenerateRequest, Future[TokenMatcher]]] = {}
        self._last_words: list[StepOutput] = []
        # Asked in every step, of which few have anything here.
        self.num_waiting = 0

    def prepare(self) -> Callable[[], None]:
        return self._pool.submit(self._compiler.prepare).result

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(request.known_token_ids) for request, _ in self._waiting.values())

    def waiting_ids(self) -> list[str]:
        return list(self._waiting)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._waiting or any(
            output.request_id == request_id for output in self._last_words
        )

    def start(self, request: GenerateRequest) -> None:
        future = self._pool.submit(
            self._compiler.compile, request.grammar, request.resumed_token_ids
        )
        self._waiting[request.request_id] = request, future
        self.num_waiting += 1

    def abort(self, request_id: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        waiting[1].cancel()
        self._last_words.append(StepOutput(request_id, [], FinishReason.ABORT))
        return True

    def hand_over(self, accept: Accept) -> list[StepOutput]:
        outputs, self._last_words = self._last_words, []
        ready = [waiting for waiting in self._waiting.values() if waiting[1].done()]
        self.num_waiting = len(self._waiting) - len(ready)
        for request, future in ready:
            del self._waiting[request.request_id]
            # Asked for, not raised: a panic of llguidance is no Exception.
            failure = future.exception()
            if failure is None or isinstance(failure, RequestRejectedError):
                outputs += _accepted(request, future, accept)
            else:
                logger.error("the grammar of %s", request.request_id, exc_info=failure)
                outputs.append(_refused(request, _FAILED))
        return outputs

    def wait(self, timeout_s: float) -> None:
        futures = [future for _, future in self._waiting.values()]
        if futures and not self._last_words:
            wait(futures, timeout_s, return_when=FIRST_COMPLETED)

    def fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        self._compiler.fill(rows, bits)

    def close(self) -> None:
        """Waits for nothing: a compilation under way touches nothing but its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _accepted(
    request: GenerateRequest, future: Future[TokenMatcher], accept: Accept
) -> list[StepOutput]:
    """Nothing, or the output of a request that is refused."""
    try:
        accept(request, future.result())
    except RequestRejectedError as error:
        return [_refused(request, OutputError(error.code, error.message))]
    return []


def _refused(request: GenerateRequest, error: OutputError) -> StepOutput:
    return StepOutput(request.request_id, [], FinishReason.ERROR, error=error)
