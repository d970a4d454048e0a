"""A replica's life without Serve: start, announce, health, drain, failure."""

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import replace

import pytest

from attention.hardware import H200
from attention.preferences import DeviceFacts
from attention.roofline import HardwareLimits
from service.channel.client import ReplicaLink
from service.channel.server import ChannelServer
from service.config import parse_config
from service.deployments.replica import EXIT_ENGINE_FAILED, ReplicaHost, hardware_limits
from service.listening import MetricsSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, eventually
from workers.config import EngineConfig
from workers.engine.loop import EngineLoop
from workers.engine.protocol import GenerateRequest
from workers.errors import ConfigError, EngineFailedError, ModelLoadError
from workers.sampling.params import SamplingParams


class Board:
    """Remembers what a replica announced."""

    def __init__(self):
        self.progress = []
        self.failures = []
        self.addresses = []
        self.snapshots = []
        self.loads = []
        self.is_withdrawn = False

    def report_progress(self, stage, fraction):
        self.progress.append((stage, fraction))

    def report_failure(self, message):
        self.failures.append(message)

    def announce(self, address):
        self.addresses.append(address)

    def report_load(self, load, model):
        self.loads.append((load, model))

    def withdraw(self):
        self.is_withdrawn = True

    def push_metrics(self, snapshot):
        self.snapshots.append(snapshot)


class Hosted:
    """A host with its collaborators in reach."""

    def __init__(self, fake_engine, step_timeout_s=60.0, **settings):
        config = parse_config(
            {
                **settings,
                "metrics": {"push_interval_s": 0.02},
                "replica": {"step_timeout_s": step_timeout_s},
            }
        )
        self.engine = fake_engine
        self.board = Board()
        self.exits = []
        self.channel = ChannelServer("replica-1", "node-1", FAST, "127.0.0.1")
        (model,) = config.served_models()
        self.host = ReplicaHost(
            "replica-1", model, config.metrics, self.channel, self.board, self.exits.append
        )

    def create(self, config, hooks):
        hooks.on_progress("loading", 0.5)
        self.fail = hooks.on_failure
        self.loop = EngineLoop(self.engine, hooks.on_outputs, hooks.on_failure)
        return self.loop


class Sink:
    """What an ingress hears of one request."""

    def __init__(self):
        self.num_tokens = 0
        self.is_lost = False

    def deliver(self, output, engine_s):
        self.num_tokens += len(output.token_ids)

    def lose(self):
        self.is_lost = True

    def refuse(self):
        raise AssertionError("the request was sent")


@contextlib.contextmanager
def hosted(engine=None, **kwargs):
    made = Hosted(engine or FakeEngine(step_s=0.002), **kwargs)
    made.host.start(made.create)
    yield made
    made.host.shut_down(0.0)


