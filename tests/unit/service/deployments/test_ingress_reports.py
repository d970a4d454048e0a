"""What an ingress tells the control plane while a part of that does not answer."""

import asyncio
import contextlib
import socket

import pytest

from service.config import parse_config
from service.deployments.ingress import IngressService
from service.deployments.registry import RegistryView
from service.response_store.records import StoreLimits
from service.response_store.store import LocalResponseStore

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_tokenizer_processes")]
NO_REPLICAS = RegistryView(version=1, replicas=(), is_draining=False)
PUSHES = 3


class Method:
    """An actor's method as its callers see it: answer() makes what `await` waits for."""

    def __init__(self, answer):
        self._answer = answer
        self.calls = 0

    def remote(self, *args):
        self.calls += 1
        return self._answer()


async def at_once():
    return None


class Registry:
    """answer: of report_ingress()."""

    def __init__(self, answer):
        self.report_ingress = Method(answer)
        self.report_demand = Method(at_once)
        self.watch = Method(self._watch)

    async def _watch(self):
        await asyncio.sleep(0.01)
        return NO_REPLICAS


class Exporter:
    """answer: of push()."""

    def __init__(self, answer):
        self.push = Method(answer)
        self.text = self.live = Method(at_once)


class LocalStore(LocalResponseStore):
    """As RemoteResponseStore: to limit it is a call."""

    async def limit(self, limits):
        super().limit(limits)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.asynccontextmanager
async def running(registry, exporter):
    config = parse_config(
        {
            "http": {"port": free_port()},
            "grpc": {"port": free_port()},
            "metrics": {"push_interval_s": 0.01},
            "drain_timeout_s": 0.1,
        }
    )
    models = config.served_models()
    store = LocalStore(StoreLimits(1, 1 << 20, 1 << 10, 1.0))
    service = IngressService("an-ingress", "a-node", config, models, registry, exporter, store)
    await service.start()
    try:
        yield
    finally:
        await service.shut_down()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_metrics_are_pushed_while_the_registry_does_not_answer():
    registry, exporter = Registry(asyncio.Future), Exporter(at_once)
    async with running(registry, exporter):
        await until(lambda: exporter.push.calls >= PUSHES)
    assert registry.report_ingress.calls == 1


async def test_the_registry_is_told_while_the_exporter_does_not_answer():
    registry, exporter = Registry(at_once), Exporter(asyncio.Future)
    async with running(registry, exporter):
        await until(lambda: registry.report_ingress.calls >= PUSHES)
    assert exporter.push.calls == 1
