"""The ingress's end of the token way: one link to one replica, reconnecting while it is wanted.

Requests submitted within one event-loop tick leave in one frame. Runs on the ingress's event loop
only. Knows no routing: it reports what was lost and leaves what follows to whoever submitted.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from service.channel.address import ReplicaAddress
from service.channel.errors import AuthenticationError, ChannelError
from service.channel.framing import LENGTH_BYTES, FrameWriter, read_frame
from service.channel.handshake import greet_replica
from service.channel.load import LoadView
from service.channel.messages import (
    Abort,
    IngressMessage,
    Ping,
    SetSleep,
    Submit,
    decode_step_frame,
    encode,
)
from service.channel.outgoing import Outgoing
from service.channel.settings import ChannelSettings
from service.channel.silence import Silence
from service.channel.unread import Unread
from workers.engine.protocol import GenerateRequest, ModelInfo, StepOutput
from workers.engine.rest import SleepOrder

logger = logging.getLogger(__name__)

READ_BUFFER_BYTES = 1 << 20
_UNENCODABLE = ValueError, TypeError, OverflowError, msgspec.MsgspecError
"""What msgspec raises for values that msgpack has no bytes for: text that is no Unicode is one."""


class OutputSink(Protocol):
    """Where one request's outputs go. Called on the event loop; must not block."""

    def deliver(self, output: StepOutput, engine_s: float | None) -> None:
        """engine_s: on the last output, seconds that the request spent at the replica."""

    def lose(self) -> None:
        """The connection broke before the last output. Nothing else will be delivered."""

    def refuse(self) -> None:
        """The request exceeds the channel's frame limit and was not sent."""

    def drop(self) -> None:
        """The request cannot be encoded and was not sent."""


