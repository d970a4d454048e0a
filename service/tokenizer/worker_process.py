"""WorkerProcess: the ingress's end of one tokenizer process. One job at a time. Knows no queue."""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from service.tokenizer.jobs import FRAME_HEADER, Job, LoadFailed, Reply, frame
from workers.errors import ModelLoadError

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WorkerLostError(Exception):
    """The process ended or answered with something that is not a reply."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """module, arguments: of the program. start_timeout_s: until it is ready."""

    module: str
    arguments: tuple[str, ...]
    start_timeout_s: float


class WorkerProcess:
    """start(), then run() again and again, kill() at the end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @classmethod
    async def start(cls, options: WorkerOptions) -> "WorkerProcess":
        """Raises ModelLoadError, WorkerLostError, TimeoutError or OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            options.module,
            *options.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_SOURCE_ROOT,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(options.start_timeout_s):
                reply = await worker._receive()
        except BaseException:
            await worker.kill()
            raise
        if isinstance(reply, LoadFailed):
            await worker.kill()
            raise ModelLoadError(reply.message)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Seconds of CPU that the process has had; 0 if it is gone. See proc_pid_stat(5)."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S

    async def run(self, job: Job) -> Reply:
        """Raises WorkerLostError."""
        writer = self._process.stdin
        if writer is None:
            raise WorkerLostError
        try:
            writer.write(frame(msgspec.msgpack.encode(job)))
            await writer.drain()
        except ConnectionError as error:
            raise WorkerLostError from error
        return await self._receive()

    async def _receive(self) -> Reply:
        reader = self._process.stdout
        if reader is None:
            raise WorkerLostError
        try:
            (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
            payload = await reader.readexactly(size)
            reply: Reply = self._decoder.decode(payload)
        except (EOFError, ConnectionError, msgspec.DecodeError) as error:
            raise WorkerLostError from error
        return reply

    async def kill(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
