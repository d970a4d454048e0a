"""The ingress's end: when it connects again, what it refuses, what it tells of its own failures."""

import asyncio
import contextlib
import dataclasses
import logging
import threading

import msgspec
import pytest

from service.channel import client
from service.channel.client import ReplicaLink
from service.channel.errors import AuthenticationError, ChannelError
from service.channel.handshake import greet_ingress, new_channel_key
from service.channel.messages import ReplicaLoad, Welcome
from service.images.files import ImageCeilings
from tests.fakes.engine import FakeEngine
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.replica import FAST, NOTICING, FakeReplica, eventually
from workers.adapters.ref import AdapterRef
from workers.engine.pixels import ImagePixels
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.asyncio
REQUEST = GenerateRequest("r", [5], SamplingParams(max_tokens=8))


class DeafSink:
    """Takes no outputs, and counts how often it is lost, refused or dropped."""

    def __init__(self):
        self.num_lost = self.num_refused = self.num_dropped = 0

    def deliver(self, output, engine_s):
        raise AssertionError("nothing was to come")

    def lose(self):
        self.num_lost += 1

    def refuse(self):
        self.num_refused += 1

    def drop(self):
        self.num_dropped += 1


@contextlib.asynccontextmanager
async def linking(address, settings=FAST, node_id="node-1", on_change=lambda: None):
    link = ReplicaLink(address, "ingress-1", node_id, settings, on_change)
    link.start()
    try:
        yield link
    finally:
        await link.aclose()


async def delays_s(monkeypatch, errors):
    """How long a link waits between tries that fail like this; None connects and breaks at once."""
    waited_s, sleep = [], asyncio.sleep
    errors = iter(errors)

    async def connect(self):
        error = next(errors, "end")
        if error == "end":
            raise RuntimeError("all tries were made")
        if error is not None:
            raise error
        reader = asyncio.StreamReader()
        reader.feed_eof()
        return reader

    async def counted(delay_s):
        waited_s.append(delay_s)
        await sleep(0)

    with FakeReplica() as replica, monkeypatch.context() as patched:
        patched.setattr(ReplicaLink, "_connect", connect)
        patched.setattr(client.asyncio, "sleep", counted)
        settings = FAST.model_copy(update={"reconnect_initial_s": 0.1, "reconnect_max_s": 0.5})
        patched.setattr(client.random, "uniform", lambda low, high: low + high)
        link = ReplicaLink(replica.address, "ingress-1", "node-1", settings, lambda: None)
        with pytest.raises(RuntimeError, match="all tries"):
            await link._run()
    return [round(delay_s / 1.5, 6) for delay_s in waited_s]


async def test_tries_come_further_and_further_apart_up_to_the_most(monkeypatch):
    lost = ChannelError("gone")
    assert await delays_s(monkeypatch, [lost, OSError(), TimeoutError(), lost, lost]) == [
        0.1,
        0.2,
        0.4,
        0.5,
        0.5,
    ]


async def test_a_connection_that_stood_makes_the_next_try_quick_again(monkeypatch):
    lost = ChannelError("gone")
    assert await delays_s(monkeypatch, [lost, lost, None, lost]) == [0.1, 0.2, 0.1, 0.2]


async def test_a_replica_without_the_key_is_not_asked_often(monkeypatch):
    assert await delays_s(monkeypatch, [AuthenticationError("no key")]) == [0.5]


async def test_tries_of_many_ingresses_do_not_come_together(monkeypatch):
    spread = []
    monkeypatch.setattr(client.random, "uniform", lambda *bounds: spread.append(bounds) or 0.5)
    with FakeReplica() as replica:
        stranger = dataclasses.replace(replica.address, key=new_channel_key())
        async with linking(stranger) as link:
            await eventually(lambda: len(spread) > 1)
            assert not link.is_connected
            link.check_health()
    assert set(spread) == {(0.5, 1.0)}


async def test_what_ends_a_link_is_told_and_its_own_end_is_none(monkeypatch):
    async def fail(self):
        raise ZeroDivisionError("a bug")

    with FakeReplica() as replica:
        new = ReplicaLink(replica.address, "ingress-1", "node-1", FAST, lambda: None)
        new.check_health()
        async with linking(replica.address) as link:
            await eventually(lambda: link.is_connected)
            link.check_health()
        link.check_health()
        monkeypatch.setattr(ReplicaLink, "_connect", fail)
        async with linking(replica.address) as broken:
            await eventually(lambda: broken._task.done())
            with pytest.raises(ZeroDivisionError, match="a bug"):
                broken.check_health()