def wait_until(condition, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def request(max_tokens):
    return GenerateRequest("r", [1], SamplingParams(max_tokens=max_tokens))


def test_a_started_replica_announces_itself_and_its_metrics_again_and_again():
    with hosted() as made:
        wait_until(lambda: len(made.board.addresses) > 2)
        assert made.board.addresses[0].replica_id == "replica-1"
        assert made.board.progress == [("loading", 0.5)]
        assert len(made.board.snapshots) >= 2
        made.host.check_health()
        assert made.host.stats().num_running == 0


def test_fetching_a_model_of_the_hub_is_progress_and_its_engine_gets_a_folder(monkeypatch):
    """What is fetched, and how, is service.hub's own test."""

    def resolve(config, revision, on_bytes):
        on_bytes(1, 4)
        return replace(config, model=f"/cache/{config.model}/{revision}")

    monkeypatch.setattr("service.deployments.replica.resolve_engine", resolve)
    made = Hosted(FakeEngine(), engine={"model": "owner/Tiny", "revision": "v2"})
    seen = []
    made.host.start(lambda config, hooks: seen.append(config) or made.create(config, hooks))
    made.host.shut_down(0.0)
    assert made.board.progress[0] == ("fetching weights", 0.25)
    assert (seen[0].model, seen[0].served_model_name) == ("/cache/owner/Tiny/v2", "owner/Tiny")


def test_a_model_that_does_not_load_leaves_nothing_running():
    made = Hosted(FakeEngine())

    def fail(config, hooks):
        raise ModelLoadError("no weights")

    with pytest.raises(ModelLoadError):
        made.host.start(fail)
    assert made.board.addresses == []
    with pytest.raises(EngineFailedError):
        made.host.check_health()
    made.host.shut_down(1.0)


def test_draining_waits_for_what_runs_and_refuses_what_comes():
    with hosted(HangingEngine()) as made:
        made.loop.submit([request(max_tokens=30)])
        wait_until(lambda: made.engine.num_output_tokens)
        draining = threading.Thread(target=made.host.shut_down, args=(300.0,))
        draining.start()
        wait_until(lambda: made.board.is_withdrawn)
        assert draining.is_alive()
        assert made.engine.num_output_tokens < 30
        made.engine.release.set()
        draining.join(60)
        assert made.engine.num_output_tokens == 30
        assert made.exits == []


def test_draining_gives_up_at_its_timeout():
    with hosted(FakeEngine(step_s=0.01)) as made:
        made.loop.submit([request(max_tokens=100_000)])
        wait_until(lambda: made.engine.running)
        started_s = time.monotonic()
        made.host.shut_down(0.1)
        assert time.monotonic() - started_s < 60, "the request takes 1000 s"
        made.host.shut_down(10.0)


def test_an_engine_that_fails_ends_the_process_and_its_connections():
    with hosted(FakeEngine(step_s=0.002, fail_after_steps=5)) as made:
        made.host.check_health()
        made.loop.submit([request(max_tokens=100)])
        wait_until(lambda: made.exits)
        assert made.exits == [EXIT_ENGINE_FAILED]
        with pytest.raises(EngineFailedError, match="ended"):
            made.host.check_health()


def test_an_engine_that_hangs_is_unhealthy_and_does_not_hold_up_the_shutdown():
    with hosted(HangingEngine(), step_timeout_s=0.1) as made:
        made.loop.submit([request(max_tokens=100)])
        wait_until(lambda: made.exits)
        with pytest.raises(EngineFailedError, match="no step"):
            made.host.check_health()
        threading.Timer(0.2, made.engine.release.set).start()
        started_s = time.monotonic()
        made.host.shut_down(300.0)
        assert time.monotonic() - started_s < 60


@pytest.mark.parametrize("error", [ModelLoadError("no weights"), ConfigError("no backend")])
def test_a_start_that_can_never_succeed_is_told_to_whoever_waits(error):
    def refuse(config, hooks):
        raise error

    made = Hosted(FakeEngine())
    with pytest.raises(type(error)):
        made.host.start(refuse)
    assert made.board.failures == [str(error)]


def test_a_start_that_may_succeed_next_time_is_not_called_hopeless():
    def fail(config, hooks):
        raise EngineFailedError("a rank process ended")

    made = Hosted(FakeEngine())
    with pytest.raises(EngineFailedError):
        made.host.start(fail)
    assert made.board.failures == []


def limits_on(monkeypatch, device, **settings):
    monkeypatch.setattr("attention.selection.detect_device", lambda _: device)
    return hardware_limits(MetricsSettings(**settings), EngineConfig(model="m", device="cpu"))


def test_a_measured_gpu_has_limits_without_settings_and_settings_win(monkeypatch, caplog):
    device = DeviceFacts("cuda", "NVIDIA H200", (9, 0))
    with caplog.at_level(logging.INFO, logger="service.deployments.replica"):
        assert limits_on(monkeypatch, device) == H200
        given = limits_on(monkeypatch, device, peak_bytes_per_s=1.0, peak_flops_per_s=2.0)
    assert given == HardwareLimits(1.0, 2.0)
    assert not caplog.records


def test_an_unmeasured_gpu_has_none_and_one_line_says_how_to_set_them(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="service.deployments.replica"):
        assert limits_on(monkeypatch, DeviceFacts("cuda", "NVIDIA B200", (10, 0))) is None
    (record,) = caplog.records
    for part in ("NVIDIA B200", "metrics.peak_bytes_per_s", "metrics.peak_flops_per_s"):
        assert part in record.getMessage()


def test_a_cpu_has_none_and_nothing_is_said(caplog):
    with caplog.at_level(logging.INFO, logger="service.deployments.replica"):
        config = EngineConfig(model="m", device="cpu")
        assert hardware_limits(MetricsSettings(), config) is None
    assert not caplog.records


class HangingEngine(FakeEngine):
    """Gives some tokens, then hangs in a step until release is set."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.release = threading.Event()

    def step(self):
        if self.num_steps >= 5:
            assert self.release.wait(120)
        return super().step()


@pytest.mark.asyncio
async def test_streams_of_a_hung_engine_end_and_the_process_exits_without_any_health_check():
    engine = HangingEngine(step_s=0.002)
    with hosted(engine, step_timeout_s=3.0) as made:
        link = ReplicaLink(made.board.addresses[0], "ingress", "node-1", FAST, lambda: None)
        sink = Sink()
        link.start()
        await eventually(lambda: link.is_connected)
        link.submit(request(max_tokens=100), sink)
        await eventually(lambda: sink.num_tokens)
        started_s = time.monotonic()
        await eventually(lambda: sink.is_lost)
        assert time.monotonic() - started_s < 60, "the step itself hangs for longer"
        await eventually(lambda: made.exits == [EXIT_ENGINE_FAILED])
        engine.release.set()
        await link.aclose()


def test_two_reports_of_one_failure_end_the_process_once():
    with hosted(FakeEngine(step_s=0.002)) as made:
        made.fail(EngineFailedError("rank 1 died"))
        made.fail(EngineFailedError("no step"))
        assert made.exits == [EXIT_ENGINE_FAILED]


def test_a_replica_is_known_before_its_start_is_over():
    with hosted() as made:
        assert made.board.addresses


@pytest.mark.asyncio
async def test_a_stream_longer_than_the_drain_is_lost_and_counted(caplog):
    with hosted(FakeEngine(step_s=0.005)) as made:
        link = ReplicaLink(made.board.addresses[0], "ingress", "node-1", FAST, lambda: None)
        sink = Sink()
        link.start()
        await eventually(lambda: link.is_connected)
        link.submit(request(max_tokens=100_000), sink)
        await eventually(lambda: sink.num_tokens)
        with caplog.at_level(logging.WARNING, logger="service.deployments.replica"):
            await asyncio.to_thread(made.host.shut_down, 0.2)
        await eventually(lambda: sink.is_lost)
        assert "1 requests under way" in caplog.text
        await link.aclose()