class ReplicaLink:
    """on_change is called when the link connects, disconnects or learns a new load."""

    def __init__(
        self,
        address: ReplicaAddress,
        ingress_id: str,
        node_id: str,
        settings: ChannelSettings,
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        self.model: ModelInfo | None = None
        self.load = LoadView(settings.stall_timeout_s)
        self._ingress_id = ingress_id
        self._is_local = address.node_id == node_id
        self._settings = settings
        self._on_change = on_change
        self._writer: FrameWriter | None = None
        self._sinks: dict[str, OutputSink] = {}
        self._outgoing = Outgoing()
        self._is_flush_scheduled = False
        self._silence = Silence(settings.look_interval_s, 0.0)
        self._unread = Unread(settings.max_outbox_bytes)
        self._last_sent_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def replica_id(self) -> str:
        return self.address.replica_id

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    @property
    def num_live_requests(self) -> int:
        return len(self._sinks)

    def start(self) -> None:
        """Connect in the background, again and again until aclose()."""
        self._task = asyncio.create_task(self._run())

    def check_health(self) -> None:
        """Raise what ended the link's task, if anything but aclose() did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def submit(self, request: GenerateRequest, sink: OutputSink) -> int:
        """Send the request with the others of this tick; returns the number of their message.

        Reports tell the last one that they include. Raises ChannelError if not connected.
        """
        if self._writer is None:
            raise ChannelError("not connected")
        self._sinks[request.request_id] = sink
        sequence = self._outgoing.submit(request)
        self._schedule_flush()
        return sequence

    def abort(self, request_id: str) -> None:
        """End a request; its sink hears nothing more. Unknown ids are ignored."""
        if self._sinks.pop(request_id, None) is None:
            return
        self._outgoing.abort(request_id)
        self._schedule_flush()

    def set_sleep(self, order: SleepOrder) -> None:
        """Nothing is sent while it is not connected; load says when it has been done."""
        self._send(SetSleep(order))

    async def aclose(self) -> None:
        """Disconnect and report every live request as lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._disconnect()

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if self._writer is None:  # lost since: the sinks have been told
            self._outgoing = Outgoing()
            return
        requests = self._outgoing.next_requests()
        if requests:
            self._send_submit(requests)
        aborts = self._outgoing.next_aborts()
        if aborts:
            self._send(Abort(aborts))
        if self._outgoing:
            self._schedule_flush()

    def _send_submit(self, requests: list[GenerateRequest]) -> None:
        try:
            body = encode(Submit(self._outgoing.sequence, requests))
        except _UNENCODABLE as error:
            if not self._send_halves(requests):
                self._drop(requests[0], error)
            return
        if len(body) + LENGTH_BYTES <= self._settings.max_frame_bytes:
            self._write(body)
        elif not self._send_halves(requests):
            sink = self._sinks.pop(requests[0].request_id, None)
            if sink is not None:
                sink.refuse()

    def _send_halves(self, requests: list[GenerateRequest]) -> bool:
        """Whether there are any: what is wrong with one request is no other's."""
        middle = len(requests) // 2
        if middle:
            self._send_submit(requests[:middle])
            self._send_submit(requests[middle:])
        return middle > 0

    def _drop(self, request: GenerateRequest, error: Exception) -> None:
        logger.error("request %r cannot be encoded", request.request_id, exc_info=error)
        sink = self._sinks.pop(request.request_id, None)
        if sink is not None:
            sink.drop()

    def _send(self, message: IngressMessage) -> None:
        self._write(encode(message))

    def _write(self, body: bytes) -> None:
        if self._writer is not None:
            self._writer.write(body)
            self._unread.add(LENGTH_BYTES + len(body))
            self._last_sent_s = time.monotonic()

    async def _run(self) -> None:
        delay_s = self._settings.reconnect_initial_s
        while True:
            try:
                reader = await self._connect()
                delay_s = self._settings.reconnect_initial_s
                await self._read(reader)
            except AuthenticationError as error:
                logger.error("replica %s: %s", self.replica_id, error)
                delay_s = self._settings.reconnect_max_s
            except (ChannelError, OSError, TimeoutError) as error:
                logger.info("replica %s: %s", self.replica_id, error)
            self._disconnect()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._settings.reconnect_max_s)

    async def _connect(self) -> asyncio.StreamReader:
        async with asyncio.timeout(self._settings.handshake_timeout_s):
            reader, writer = await self._open()
            try:
                welcome = await greet_replica(reader, writer, self.address.key, self._ingress_id)
            except BaseException:
                writer.transport.abort()
                raise
        if welcome.replica_id != self.replica_id:
            writer.transport.abort()
            raise ChannelError(f"another replica answers there: {welcome.replica_id}")
        self.model = welcome.model
        self._outgoing = Outgoing()
        self.load.clear()
        self._last_sent_s = time.monotonic()
        self._silence.on_heard(self._last_sent_s)
        self._unread = Unread(self._settings.max_outbox_bytes)
        self._writer = FrameWriter(writer)
        self._on_change()
        return reader

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._is_local:
            return await asyncio.open_unix_connection(
                self.address.unix_path, limit=READ_BUFFER_BYTES
            )
        if self.address.tcp_host is None:
            raise ChannelError("the replica is on another node and does not listen on TCP")
        return await asyncio.open_connection(
            self.address.tcp_host, self.address.tcp_port, limit=READ_BUFFER_BYTES
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                body = await read_frame(reader, self._settings.max_frame_bytes)
                self._silence.on_heard(time.monotonic())
                self._receive(body)
        finally:
            watch.cancel()

    def _receive(self, body: bytes | bytearray) -> None:
        frame = decode_step_frame(body)
        for output in frame.outputs:
            if output.finish_reason is None:
                sink = self._sinks.get(output.request_id)
                if sink is not None:
                    sink.deliver(output, None)
            else:
                self._finish(output, frame.engine_s.get(output.request_id))
        if frame.load is not None:
            self.load.update(frame.load)
            self._on_change()

    def _finish(self, output: StepOutput, engine_s: float | None) -> None:
        sink = self._sinks.pop(output.request_id, None)
        if sink is not None:
            sink.deliver(output, engine_s)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.look_interval_s)
            now = time.monotonic()
            if self._silence.look(now) > self._settings.heartbeat_timeout_s:
                self._leave("is silent")
            elif self._writer is not None and self._unread.look(self._writer.num_unread_bytes):
                self._leave("does not read")
            elif now - self._last_sent_s > self._settings.heartbeat_interval_s:
                self._send(Ping())

    def _leave(self, reason: str) -> None:
        logger.warning("replica %s %s: disconnected", self.replica_id, reason)
        if self._writer is not None:
            self._writer.abort()

    def _disconnect(self) -> None:
        if self._writer is None:
            return
        self._writer.abort()
        self._writer = None
        lost, self._sinks = self._sinks, {}
        self.load.clear()
        self._on_change()
        for sink in lost.values():
            sink.lose()