async def test_whoever_answers_in_the_place_of_a_replica_is_left_at_once():
    with FakeReplica() as replica:
        other = dataclasses.replace(replica.address, replica_id="replica-2")
        async with linking(other) as link:
            await asyncio.sleep(0.2)
            assert not link.is_connected
            assert link.model is None
            link.check_health()
            with pytest.raises(ChannelError, match="not connected"):
                link.submit(REQUEST, DeafSink())
        await eventually(lambda: not replica.server._connections)


async def test_without_tcp_another_nodes_link_says_why_it_does_not_connect(caplog):
    caplog.set_level(logging.INFO, "service.channel.client")
    with FakeReplica() as replica:
        assert replica.address.tcp_port == 0
        async with linking(replica.address, node_id="node-2") as link:
            await eventually(lambda: caplog.records)
            assert not link.is_connected
            link.check_health()
    assert "replica-1: the replica is on another node" in caplog.text


async def test_a_change_is_told_on_connecting_on_every_report_and_on_losing():
    changes = []
    with FakeReplica() as replica:
        link = ReplicaLink(
            replica.address,
            "ingress-1",
            "node-1",
            FAST,
            lambda: changes.append((link.is_connected, link.load.seen_sequence)),
        )
        link.start()
        await eventually(lambda: len(changes) >= 3)
        assert link.model == replica.engine.info
        assert set(changes) == {(True, 0)}
        link.load.update(ReplicaLoad(EngineStats(num_waiting=3), 7, is_draining=True))
        await link.aclose()
        assert changes[-1] == (False, 0), "a report of the past is none of what comes"
        assert not link.load.is_draining
        num_changes = len(changes)
        await link.aclose()
        assert len(changes) == num_changes


async def test_a_connection_that_comes_back_counts_its_messages_anew():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linking(replica.address) as link:
            await eventually(lambda: link.is_connected)
            assert link.submit(REQUEST, DeafSink()) == 1
            link.abort("r")
            await asyncio.sleep(0)
            assert link.submit(REQUEST, sink := DeafSink()) == 2
            link._writer.abort()
            await eventually(lambda: sink.num_lost)
            assert link.num_live_requests == 0
            await eventually(lambda: link.is_connected)
            assert link.submit(REQUEST, DeafSink()) == 1
            link.abort("r")
            assert sink.num_lost == 1


async def test_an_id_that_nobody_knows_is_not_aborted():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linking(replica.address) as link:
            await eventually(lambda: link.is_connected)
            link.abort("unknown")
            assert not link._outgoing
            assert not link._is_flush_scheduled


async def test_what_was_submitted_in_the_tick_in_which_the_connection_broke_is_lost_once():
    with FakeReplica() as replica:
        async with linking(replica.address) as link:
            await eventually(lambda: link.is_connected)
            link.submit(REQUEST, sink := DeafSink())
            link._disconnect()
            await asyncio.sleep(0)
            assert sink.num_lost == 1
            assert replica.engine.num_finished == 0


async def test_a_replica_that_does_not_read_is_left():
    settings = FAST.model_copy(update={"max_outbox_bytes": 1 << 20, "heartbeat_timeout_s": 60.0})
    with FakeReplica(settings=settings) as replica:
        async with linking(replica.address, settings) as link:
            await eventually(lambda: link.is_connected)
            may_read = threading.Event()
            replica.server._loop.call_soon_threadsafe(may_read.wait)
            try:
                sinks = [DeafSink() for _ in range(8)]
                for i, sink in enumerate(sinks):
                    large = GenerateRequest(f"r{i}", [70000] * 100_000, SamplingParams())
                    link.submit(large, sink)
                await eventually(lambda: all(sink.num_lost == 1 for sink in sinks))
                assert not link.is_connected
            finally:
                may_read.set()


