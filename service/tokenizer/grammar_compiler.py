"""Grammars for what clients want their outputs to be, made in a process of their own.

Prompts never wait for it. What came out is kept by content, refusals included, so that a schema
costs its time once. Knows no request and no model.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from service.errors import ApiError, ApiErrorCode
from service.tokenizer.constraints import Constraint
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import Compiled, CompileGrammar, Refused, Reply, TooCostly, job_bytes
from service.tokenizer.lanes import Work
from service.tokenizer.process_pool import JobTimedOutError, ProcessPool, ProcessPoolConfig
from service.tokenizer.worker_process import WorkerLostError, WorkerOptions

MAX_CACHED_BYTES = 8 << 20
_ENTRY_BYTES = 256
_CODES = {
    Refused: ApiErrorCode.INVALID_REQUEST,
    TooCostly: ApiErrorCode.LIMIT_EXCEEDED,
}
Outcome = Compiled | Refused | TooCostly


@dataclass(frozen=True, slots=True)
class GrammarCompilerConfig:
    """max_cpu_s: of a processor, for one grammar. timeout_s: wall clock, which only a machine that
    gives the process no time needs."""

    max_cpu_s: float = 0.5
    timeout_s: float = 10.0
    queue_timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    max_pending_jobs: int = 1024


class GrammarCompiler:
    """start() before use, aclose() after."""

    def __init__(self, config: GrammarCompilerConfig) -> None:
        worker = WorkerOptions(
            "service.tokenizer.grammar_worker", (str(config.max_cpu_s),), config.start_timeout_s
        )
        self._processes = ProcessPool(
            ProcessPoolConfig(
                name="grammar",
                worker=worker,
                num_workers=1,
                num_short_workers=0,
                max_short_bytes=0,
                timeout_s=config.timeout_s,
                queue_timeout_s=config.queue_timeout_s,
                max_pending_jobs=config.max_pending_jobs,
            )
        )
        self._known = _Outcomes(MAX_CACHED_BYTES)

    async def start(self) -> None:
        """Raises ModelLoadError."""
        await self._processes.start()

    async def aclose(self) -> None:
        await self._processes.aclose()

    async def compile(self, constraint: Constraint, param: str, flow: Flow) -> str:
        """In llguidance's serialised form. param: what the client calls it. Raises ApiError."""
        key = hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
        outcome = self._known.get(key)
        if outcome is None:
            outcome = await self._make(CompileGrammar(constraint), param, flow)
            self._known.put(key, outcome)
        if isinstance(outcome, Compiled):
            return outcome.grammar
        raise ApiError(_CODES[type(outcome)], f"{param}: {outcome.message}", param)

    async def _make(self, job: CompileGrammar, param: str, flow: Flow) -> Outcome:
        try:
            reply: Reply = await self._processes.run(job, Work(flow, job_bytes(job)))
        except WorkerLostError as error:
            message = f"{param}: the process that compiles grammars was lost"
            raise ApiError(ApiErrorCode.TOKENIZER_FAILED, message, param) from error
        except JobTimedOutError as error:
            message = f"{param}: it was not compiled in time, this machine is too busy"
            raise ApiError(ApiErrorCode.TOKENIZER_FAILED, message, param) from error
        if not isinstance(reply, Compiled | Refused | TooCostly):
            raise ApiError(ApiErrorCode.INTERNAL, "the grammar process gave no grammar", param)
        return reply


class _Outcomes:
    """Those used last, by content. Not safe for threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._outcomes: OrderedDict[bytes, Outcome] = OrderedDict()

    def get(self, key: bytes) -> Outcome | None:
        outcome = self._outcomes.get(key)
        if outcome is not None:
            self._outcomes.move_to_end(key)
        return outcome

    def put(self, key: bytes, outcome: Outcome) -> None:
        if key in self._outcomes:
            return
        self._outcomes[key] = outcome
        self._num_bytes += _size(outcome)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(self._outcomes.popitem(last=False)[1])


def _size(outcome: Outcome) -> int:
    text = outcome.grammar if isinstance(outcome, Compiled) else outcome.message
    return _ENTRY_BYTES + len(text)
