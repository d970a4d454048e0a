"""The replica's end of the token way, on a thread and event loop of its own.

The engine's thread hands over a step's outputs with one call; grouping by ingress, encoding and
writing happen here. A slow or dead ingress is dropped and its requests are aborted: it never holds
up the engine or another ingress. Knows no Ray.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from service.channel.address import ReplicaAddress
from service.channel.connection import IngressConnection, LiveRequest
from service.channel.errors import ChannelError
from service.channel.framing import read_frame
from service.channel.handshake import greet_ingress, new_channel_key
from service.channel.messages import Abort, SetSleep, Submit, Welcome, decode_ingress_message
from service.channel.settings import ChannelSettings
from workers.engine.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputError,
    StepOutput,
)
from workers.engine.rest import SleepOrder
from workers.errors import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RequestSink(Protocol):
    """What the channel needs of an engine loop; all of it callable from any thread."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def set_sleep(self, order: SleepOrder) -> None: ...

    def stats(self) -> EngineStats: ...


class ChannelServer:
    """publish() may be called from any thread, the other public methods from the owner's."""

    def __init__(
        self, replica_id: str, node_id: str, settings: ChannelSettings, tcp_host: str
    ) -> None:
        """tcp_host: the node's address, listened on only when settings.transport says so."""
        self._replica_id = replica_id
        self._node_id = node_id
        self._settings = settings
        self._tcp_host = tcp_host if settings.transport == "unix+tcp" else None
        self._key = new_channel_key()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tessera-channel", daemon=True)
        self._engine_ids = itertools.count()
        self._connections: set[IngressConnection] = set()
        self._by_engine_id: dict[str, LiveRequest] = {}
        self._is_draining = False
        self._is_closed = False

    def start(self, engine: RequestSink) -> ReplicaAddress:
        """Listen and accept; returns where. Raises OSError if no socket can be had."""
        self._engine = engine
        self._folder = Path(tempfile.mkdtemp(prefix="tessera-"))
        self._thread.start()
        tcp_port = self._call(self._listen())
        return ReplicaAddress(
            self._replica_id,
            engine.info.name,
            self._node_id,
            str(self._unix_path),
            self._tcp_host,
            tcp_port,
            self._key,
        )

    def publish(self, outputs: list[StepOutput]) -> None:
        """Send one step's outputs to their ingresses. Takes the outputs over."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._dispatch, outputs, time.monotonic())

    def drain(self) -> None:
        """Tell every ingress to send no more; requests that cross this message are refused."""
        if not self._is_closed:
            self._call(self._drain())

    @property
    def num_live_requests(self) -> int:
        return len(self._by_engine_id)

    def close(self, flush_timeout_s: float = 1.0) -> None:
        """Send what is queued, for at most flush_timeout_s, then drop every connection."""
        if self._is_closed or not self._thread.is_alive():
            return
        self._is_closed = True
        self._call(self._close(flush_timeout_s))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _unix_path(self) -> Path:
        return self._folder / "channel.sock"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> int:
        servers = [await asyncio.start_unix_server(self._serve, str(self._unix_path))]
        os.chmod(self._unix_path, 0o600)
        tcp_port = 0
        if self._tcp_host is not None:
            servers.append(await asyncio.start_server(self._serve, self._tcp_host, 0))
            tcp_port = servers[-1].sockets[0].getsockname()[1]
        self._servers = servers
        self._heartbeat = asyncio.create_task(self._beat())
        return tcp_port

    async def _close(self, flush_timeout_s: float) -> None:
        self._heartbeat.cancel()
        for server in self._servers:
            server.close()
        finishing = [asyncio.create_task(c.finish()) for c in self._connections]
        if finishing:
            await asyncio.wait(finishing, timeout=flush_timeout_s)
        for connection in list(self._connections):
            connection.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _drain(self) -> None:
        self._is_draining = True
        for connection in list(self._connections):
            self._send(connection, [], {})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Only _close() cancels this, and Python 3.11 reports a cancelled handler as a failed one.
        with contextlib.suppress(asyncio.CancelledError):
            await self._converse(reader, writer)
        writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            connection = await self._greet(reader, writer)
        except (ChannelError, TimeoutError) as error:
            logger.warning("refused a channel connection: %s", error)
            return
        self._connections.add(connection)
        self._send(connection, [], {})
        try:
            while True:
                body = await read_frame(reader, self._settings.max_frame_bytes)
                self._receive(connection, body)
        except ChannelError as error:
            logger.info("ingress %s left: %s", connection.ingress_id, error)
        finally:
            self._drop(connection)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> IngressConnection:
        async with asyncio.timeout(self._settings.handshake_timeout_s):
            welcome = Welcome(self._replica_id, self._engine.info)
            ingress_id = await greet_ingress(reader, writer, self._key, welcome)
        return IngressConnection(ingress_id, writer, self._settings)

    def _receive(self, connection: IngressConnection, body: bytes | bytearray) -> None:
        connection.on_heard()
        message = decode_ingress_message(body)
        if isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Abort):
            self._abort([connection.live[i] for i in message.request_ids if i in connection.live])
        elif isinstance(message, SetSleep):
            logger.info("ingress %s orders %s", connection.ingress_id, message.order)
            self._engine.set_sleep(message.order)

    def _submit(self, connection: IngressConnection, message: Submit) -> None:
        connection.seen_sequence = message.sequence
        accepted: list[GenerateRequest] = []
        refused: list[StepOutput] = []
        for request in message.requests:
            if self._is_draining:
                refused.append(_refusal(request, ErrorCode.ENGINE_DRAINING, "shutting down"))
            elif request.request_id in connection.live:
                refused.append(_refusal(request, ErrorCode.INVALID_REQUEST, "id is in use"))
            else:
                accepted.append(self._register(connection, request))
        if accepted:
            self._engine.submit(accepted)
        if refused:
            self._send(connection, refused, {o.request_id: 0.0 for o in refused})

    def _register(self, connection: IngressConnection, request: GenerateRequest) -> GenerateRequest:
        engine_id = f"{request.request_id}#{next(self._engine_ids)}"
        live = LiveRequest(connection, request.request_id, engine_id, time.monotonic())
        connection.live[request.request_id] = live
        self._by_engine_id[engine_id] = live
        return msgspec.structs.replace(request, request_id=engine_id)

    def _abort(self, requests: list[LiveRequest]) -> None:
        for live in requests:
            self._forget(live)
        if requests:
            self._engine.abort([live.engine_id for live in requests])

    def _forget(self, live: LiveRequest) -> None:
        del self._by_engine_id[live.engine_id]
        del live.connection.live[live.request_id]

    def _drop(self, connection: IngressConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            connection.close()
            self._abort(list(connection.live.values()))

    def _dispatch(self, outputs: list[StepOutput], step_end_s: float) -> None:
        frames: dict[IngressConnection, tuple[list[StepOutput], dict[str, float]]] = {}
        for output in outputs:
            live = self._by_engine_id.get(output.request_id)
            if live is None:  # aborted, or its ingress has gone
                continue
            output.request_id = live.request_id
            mine, engine_s = frames.setdefault(live.connection, ([], {}))
            mine.append(output)
            if output.finish_reason is not None:
                engine_s[live.request_id] = step_end_s - live.arrived_s
                self._forget(live)
        for connection, (mine, engine_s) in frames.items():
            self._send(connection, mine, engine_s)

    def _send(
        self, connection: IngressConnection, outputs: list[StepOutput], engine_s: dict[str, float]
    ) -> None:
        connection.send(outputs, engine_s, self._engine.stats(), self._is_draining)
        if connection.is_overfull:
            logger.warning("ingress %s does not read: dropped", connection.ingress_id)
            self._drop(connection)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.look_interval_s)
            for connection in list(self._connections):
                if connection.look_if_silent():
                    logger.warning("ingress %s is silent: dropped", connection.ingress_id)
                    self._drop(connection)
                elif connection.is_load_due(time.monotonic()):
                    self._send(connection, [], {})


def _refusal(request: GenerateRequest, code: ErrorCode, message: str) -> StepOutput:
    return StepOutput(
        request_id=request.request_id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=OutputError(code, message),
    )
