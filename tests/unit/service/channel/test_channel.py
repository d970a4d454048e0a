"""The token way over real sockets on one machine, with a fake engine behind the real loop."""

import asyncio
import contextlib
import struct
import time

import msgspec
import pytest

from service.channel.address import ReplicaAddress
from service.channel.client import ReplicaLink
from service.channel.errors import AuthenticationError, ChannelError
from service.channel.framing import read_frame, write_frame
from service.channel.handshake import greet_replica, new_channel_key
from service.channel.messages import PROTOCOL_VERSION, ClientHello, Ping, Submit, encode
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, IMPATIENT, FakeReplica, eventually
from workers.engine.loop import EngineLoop
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ErrorCode
from workers.sampling.params import SamplingParams


class Sink:
    """Collects one request's outputs."""

    def __init__(self):
        self.outputs: list[StepOutput] = []
        self.engine_s: float | None = None
        self.is_lost = False
        self.is_refused = False
        self.done = asyncio.Event()

    @property
    def token_ids(self):
        return [t for output in self.outputs for t in output.token_ids]

    def deliver(self, output, engine_s):
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.engine_s = engine_s
            self.done.set()

    def lose(self):
        self.is_lost = True
        self.done.set()

    def refuse(self):
        self.is_refused = True
        self.done.set()

    async def wait(self, timeout_s=60.0):
        async with asyncio.timeout(timeout_s):
            await self.done.wait()


@contextlib.asynccontextmanager
async def linked(address, settings=FAST, node_id="node-1"):
    link = ReplicaLink(address, "ingress-1", node_id, settings, lambda: None)
    link.start()
    await eventually(lambda: link.is_connected)
    yield link
    await link.aclose()


async def ends_with_a_closed_connection(reader):
    async def read_to_the_end():
        while True:
            await read_frame(reader, 1 << 20)

    with pytest.raises(ChannelError):
        await asyncio.wait_for(read_to_the_end(), 60)


def request(request_id="r", prompt=(5,), max_tokens=8):
    return GenerateRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens))


@pytest.mark.asyncio
async def test_outputs_arrive_in_order_and_complete():
    with FakeReplica() as replica:
        async with linked(replica.address) as link:
            sinks = [Sink() for _ in range(32)]
            for i, sink in enumerate(sinks):
                link.submit(request(f"r{i}", prompt=(i,), max_tokens=i + 1), sink)
            for i, sink in enumerate(sinks):
                await sink.wait()
                assert sink.token_ids == list(range(i + 1, 2 * i + 2))
                assert sink.outputs[-1].finish_reason is FinishReason.LENGTH
                assert sink.engine_s is not None
            assert link.num_live_requests == 0
        assert replica.server.num_live_requests == 0


@pytest.mark.asyncio
async def test_submits_of_one_tick_travel_in_one_frame():
    frames: list[int] = []

    class CountingLoop(EngineLoop):
        def submit(self, requests):
            frames.append(len(requests))
            super().submit(requests)

    replica = FakeReplica()
    replica.loop = CountingLoop(replica.engine, replica.server.publish, replica.failures.append)
    with replica:
        async with linked(replica.address) as link:
            sinks = [Sink() for _ in range(10)]
            for i, sink in enumerate(sinks):
                link.submit(request(f"r{i}"), sink)
            for sink in sinks:
                await sink.wait()
    assert frames == [10]


@pytest.mark.asyncio
async def test_a_resumed_request_reaches_the_engine_with_its_output():
    with FakeReplica() as replica:
        async with linked(replica.address) as link:
            sink = Sink()
            resumed = msgspec.structs.replace(request(max_tokens=8), resumed_token_ids=[6, 7, 8])
            link.submit(resumed, sink)
            await sink.wait()
            assert sink.token_ids == [9, 10, 11, 12, 13]


@pytest.mark.asyncio
async def test_abort_ends_the_request_at_the_engine_and_delivers_nothing_more():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linked(replica.address) as link:
            sink = Sink()
            link.submit(request(max_tokens=100_000), sink)
            await eventually(lambda: len(sink.outputs) > 2)
            link.abort("r")
            num_outputs = len(sink.outputs)
            await eventually(lambda: not replica.engine.running)
            assert len(sink.outputs) == num_outputs
            assert replica.server.num_live_requests == 0
            again = Sink()
            link.submit(request(max_tokens=3), again)
            await again.wait()
            assert again.token_ids == [6, 7, 8]


