"""A pool of tokenizer processes driven from the event loop, with a wall-clock limit a job.

Encoding holds the interpreter lock and a template can loop, so neither may run in the ingress
process; a worker that is stuck or dies is killed and replaced, and its job ends with a typed error
(docs/decisions/0010-tokenizer-processes.md has the figures). Knows no request.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service.errors import ApiError, ApiErrorCode
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import (
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodeText,
    Job,
    Refused,
    Reply,
    TooLong,
    job_bytes,
    pack_token_ids,
    unpack_token_ids,
)
from service.tokenizer.lanes import Lanes, Work
from service.tokenizer.worker_process import WorkerLostError, WorkerOptions, WorkerProcess
from workers.errors import ModelLoadError

# A job that had this share of its time limit as CPU took so long by itself; one that had less
# waited for a busy machine.
_OWN_FAULT_CPU_SHARE = 0.1
# Takes 50 ms to encode or so.
MAX_SHORT_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the handler needs of a tokenizer. Every method may raise ApiError.

    flow: for whom, so that callers and requests take turns.
    """

    async def encode_text(self, job: EncodeText, flow: Flow) -> Sequence[int]: ...

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> Sequence[int]: ...

    async def decode(
        self, token_ids: Sequence[int], flow: Flow, *, skip_special_tokens: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizerPoolConfig:
    """num_workers: for jobs of any size; one more is kept for those of up to max_short_bytes.

    timeout_s: wall clock of one job in its worker. queue_timeout_s: waiting for a worker.
    start_timeout_s: loading of a tokenizer. max_pending_jobs: of all callers; one caller may have
    as many waiting as there is room left.
    """

    folder: Path
    num_workers: int = 1
    timeout_s: float = 10.0
    queue_timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    max_pending_jobs: int = 1024
    max_rendered_bytes: int = 8 << 20
    max_short_bytes: int = MAX_SHORT_BYTES


class TokenizerPool:
    """Implements Tokenizer over processes. start() before use, aclose() after."""

    def __init__(self, config: TokenizerPoolConfig) -> None:
        self._config = config
        self._options = WorkerOptions(
            config.folder, config.max_rendered_bytes, config.start_timeout_s
        )
        self._lanes: Lanes[WorkerProcess] = Lanes(config.max_short_bytes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pending: Counter[str] = Counter()
        self._is_closed = False

    async def start(self) -> None:
        """Start every worker. Raises ModelLoadError if the folder's tokenizer cannot be served."""
        starts = (WorkerProcess.start(self._options) for _ in range(self._config.num_workers + 1))
        results = await asyncio.gather(*starts, return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, WorkerProcess):
                self._lanes.add(result, is_for_short=index == 0)
        for result in results:
            if isinstance(result, BaseException):
                await self.aclose()
                if isinstance(result, (WorkerLostError, TimeoutError)):
                    raise ModelLoadError("a tokenizer process did not start") from result
                raise result

    async def aclose(self) -> None:
        """End every worker. Jobs under way end with a typed error."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._lanes.clear():
            await worker.kill()

    async def encode_text(self, job: EncodeText, flow: Flow) -> Sequence[int]:
        return await self._encode(job, flow)

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> Sequence[int]:
        return await self._encode(job, flow)

    async def decode(
        self, token_ids: Sequence[int], flow: Flow, *, skip_special_tokens: bool
    ) -> str:
        job = DecodeTokens(pack_token_ids(token_ids), skip_special_tokens)
        reply = await self._submit(job, flow)
        if not isinstance(reply, Decoded):
            raise _worker_failed()
        return reply.text

    async def _encode(self, job: EncodeText | EncodeChat, flow: Flow) -> Sequence[int]:
        reply = await self._submit(job, flow)
        if isinstance(reply, TooLong):
            raise ApiError(
                ApiErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the context has room for {job.max_tokens} prompt tokens; the prompt has at least "
                f"{reply.min_tokens}",
                _PARAMS[type(job)],
            )
        if not isinstance(reply, Encoded):
            raise _worker_failed()
        return unpack_token_ids(reply.token_ids)

    async def _submit(self, job: Job, flow: Flow) -> Reply:
        if self._is_closed:
            raise ApiError(ApiErrorCode.DRAINING, "the server is shutting down")
        worker = await self._take_worker(Work(flow, job_bytes(job)))
        # A caller that goes away must not leave half an exchange on the worker's pipes.
        task = asyncio.create_task(self._exchange(worker, job))
        self._keep(task)
        reply = await asyncio.shield(task)
        if isinstance(reply, Refused):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, reply.message, reply.param)
        return reply

    async def _take_worker(self, work: Work) -> WorkerProcess:
        with self._counted_as_pending(work.flow.caller):
            try:
                async with asyncio.timeout(self._config.queue_timeout_s):
                    return await self._lanes.take(work)
            except TimeoutError:
                raise ApiError(
                    ApiErrorCode.OVERLOADED, "no tokenizer process became free in time"
                ) from None

    @contextmanager
    def _counted_as_pending(self, caller: str) -> Iterator[None]:
        """Raises ApiError where too many wait. One caller leaves as much room as it takes."""
        num_free = self._config.max_pending_jobs - self._pending.total()
        if num_free <= self._pending[caller]:
            raise ApiError(ApiErrorCode.OVERLOADED, "too many prompts wait to be tokenised")
        self._pending[caller] += 1
        try:
            yield
        finally:
            self._pending[caller] -= 1
            if not self._pending[caller]:
                del self._pending[caller]

    async def _exchange(self, worker: WorkerProcess, job: Job) -> Reply:
        cpu_before_s = worker.cpu_s()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                reply = await worker.run(job)
        except TimeoutError:
            cpu_s = worker.cpu_s() - cpu_before_s
            await self._replace(worker, f"ran out of time, {cpu_s:.1f} s of it on a CPU")
            raise self._took_too_long(job, cpu_s) from None
        except WorkerLostError:
            await self._replace(worker, "died")
            raise _worker_failed() from None
        except asyncio.CancelledError:
            await worker.kill()
            raise
        self._lanes.give_back(worker)
        return reply

    def _took_too_long(self, job: Job, cpu_s: float) -> ApiError:
        timeout_s = self._config.timeout_s
        if cpu_s < _OWN_FAULT_CPU_SHARE * timeout_s:
            message = f"this machine is too busy: a prompt was not tokenised in {timeout_s:g} s"
            return ApiError(ApiErrorCode.TOKENIZER_FAILED, message)
        return ApiError(
            ApiErrorCode.LIMIT_EXCEEDED,
            f"tokenising this prompt takes longer than {timeout_s:g} s",
            _PARAMS[type(job)],
        )

    async def _replace(self, worker: WorkerProcess, reason: str) -> None:
        _log.warning("a tokenizer process %s and is replaced", reason)
        is_for_short = self._lanes.remove(worker)
        await worker.kill()
        self._keep(asyncio.create_task(self._start_replacement(is_for_short)))

    async def _start_replacement(self, is_for_short: bool) -> None:
        while not self._is_closed:
            try:
                worker = await WorkerProcess.start(self._options)
            except (WorkerLostError, TimeoutError, OSError, ModelLoadError) as error:
                _log.error("a tokenizer process did not start: %s", error)
                await asyncio.sleep(1.0)
            else:
                self._lanes.add(worker, is_for_short=is_for_short)
                return

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        # Reading the exception marks it as seen; whoever awaits the task gets it all the same.
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


_PARAMS: dict[type[Job], str] = {
    EncodeText: "prompt",
    EncodeChat: "messages",
    DecodeTokens: "tokens",
}


def _worker_failed() -> ApiError:
    return ApiError(ApiErrorCode.TOKENIZER_FAILED, "the tokenizer process failed on this prompt")