async def test_a_replica_that_reads_is_kept_however_much_comes_at_once():
    """As when it is the first one that requests have waited for, or another one is lost."""
    settings = FAST.model_copy(update={"max_outbox_bytes": 1 << 16})
    with FakeReplica(FakeEngine(step_s=0.001), settings) as replica:
        async with linking(replica.address, settings) as link:
            await eventually(lambda: link.is_connected)
            ended: list[str] = []
            sinks = [DeafSink() for _ in range(8)]
            for i, sink in enumerate(sinks):
                sink.deliver = lambda output, engine_s: ended.append(output.request_id)
                large = GenerateRequest(f"r{i}", [70000] * 100_000, SamplingParams(max_tokens=1))
                link.submit(large, sink)
            await eventually(lambda: len(set(ended)) == len(sinks))
            assert not any(sink.num_lost for sink in sinks)


async def test_an_idle_link_beats_and_is_kept():
    with FakeReplica(settings=NOTICING) as replica:
        async with linking(replica.address, NOTICING) as link:
            await eventually(lambda: link.is_connected)
            writer = link._writer
            await asyncio.sleep(1.5 * NOTICING.heartbeat_timeout_s)
            assert link._writer is writer, "it was never lost"
            assert len(replica.server._connections) == 1


async def test_a_request_too_large_to_send_that_was_given_up_in_its_tick_holds_up_nothing():
    settings = FAST.model_copy(update={"max_frame_bytes": 4096})
    with FakeReplica(FakeEngine(step_s=0.005), settings) as replica:
        async with linking(replica.address, settings) as link:
            await eventually(lambda: link.is_connected)
            endless = GenerateRequest("r", [5], SamplingParams(max_tokens=100_000))
            link.submit(endless, sink := DeafSink())
            sink.deliver = lambda output, engine_s: None
            await eventually(lambda: replica.engine.running)
            large = GenerateRequest("large", [1000] * 5000, SamplingParams(max_tokens=1))
            link.submit(large, unwanted := DeafSink())
            link.abort("large")
            link.abort("r")
            await eventually(lambda: not replica.engine.running)
            assert unwanted.num_refused == unwanted.num_lost == 0
            assert link.is_connected


async def test_a_request_that_cannot_be_encoded_takes_no_other_with_it():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with linking(replica.address) as link:
            await eventually(lambda: link.is_connected)
            sinks = {name: DeafSink() for name in ("a", "bad", "b", "c")}
            for name, sink in sinks.items():
                sink.deliver = lambda output, engine_s: None
                adapter = AdapterRef("x", "/\udcff", "k") if name == "bad" else None
                sampling = SamplingParams(max_tokens=100_000)
                link.submit(GenerateRequest(name, [5], sampling, adapter=adapter), sink)
            await eventually(lambda: len(replica.engine.running) == 3)
            assert {name for name, sink in sinks.items() if sink.num_dropped} == {"bad"}
            assert all(sink.num_lost == sink.num_refused == 0 for sink in sinks.values())
            assert link.num_live_requests == 3


@contextlib.asynccontextmanager
async def a_replica_that_only_reads(address, folder):
    """In the link's own loop."""
    unheard = []

    async def serve(reader, writer):
        unheard.append(writer)
        await greet_ingress(reader, writer, address.key, Welcome("replica-1", FakeEngine().info))
        while await reader.read(1 << 16):
            pass
        writer.close()

    path = str(folder / "channel.sock")
    async with await asyncio.start_unix_server(serve, path):
        yield dataclasses.replace(address, unix_path=path)
        for writer in unheard:
            writer.transport.abort()


async def test_images_of_one_tick_do_not_hold_the_loop(tmp_path):
    item = ImagePixels(b"d" * 16, 2, 2, 2, b"", bytes(3 * ImageCeilings().max_total_shown_pixels))
    names = iter(map(str, range(100)))
    with FakeReplica() as replica:
        async with (
            a_replica_that_only_reads(replica.address, tmp_path) as address,
            linking(address, FAST.model_copy(update={"heartbeat_timeout_s": 60.0})) as link,
        ):
            await eventually(lambda: link.is_connected)
            writer = link._writer

            async def submit_all():
                for _ in range(4):
                    request = msgspec.structs.replace(REQUEST, request_id=next(names), media=[item])
                    link.submit(request, DeafSink())
                await eventually(lambda: not link._outgoing and not writer.num_unread_bytes)

            _, held = await held_units(submit_all)
            assert link._writer is writer, "it was never lost"
    assert held < MAX_UNITS
