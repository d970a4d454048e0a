"""The replica's end: what it refuses, whom it forgets, and how it ends."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from service.channel.framing import read_frame, write_frame
from service.channel.handshake import greet_replica
from service.channel.messages import Abort, Ping, Submit, decode_step_frame, encode
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, IMPATIENT, NOTICING, FakeReplica, eventually
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ErrorCode
from workers.sampling.params import SamplingParams

QUIET = FAST.model_copy(update={"heartbeat_interval_s": 30.0, "heartbeat_timeout_s": 60.0})


def request(request_id="r", max_tokens=100_000):
    return GenerateRequest(request_id, [5], SamplingParams(max_tokens=max_tokens))


class Ingress:
    """An ingress that says and hears single frames."""

    def __init__(self, reader, writer, welcome):
        self._reader, self._writer, self.welcome = reader, writer, welcome
        self._sequence = 0

    def say(self, message):
        write_frame(self._writer, encode(message))

    def submit(self, *requests):
        self._sequence += 1
        self.say(Submit(self._sequence, list(requests)))

    async def hear(self):
        return decode_step_frame(await asyncio.wait_for(read_frame(self._reader, 1 << 20), 60))

    async def ends(self):
        """How requests end, with the frame, one after another."""
        while True:
            frame = await self.hear()
            for output in frame.outputs:
                if output.finish_reason is not None:
                    yield output, frame

    async def end(self):
        return await anext(self.ends())


@contextlib.asynccontextmanager
async def ingress(replica, name="ingress-1"):
    reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
    welcome = await greet_replica(reader, writer, replica.address.key, name)
    yield Ingress(reader, writer, welcome)
    writer.transport.abort()


@pytest.mark.asyncio
async def test_whoever_comes_is_told_the_model_and_the_load_at_once():
    with FakeReplica(settings=QUIET) as replica:
        async with ingress(replica) as one:
            assert one.welcome.replica_id == "replica-1"
            assert one.welcome.model == replica.engine.info
            first = await one.hear()
            assert first.outputs == []
            assert (first.load.seen_sequence, first.load.is_draining) == (0, False)


@pytest.mark.asyncio
async def test_an_id_that_is_in_use_is_refused_and_its_first_request_goes_on():
    with FakeReplica(FakeEngine(step_s=0.002), QUIET) as replica:
        async with ingress(replica) as one:
            one.submit(request("a", max_tokens=400))
            one.submit(request("a"), request("b", max_tokens=2))
            ends = {}
            async for output, frame in one.ends():
                ends.setdefault(output.request_id, []).append((output, frame))
                if sum(map(len, ends.values())) == 3:
                    break
            (refusal, frame), (end, _) = ends["a"]
            assert refusal.finish_reason is FinishReason.ERROR
            assert (refusal.token_ids, refusal.error.code) == ([], ErrorCode.INVALID_REQUEST)
            assert refusal.error.message == "id is in use"
            assert frame.engine_s["a"] == 0.0
            assert end.finish_reason is FinishReason.LENGTH
            assert ends["b"][0][0].finish_reason is FinishReason.LENGTH
        assert replica.engine.num_finished == 2


@pytest.mark.asyncio
async def test_an_id_can_be_used_again_once_its_request_has_ended_or_was_aborted():
    with FakeReplica(FakeEngine(step_s=0.002), QUIET) as replica:
        async with ingress(replica) as one:
            one.submit(request("a", max_tokens=1))
            assert (await one.end())[0].finish_reason is FinishReason.LENGTH
            one.submit(request("a"), request("b"))
            one.say(Abort(["unknown", "a"]))
            one.submit(request("a", max_tokens=3))
            output, frame = await one.end()
            assert (output.request_id, output.finish_reason) == ("a", FinishReason.LENGTH)
            assert list(frame.engine_s) == ["a"]
            assert replica.server.num_live_requests == 1, "b still runs"


@pytest.mark.asyncio
async def test_the_time_at_the_replica_runs_from_a_requests_arrival_to_its_last_step():
    with FakeReplica(FakeEngine(step_s=0.05), QUIET) as replica:
        async with ingress(replica) as one:
            started_s = asyncio.get_running_loop().time()
            one.submit(request("a", max_tokens=6))
            _, frame = await one.end()
            passed_s = asyncio.get_running_loop().time() - started_s
            assert 0.2 < frame.engine_s["a"] <= passed_s


@pytest.mark.asyncio
async def test_outputs_go_to_the_ingress_whose_request_it_is_and_to_no_other():
    with FakeReplica(FakeEngine(step_s=0.002), QUIET) as replica:
        async with ingress(replica, "one") as one, ingress(replica, "two") as two:
            one.submit(request("a", max_tokens=3))
            two.submit(request("a", max_tokens=5), request("b", max_tokens=400))
            assert (await one.end())[0].finish_reason is FinishReason.LENGTH
            assert (await two.end())[0].request_id == "a"
            assert (await two.end())[0].request_id == "b"
        await eventually(lambda: not replica.server._connections)


@pytest.mark.asyncio
async def test_the_log_names_the_ingress_that_left_was_silent_or_did_not_read(caplog):
    caplog.set_level(logging.INFO, "service.channel.server")
    with FakeReplica(FakeEngine(step_s=0.001)) as replica:
        async with ingress(replica, "leaving"):
            pass
        await eventually(lambda: "ingress leaving left" in caplog.text)
    with FakeReplica(FakeEngine(step_s=0.001), IMPATIENT) as replica:
        async with ingress(replica, "silent"):
            await eventually(lambda: "ingress silent is silent: dropped" in caplog.text)
    narrow = QUIET.model_copy(update={"max_outbox_bytes": 1 << 10})
    with FakeReplica(FakeEngine(step_s=0.001), narrow) as replica:
        async with ingress(replica, "full") as one:
            one._writer.transport.pause_reading()
            one.submit(*(request(f"r{i}") for i in range(64)))
            await eventually(lambda: "ingress full does not read: dropped" in caplog.text)
            await eventually(lambda: replica.server.num_live_requests == 0)


@pytest.mark.asyncio
async def test_an_ingress_that_says_something_now_and_then_is_kept():
    with FakeReplica(settings=NOTICING) as replica:
        async with ingress(replica) as one:
            await one.hear()
            (connection,) = replica.server._connections
            for _ in range(6):
                await asyncio.sleep(NOTICING.heartbeat_timeout_s / 3)
                one.say(Ping())
            assert connection in replica.server._connections


@pytest.mark.asyncio
async def test_an_idle_replica_beats():
    with FakeReplica() as replica:
        async with ingress(replica) as one:
            for _ in range(4):
                frame = await one.hear()
                assert (frame.outputs, frame.load is None) == ([], False)


@pytest.mark.asyncio
async def test_whoever_does_not_finish_the_handshake_in_time_is_sent_away(caplog):
    settings = QUIET.model_copy(update={"handshake_timeout_s": 0.1})
    with FakeReplica(settings=settings) as replica:
        reader, writer = await asyncio.open_unix_connection(replica.address.unix_path)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.transport.abort()
    assert "refused a channel connection" in caplog.text


@pytest.mark.asyncio
async def test_closing_sends_what_is_queued_and_leaves_nothing():
    with FakeReplica(FakeEngine(step_s=0.002), QUIET) as replica:
        async with ingress(replica) as one:
            one.submit(request("a"))
            await eventually(lambda: replica.server.num_live_requests)
            (engine_id,) = replica.server._by_engine_id
            folder = Path(replica.address.unix_path).parent
            assert folder.name.startswith("tessera-")
            last = StepOutput(engine_id, [7], FinishReason.STOP)
            replica.server.publish([last])
            await asyncio.to_thread(replica.server.close, 5.0)
            output, _ = await one.end()
            assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, [7])
            assert not folder.exists()
            assert not replica.server._thread.is_alive()


def test_what_has_closed_may_be_closed_drained_and_published_to():
    with FakeReplica() as replica:
        replica.server.close()
        replica.server.close()
        replica.server.drain()
        replica.server.publish([StepOutput("r#0", [1])])


def test_what_has_not_started_can_be_closed():
    FakeReplica().server.close()


@pytest.mark.asyncio
async def test_a_replica_listens_on_its_own_address_only():
    with FakeReplica(FakeEngine(), QUIET.model_copy(update={"transport": "unix+tcp"})) as replica:
        host, port = replica.address.tcp_host, replica.address.tcp_port
        assert host == "127.0.0.1"
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)
