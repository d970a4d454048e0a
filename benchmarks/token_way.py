"""The token way against Ray Serve's own streaming, on the same fake step loop, in the same run.

    python -m benchmarks.token_way [--json FILE]

Streams paced at 20 ms: produce-to-ingress latency of every token (both ends read the same machine's
monotonic clock) and whether the rate is kept. At maximum rate: tokens per second. Tokens are what
is counted, by their ids: outputs that piled up arrive merged. Needs no model and no GPU,
so it shows the transport alone. Floor: a frame crosses a UNIX socket in about 0.1 ms. Peers:
Serve's default streaming, one generator per request through the object store, and the same by value
(gRPC between replicas). Bars: 256 streams kept with a median under 3 ms; 100 times the ceiling of
Serve's default streaming.
"""

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from prometheus_client import CollectorRegistry
from ray import serve
from rich.console import Console
from rich.table import Table

from service.channel.address import ReplicaAddress
from service.channel.server import ChannelServer
from service.channel.settings import ChannelSettings
from service.observability.metrics import IngressMetrics
from service.request_context import RequestContext
from service.routing.admission import AdmissionSettings, IngressAdmission
from service.routing.policy import RouterSettings
from service.routing.router import Router
from tests.fakes.engine import FakeEngine
from workers.engine.loop import EngineLoop
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.sampling.params import SamplingParams

WARM_UP_S = 1.0
# When each token of one stream was produced, or arrived: monotonic seconds.
Stamps = "array[float]"
CHANNEL = ChannelSettings(heartbeat_timeout_s=60.0, max_stream_bytes=1 << 30)
ACTOR = {"num_cpus": 0}


@dataclass(frozen=True, slots=True)
class Load:
    """num_tokens per stream; step_s 0 means as fast as it goes."""

    num_streams: int
    num_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What an ingress saw: seconds from production to arrival, and the time all of it took."""

    latencies_s: list[float]
    num_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A way is saturated when it does not keep the pace."""

    way: str
    num_streams: int
    target_tokens_per_s: float | None
    tokens_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    is_saturated: bool | None


class StampingEngine(FakeEngine):
    """Notes when it produced each token. produced: by the first token of the stream's prompt."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s=step_s)
        self.produced: dict[int, array[float]] = {}

    def _advance(self, running: Any) -> StepOutput:
        stamps = self.produced.setdefault(running.request.prompt_token_ids[0], array("d"))
        stamps.append(time.monotonic())
        return super()._advance(running)


@serve.deployment(ray_actor_options=ACTOR, max_ongoing_requests=10_000)
class ChannelEngine:
    """A replica's end of the token way before a fake engine."""

    def __init__(self) -> None:
        self._stop: list[Any] = []

    async def restart(self, step_s: float) -> ReplicaAddress:
        for stop in self._stop:
            await asyncio.to_thread(stop)
        server = ChannelServer(f"replica-{time.time_ns()}", "node", CHANNEL, "127.0.0.1")
        self._engine = StampingEngine(step_s)
        loop = EngineLoop(self._engine, server.publish, _raise)
        self._stop = [server.close, loop.stop]
        loop.start()
        return server.start(loop)

    async def produced(self) -> "dict[int, array[float]]":
        return self._engine.produced


@serve.deployment(ray_actor_options=ACTOR, max_ongoing_requests=10_000)
class ChannelIngress:
    """Routes requests to the replica as the product does and consumes the streams."""

    async def measure(self, address: ReplicaAddress, load: Load) -> "list[array[float]]":
        """When each token of stream i arrived, whose prompt is [i + 1]."""
        metrics = IngressMetrics(CollectorRegistry())
        (admission,) = IngressAdmission(AdmissionSettings()).models
        router = Router("ingress", "node", RouterSettings(), CHANNEL, admission, metrics)
        await router.update_replicas([address])
        while not router.num_connected_replicas:
            await asyncio.sleep(0.01)
        sampling = SamplingParams(max_tokens=load.num_tokens)
        requests = [GenerateRequest(str(i), [i + 1], sampling) for i in range(load.num_streams)]

        async def consume(request: GenerateRequest) -> Stamps:
            arrived = array("d")
            async for output in await router.submit(request, RequestContext()):
                arrived.extend([time.monotonic()] * len(output.token_ids))
            return arrived

        arrived = await asyncio.gather(*map(consume, requests))
        await router.aclose()
        return arrived


@serve.deployment(ray_actor_options=ACTOR, max_ongoing_requests=10_000)
class GeneratorEngine:
    """The same step loop behind one Serve generator per request."""

    async def generate(self, load: Load, index: int) -> AsyncIterator[float]:
        queue: asyncio.Queue[float] = asyncio.Queue()
        self._join(load, queue)
        for _ in range(load.num_tokens):
            yield await queue.get()

    def _join(self, load: Load, queue: asyncio.Queue[float]) -> None:
        """The last stream to join starts the step loop for all."""
        self._queues: list[asyncio.Queue[float]] = [*getattr(self, "_queues", []), queue]
        if len(self._queues) == load.num_streams:
            arguments = (load, self._queues, asyncio.get_running_loop())
            self._queues = []
            threading.Thread(target=_step, args=arguments, daemon=True).start()