@pytest.mark.asyncio
async def test_a_lost_ingress_aborts_only_its_own_requests():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linked(replica.address) as stays:
            kept = Sink()
            async with linked(replica.address) as leaves:
                lost = Sink()
                stays.submit(request("same-id", max_tokens=200), kept)
                leaves.submit(request("same-id", max_tokens=100_000), lost)
                await eventually(lambda: len(replica.engine.running) == 2)
            assert lost.is_lost
            await eventually(lambda: len(replica.engine.running) <= 1)
            await kept.wait()
            assert kept.token_ids == list(range(6, 206))


@pytest.mark.asyncio
async def test_a_reader_that_stops_reading_is_dropped_and_others_keep_their_pace():
    settings = FAST.model_copy(update={"max_outbox_bytes": 20_000, "heartbeat_timeout_s": 60.0})
    with FakeReplica(FakeEngine(step_s=0.001), settings) as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path, limit=1024)
        await greet_replica(reader, writer, replica.address.key, "slow")
        writer.transport.pause_reading()
        slow = [request(f"slow{i}", max_tokens=1_000_000) for i in range(64)]
        write_frame(writer, encode(Submit(1, slow)))
        await eventually(lambda: len(replica.engine.running) == 64)
        async with linked(replica.address, settings) as link:
            sink = Sink()
            link.submit(request("quick", max_tokens=200), sink)
            await sink.wait()
            assert len(sink.token_ids) == 200
            await eventually(lambda: not replica.engine.running)
        writer.transport.abort()


@pytest.mark.asyncio
async def test_a_silent_ingress_is_dropped():
    with FakeReplica(FakeEngine(step_s=0.005), IMPATIENT) as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        await greet_replica(reader, writer, replica.address.key, "silent")
        write_frame(writer, encode(Submit(1, [request(max_tokens=100_000)])))
        await eventually(lambda: replica.engine.num_output_tokens)
        await eventually(lambda: not replica.engine.running)
        assert replica.engine.num_output_tokens < 100_000
        writer.transport.abort()


@pytest.mark.asyncio
async def test_the_link_reconnects_and_live_requests_are_lost_once():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linked(replica.address) as link:
            sink = Sink()
            link.submit(request(max_tokens=100_000), sink)
            await eventually(lambda: sink.outputs)
            replica.server._loop.call_soon_threadsafe(
                lambda: [replica.server._drop(c) for c in list(replica.server._connections)]
            )
            await sink.wait()
            assert sink.is_lost
            assert not link.is_connected or link.num_live_requests == 0
            await eventually(lambda: link.is_connected)
            again = Sink()
            link.submit(request("again", max_tokens=2), again)
            await again.wait()
            assert again.token_ids == [6, 7]


@pytest.mark.asyncio
async def test_a_replica_that_falls_silent_is_noticed():
    deaf = FAST.model_copy(update={"heartbeat_interval_s": 10.0, "heartbeat_timeout_s": 20.0})
    with FakeReplica(settings=deaf) as replica:
        started_s = time.monotonic()
        async with linked(replica.address, IMPATIENT) as link:
            await eventually(lambda: not link.is_connected)
            assert time.monotonic() - started_s >= 0.4


@pytest.mark.asyncio
async def test_a_draining_replica_says_so_and_refuses():
    with FakeReplica() as replica:
        async with linked(replica.address) as link:
            assert not link.load.is_draining
            await asyncio.to_thread(replica.server.drain)
            sink = Sink()
            link.submit(request(), sink)
            await sink.wait()
            assert sink.outputs[0].error.code is ErrorCode.ENGINE_DRAINING
            assert link.load.is_draining


@pytest.mark.asyncio
async def test_tcp_serves_another_node():
    settings = FAST.model_copy(update={"transport": "unix+tcp"})
    with FakeReplica(settings=settings) as replica:
        assert replica.address.is_reachable_from("node-2")
        async with linked(replica.address, settings, node_id="node-2") as link:
            sink = Sink()
            link.submit(request(max_tokens=2), sink)
            await sink.wait()
            assert sink.token_ids == [6, 7]


@pytest.mark.asyncio
async def test_without_tcp_another_node_cannot_reach_the_replica():
    with FakeReplica() as replica:
        assert replica.address.tcp_host is None
        assert not replica.address.is_reachable_from("node-2")


