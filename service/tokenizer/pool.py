"""A pool of tokenizer processes driven from the event loop, with a wall-clock limit a job.

Encoding holds the interpreter lock and a template can loop, so neither may run in the ingress
process; a worker that is stuck or dies is killed and replaced, and its job ends with a typed error
(docs/decisions/0010-tokenizer-processes.md has the figures). Knows no request.
"""

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from service.api.errors import ApiError, ApiErrorCode
from service.tokenizer.jobs import (
    FRAME_HEADER,
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodeText,
    Job,
    LoadFailed,
    Refused,
    Reply,
    frame,
    pack_token_ids,
    unpack_token_ids,
)
from workers.errors import ModelLoadError

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the handler needs of a tokenizer. Every method may raise ApiError."""

    async def encode_text(self, job: EncodeText) -> list[int]: ...

    async def encode_chat(self, job: EncodeChat) -> list[int]: ...

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizerPoolConfig:
    """timeout_s: wall clock of one job in its worker. queue_timeout_s: waiting for a worker.

    start_timeout_s: loading of a tokenizer.
    """

    folder: Path
    num_workers: int = 2
    timeout_s: float = 10.0
    queue_timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    max_pending_jobs: int = 1024
    max_rendered_bytes: int = 8 << 20


class _WorkerLostError(Exception):
    """The process ended or answered with something that is not a reply."""


class _Worker:
    """One process, one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @classmethod
    async def start(cls, config: TokenizerPoolConfig) -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.tokenizer.worker",
            str(config.folder.resolve()),
            str(config.max_rendered_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_SOURCE_ROOT,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                reply = await worker._receive()
        except BaseException:
            await worker.kill()
            raise
        if isinstance(reply, LoadFailed):
            await worker.kill()
            raise ModelLoadError(reply.message)
        return worker

    async def run(self, job: Job) -> Reply:
        writer = self._process.stdin
        if writer is None:
            raise _WorkerLostError
        try:
            writer.write(frame(msgspec.msgpack.encode(job)))
            await writer.drain()
        except ConnectionError as error:
            raise _WorkerLostError from error
        return await self._receive()

    async def _receive(self) -> Reply:
        reader = self._process.stdout
        if reader is None:
            raise _WorkerLostError
        try:
            (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
            payload = await reader.readexactly(size)
            reply: Reply = self._decoder.decode(payload)
        except (EOFError, ConnectionError, msgspec.DecodeError) as error:
            raise _WorkerLostError from error
        return reply

    async def kill(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class TokenizerPool:
    """Implements Tokenizer over processes. start() before use, aclose() after."""

    def __init__(self, config: TokenizerPoolConfig) -> None:
        self._config = config
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_pending = 0
        self._is_closed = False

    async def start(self) -> None:
        """Start every worker. Raises ModelLoadError if the folder's tokenizer cannot be served."""
        starts = (_Worker.start(self._config) for _ in range(self._config.num_workers))
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if isinstance(result, _Worker):
                self._idle.put_nowait(result)
        for result in results:
            if isinstance(result, BaseException):
                await self.aclose()
                if isinstance(result, (_WorkerLostError, TimeoutError)):
                    raise ModelLoadError("a tokenizer process did not start") from result
                raise result

    async def aclose(self) -> None:
        """End every worker. Jobs under way end with a typed error."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._idle.empty():
            await self._idle.get_nowait().kill()

    async def encode_text(self, job: EncodeText) -> list[int]:
        return await self._encode(job)

    async def encode_chat(self, job: EncodeChat) -> list[int]:
        return await self._encode(job)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        reply = await self._submit(DecodeTokens(pack_token_ids(token_ids), skip_special_tokens))
        if not isinstance(reply, Decoded):
            raise _worker_failed()
        return reply.text

    async def _encode(self, job: EncodeText | EncodeChat) -> list[int]:
        reply = await self._submit(job)
        if not isinstance(reply, Encoded):
            raise _worker_failed()
        return unpack_token_ids(reply.token_ids)

    async def _submit(self, job: Job) -> Reply:
        if self._is_closed:
            raise ApiError(ApiErrorCode.DRAINING, "the server is shutting down")
        if self._num_pending >= self._config.max_pending_jobs:
            raise ApiError(ApiErrorCode.OVERLOADED, "too many prompts wait to be tokenised")
        worker = await self._take_worker()
        # A caller that goes away must not leave half an exchange on the worker's pipes.
        task = asyncio.create_task(self._exchange(worker, job))
        self._keep(task)
        reply = await asyncio.shield(task)
        if isinstance(reply, Refused):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, reply.message, reply.param)
        return reply

    async def _take_worker(self) -> _Worker:
        self._num_pending += 1
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                return await self._idle.get()
        except TimeoutError:
            raise ApiError(
                ApiErrorCode.OVERLOADED, "no tokenizer process became free in time"
            ) from None
        finally:
            self._num_pending -= 1

    async def _exchange(self, worker: _Worker, job: Job) -> Reply:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                reply = await worker.run(job)
        except TimeoutError:
            await self._replace(worker, "ran out of time")
            raise ApiError(
                ApiErrorCode.TOKENIZER_FAILED,
                f"tokenising this prompt took longer than {self._config.timeout_s:g} s",
            ) from None
        except _WorkerLostError:
            await self._replace(worker, "died")
            raise _worker_failed() from None
        except asyncio.CancelledError:
            await worker.kill()
            raise
        self._idle.put_nowait(worker)
        return reply

    async def _replace(self, worker: _Worker, reason: str) -> None:
        _log.warning("a tokenizer process %s and is replaced", reason)
        await worker.kill()
        self._keep(asyncio.create_task(self._start_replacement()))

    async def _start_replacement(self) -> None:
        while not self._is_closed:
            try:
                self._idle.put_nowait(await _Worker.start(self._config))
                return
            except (_WorkerLostError, TimeoutError, OSError, ModelLoadError) as error:
                _log.error("a tokenizer process did not start: %s", error)
                await asyncio.sleep(1.0)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        # Reading the exception marks it as seen; whoever awaits the task gets it all the same.
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


def _worker_failed() -> ApiError:
    return ApiError(ApiErrorCode.TOKENIZER_FAILED, "the tokenizer process failed on this prompt")
