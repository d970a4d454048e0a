"""Worker processes driven from the event loop: whose job is next, with a wall-clock limit a job.

A worker that is stuck or dies is killed and replaced. Knows no kind of job: what a failed one means
is said by who has sent it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from service.errors import ApiError, ApiErrorCode
from service.tokenizer.jobs import Job, Reply
from service.tokenizer.lanes import Lanes, Work
from service.tokenizer.worker_process import WorkerLostError, WorkerOptions, WorkerProcess
from workers.errors import ModelLoadError

_log = logging.getLogger(__name__)


class JobTimedOutError(Exception):
    """The worker was killed. cpu_s: what it had of a processor."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"ran out of time, {cpu_s:.1f} s of it on a CPU")
        self.cpu_s = cpu_s


@dataclass(frozen=True, slots=True)
class ProcessPoolConfig:
    """name: of a process, in messages. num_workers: for jobs of any size. num_short_workers: more
    of them, for jobs of up to max_short_bytes.

    timeout_s: wall clock of one job in its worker. queue_timeout_s: waiting for a worker.
    max_pending_jobs: of all callers; one caller may have as many waiting as there is room left.
    """

    name: str
    worker: WorkerOptions
    num_workers: int
    num_short_workers: int
    max_short_bytes: int
    timeout_s: float
    queue_timeout_s: float
    max_pending_jobs: int


class ProcessPool:
    """start() before use, aclose() after."""

    def __init__(self, config: ProcessPoolConfig) -> None:
        self._config = config
        self._lanes: Lanes[WorkerProcess] = Lanes(config.max_short_bytes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pending: Counter[str] = Counter()
        self._is_closed = False

    async def start(self) -> None:
        """Start every worker. Raises ModelLoadError if one cannot be."""
        num_short, num_any = self._config.num_short_workers, self._config.num_workers
        starts = (WorkerProcess.start(self._config.worker) for _ in range(num_short + num_any))
        results = await asyncio.gather(*starts, return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, WorkerProcess):
                self._lanes.add(result, is_for_short=index < num_short)
        for result in results:
            if isinstance(result, BaseException):
                await self.aclose()
                if isinstance(result, (WorkerLostError, TimeoutError)):
                    message = f"a {self._config.name} process did not start"
                    raise ModelLoadError(message) from result
                raise result

    async def aclose(self) -> None:
        """End every worker. Jobs under way end with a typed error."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._lanes.clear():
            await worker.kill()

    async def run(self, job: Job, work: Work) -> Reply:
        """Raises ApiError where no worker can be had, JobTimedOutError and WorkerLostError."""
        if self._is_closed:
            raise ApiError(ApiErrorCode.DRAINING, "the server is shutting down")
        worker = await self._take_worker(work)
        # A caller that goes away must not leave half an exchange on the worker's pipes.
        task = asyncio.create_task(self._exchange(worker, job))
        self._keep(task)
        return await asyncio.shield(task)

    async def _take_worker(self, work: Work) -> WorkerProcess:
        with self._counted_as_pending(work.flow.caller):
            try:
                async with asyncio.timeout(self._config.queue_timeout_s):
                    return await self._lanes.take(work)
            except TimeoutError:
                raise ApiError(
                    ApiErrorCode.OVERLOADED, f"no {self._config.name} process became free in time"
                ) from None

    @contextmanager
    def _counted_as_pending(self, caller: str) -> Iterator[None]:
        """Raises ApiError where too many wait. One caller leaves as much room as it takes."""
        num_free = self._config.max_pending_jobs - self._pending.total()
        if num_free <= self._pending[caller]:
            message = f"too many requests wait for a {self._config.name} process"
            raise ApiError(ApiErrorCode.OVERLOADED, message)
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
            error = JobTimedOutError(worker.cpu_s() - cpu_before_s)
            await self._replace(worker, str(error))
            raise error from None
        except WorkerLostError:
            await self._replace(worker, "died")
            raise
        except asyncio.CancelledError:
            await worker.kill()
            raise
        self._lanes.give_back(worker)
        return reply

    async def _replace(self, worker: WorkerProcess, reason: str) -> None:
        _log.warning("a %s process %s and is replaced", self._config.name, reason)
        is_for_short = self._lanes.remove(worker)
        await worker.kill()
        self._keep(asyncio.create_task(self._start_replacement(is_for_short)))

    async def _start_replacement(self, is_for_short: bool) -> None:
        while not self._is_closed:
            try:
                worker = await WorkerProcess.start(self._config.worker)
            except (WorkerLostError, TimeoutError, OSError, ModelLoadError) as error:
                _log.error("a %s process did not start: %s", self._config.name, error)
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