@serve.deployment(ray_actor_options=ACTOR, max_ongoing_requests=10_000)
class GeneratorIngress:
    """Consumes one Serve stream per request."""

    def __init__(self, engine: Any, is_by_reference: bool) -> None:
        self._engine = engine.options(stream=True, _by_reference=is_by_reference)

    async def measure(self, load: Load) -> Arrivals:
        async def consume(index: int) -> tuple[Stamps, Stamps]:
            produced, arrived = array("d"), array("d")
            async for produced_s in self._engine.generate.remote(load, index):
                produced.append(produced_s)
                arrived.append(time.monotonic())
            return produced, arrived

        stamps = await asyncio.gather(*map(consume, range(load.num_streams)))
        return arrivals_of(load, [p for p, _ in stamps], [a for _, a in stamps])


def _step(load: Load, queues: list[asyncio.Queue[float]], loop: Any) -> None:
    next_s = time.monotonic()
    for _ in range(load.num_tokens):
        next_s += load.step_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        loop.call_soon_threadsafe(_put_all, queues, time.monotonic())


def _put_all(queues: list[asyncio.Queue[float]], produced_s: float) -> None:
    for queue in queues:
        queue.put_nowait(produced_s)


def arrivals_of(load: Load, produced: Sequence[Stamps], arrived: Sequence[Stamps]) -> Arrivals:
    """Joined token by token. Raises ValueError unless every stream brought all its tokens.

    Of a run of more than two seconds the first is warm-up and does not count.
    """
    for one in (*produced, *arrived):
        if len(one) != load.num_tokens:
            raise ValueError(f"a stream of {load.num_tokens} tokens has {len(one)}")
    came, went = np.concatenate(produced), np.concatenate(arrived)
    if came.max() > came.min() + 2 * WARM_UP_S:
        is_counted = came >= came.min() + WARM_UP_S
        came, went = came[is_counted], went[is_counted]
    return Arrivals(list(went - came), len(went), float(went.max() - came.min()))


def _raise(failure: BaseException) -> None:
    raise failure


def _measure_channel(load: Load) -> Arrivals:
    engine = serve.run(ChannelEngine.bind(), name="channel-engine", route_prefix=None)
    ingress = serve.run(ChannelIngress.bind(), name="channel-ingress", route_prefix=None)
    ingress.measure.remote(engine.restart.remote(0.02).result(), Load(8, 20, 0.02)).result()
    arrived = ingress.measure.remote(engine.restart.remote(load.step_s).result(), load).result()
    produced = engine.produced.remote().result()
    for name in ("channel-ingress", "channel-engine"):
        serve.delete(name)
    return arrivals_of(load, [produced[i + 1] for i in range(load.num_streams)], arrived)


def _measure_generators(load: Load, is_by_reference: bool) -> Arrivals:
    app = GeneratorIngress.bind(GeneratorEngine.bind(), is_by_reference)
    ingress = serve.run(app, name="generators", route_prefix=None)
    ingress.measure.remote(Load(8, 20, 0.02)).result()
    arrivals: Arrivals = ingress.measure.remote(load).result()
    serve.delete("generators")
    return arrivals


def _row(way: str, load: Load, arrivals: Arrivals) -> Row:
    rate = arrivals.num_tokens / arrivals.elapsed_s
    if load.step_s == 0:
        return Row(way, load.num_streams, None, rate, None, None, None)
    target = load.num_streams / load.step_s
    percentiles = statistics.quantiles(arrivals.latencies_s, n=100)
    return Row(
        way,
        load.num_streams,
        target,
        rate,
        1e3 * percentiles[49],
        1e3 * percentiles[98],
        rate < 0.95 * target,
    )


WAYS = {
    "channel (ours)": _measure_channel,
    "Serve streaming, default": lambda load: _measure_generators(load, True),
    "Serve streaming, by value": lambda load: _measure_generators(load, False),
}


def run(num_streams: int, seconds: float, max_rate_tokens: dict[str, int]) -> list[Row]:
    """All ways, paced first, then at maximum rate with 32 streams and with num_streams."""
    rows = []
    for way, measure in WAYS.items():
        paced = Load(num_streams, int(seconds / 0.02), 0.02)
        rows.append(_row(way, paced, measure(paced)))
    for streams in (32, num_streams):
        for way, measure in WAYS.items():
            load = Load(streams, max_rate_tokens[way] // streams, 0.0)
            rows.append(_row(way, load, measure(load)))
    return rows


def show(rows: list[Row], console: Console) -> None:
    table = Table("way", "streams", "target tok/s", "tok/s", "p50 ms", "p99 ms", "saturated")
    for row in rows:
        target = "max" if row.target_tokens_per_s is None else f"{row.target_tokens_per_s:,.0f}"
        latency = ["" if v is None else f"{v:.2f}" for v in (row.p50_ms, row.p99_ms)]
        saturated = {True: "yes", False: "no", None: ""}[row.is_saturated]
        cells = (row.way, str(row.num_streams), target, f"{row.tokens_per_s:,.0f}")
        table.add_row(*cells, *latency, saturated)
    console.print(table)
    ours, default, _ = [row for row in rows if row.is_saturated is None][-3:]
    console.print(f"ceiling: {ours.tokens_per_s / default.tokens_per_s:,.0f} times Serve's default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each paced run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ray.init(include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    budgets = dict(zip(WAYS, (2_000_000, 16_000, 48_000), strict=True))
    rows = run(arguments.streams, arguments.seconds, budgets)
    show(rows, Console())
    if arguments.json is not None:
        record = {"cpus": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(record, indent=2))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