@pytest.mark.asyncio
async def test_a_wrong_key_is_refused_by_both_ends():
    with FakeReplica() as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        with pytest.raises(AuthenticationError):
            await greet_replica(reader, writer, new_channel_key(), "thief")
        writer.transport.abort()
        assert not replica.server._connections


@pytest.mark.asyncio
async def test_an_ingress_that_skips_its_proof_is_refused():
    from service.channel.messages import ClientProof

    with FakeReplica() as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        write_frame(writer, encode(ClientHello(PROTOCOL_VERSION, b"n" * 32, "thief")))
        await read_frame(reader, 1 << 16)
        write_frame(writer, encode(ClientProof(b"x" * 32)))
        with pytest.raises(ChannelError):
            await read_frame(reader, 1 << 16)
        writer.transport.abort()
        assert not replica.server._connections


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", 0),
        struct.pack(">I", 3) + b"\x80",
    ],
)
@pytest.mark.parametrize("is_greeted", [False, True])
async def test_garbage_closes_its_connection_and_nothing_else(garbage, is_greeted):
    with FakeReplica() as replica:
        async with linked(replica.address) as link:
            reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
            if is_greeted:
                await greet_replica(reader, writer, replica.address.key, "broken")
            writer.write(garbage)
            if len(garbage) == 5:  # a frame cut short ends with its connection
                writer.write_eof()
            await ends_with_a_closed_connection(reader)
            writer.transport.abort()
            sink = Sink()
            link.submit(request(max_tokens=1), sink)
            await sink.wait()
            assert sink.token_ids == [6]


@pytest.mark.asyncio
async def test_a_message_meant_for_the_other_direction_is_refused():
    from service.channel.messages import StepFrame

    with FakeReplica() as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        await greet_replica(reader, writer, replica.address.key, "confused")
        write_frame(writer, encode(Ping()))
        write_frame(writer, encode(StepFrame([], {})))
        await ends_with_a_closed_connection(reader)
        writer.transport.abort()


@pytest.mark.asyncio
async def test_a_tick_larger_than_a_frame_is_split_and_a_request_larger_than_one_is_refused():
    settings = FAST.model_copy(update={"max_frame_bytes": 4096})
    with FakeReplica(settings=settings) as replica:
        async with linked(replica.address, settings) as link:
            sinks = [Sink() for _ in range(12)]
            for i, sink in enumerate(sinks):
                link.submit(request(f"r{i}", prompt=[1000] * 300, max_tokens=2), sink)
            huge = Sink()
            link.submit(request("huge", prompt=[1000] * 5000), huge)
            for sink in sinks:
                await sink.wait()
                assert sink.token_ids == [1001, 1002]
            await huge.wait()
            assert huge.is_refused


@pytest.mark.asyncio
async def test_a_report_says_the_last_message_that_it_includes():
    with FakeReplica(FakeEngine(step_s=0.02, max_running=1)) as replica:
        async with linked(replica.address) as link:
            sinks = [Sink() for _ in range(4)]
            for i, sink in enumerate(sinks):
                number = link.submit(request(f"r{i}", prompt=[1] * 100, max_tokens=3), sink)
                assert number == 1
            await eventually(lambda: link.load.seen_sequence == 1)
            assert 0 < link.load.queued_tokens <= 400
            assert link.submit(request("later", max_tokens=1), late := Sink()) == 2
            assert link.submit(request("same tick", max_tokens=1), Sink()) == 2
            await late.wait()
            await eventually(lambda: link.load.seen_sequence == 2)
            await eventually(lambda: link.load.running_tokens == 0)


def test_the_key_never_shows_in_a_representation():
    address = ReplicaAddress("r", "m", "n", "/p", None, 0, b"secret-key")
    assert "secret" not in repr(address)


@pytest.mark.asyncio
async def test_the_socket_is_private():
    import os
    import stat

    with FakeReplica() as replica:
        mode = os.stat(replica.address.unix_path).st_mode
        assert stat.S_IMODE(mode) == 0o600


@pytest.mark.asyncio
async def test_a_server_that_is_closed_says_nothing_of_its_connections_whatever_they_were_doing(
    caplog,
):
    with FakeReplica() as replica:
        async with linked(replica.address):
            reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
            write_frame(writer, encode(ClientHello(PROTOCOL_VERSION, bytes(32), "half greeted")))
            await read_frame(reader, 1 << 20)
            await asyncio.to_thread(replica.kill)
            await ends_with_a_closed_connection(reader)
            writer.close()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
