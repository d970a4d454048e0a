"""CPU time that an ingress process spends on a token and on a request, without Ray and models.

    python -m benchmarks.ingress_cost [--protocol http] [--streams 128] [--step-ms 10] [--profile]

Three processes: a fake engine behind the real channel, an ingress as the service puts it together
(router, handler, HTTP on uvicorn or gRPC, on uvloop), and a client of benchmarks.serve_overhead.
Two runs, short outputs and long ones; the ingress's own CPU time in both gives the cost of a
request and of a token. --profile prints where the ingress spends it.
"""

import argparse
import asyncio
import cProfile
import multiprocessing
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.end_to_end import free_ports
from benchmarks.overhead_levels import Level, RunRecord, Share, merge_records
from benchmarks.overhead_process import READY, Plan
from service.api.auth import make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.bench.statistics import summarize
from service.channel.address import ReplicaAddress
from service.channel.server import ChannelServer
from service.channel.settings import ChannelSettings
from service.chat.format import make_chat_format
from service.chat.settings import ChatSettings
from service.deployments.listeners import HttpServer, bind_shared
from service.handler.chats import Chats
from service.handler.directory import ModelDirectory, ServedModel
from service.handler.handler import Handler
from service.limits import Limits
from service.observability.metrics import IngressMetrics, RefusalMetrics
from service.observability.request_log.observer import NoTracing, RequestObserver
from service.routing.admission import AdmissionSettings, IngressAdmission
from service.routing.policy import RouterSettings
from service.routing.router import Router
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.engine import FakeEngine
from workers.builtin import builtin_model_path
from workers.engine.loop import EngineLoop
from workers.errors import EngineFailedError

CHANNEL = ChannelSettings(heartbeat_timeout_s=60.0)
NODE = "node"
SHORT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took of the ingress process."""

    num_requests: int
    num_tokens: int
    cpu_s: float
    ttft_p50_ms: float
    client_cpu_us: float


def main() -> None:
    arguments = parse_arguments()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(theirs, arguments.step_ms / 1e3), daemon=True
    )
    engine.start()
    try:
        address: ReplicaAddress = ours.recv()
        profiler = cProfile.Profile(time.thread_time) if arguments.profile else None
        costs = uvloop.run(measure(address, arguments, profiler))
    finally:
        ours.send(None)
        engine.join(10)
    report(costs, profiler)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--profile", choices=("short", "long"), help="where this run spends it")
    return parser.parse_args()


def run_engine(pipe: "Connection[Any, Any]", step_s: float) -> None:
    """A replica without Ray, until the pipe says otherwise."""
    server = ChannelServer("replica", NODE, CHANNEL, "127.0.0.1")
    loop = EngineLoop(FakeEngine(step_s=step_s), server.publish, _raise)
    loop.start()
    pipe.send(server.start(loop))
    pipe.recv()
    server.close()
    loop.stop()


async def measure(
    address: ReplicaAddress, arguments: argparse.Namespace, profiler: cProfile.Profile | None
) -> list[Cost]:
    metrics = IngressMetrics(CollectorRegistry())
    router = Router(
        "ingress",
        NODE,
        RouterSettings(),
        CHANNEL,
        IngressAdmission(AdmissionSettings(), 1).models[0],
        metrics,
    )
    folder = builtin_model_path()
    tokenizer = TokenizerPool(TokenizerPoolConfig(folder, num_workers=1))
    await tokenizer.start()
    files = read_tokenizer_files(folder)
    loaded, pieces = load_tokenizer(files)
    chats = Chats(make_chat_format(files.chat_template, loaded, pieces, ChatSettings()))
    limits = Limits.model_validate({})
    handler = Handler(router, tokenizer, pieces, limits, metrics, chats)
    served = ServedModel("builtin", handler, lambda: router.is_ready, "builtin")
    observer = RequestObserver(NoTracing(), is_access_log_enabled=True)
    services = ApiServices(
        ModelDirectory([served], limits, RefusalMetrics(CollectorRegistry())),
        make_authenticator({}),
        lambda: router.is_ready,
        version="0",
        started_s=0,
        observer=observer,
    )
    await router.update_replicas([address])
    while not router.is_ready:
        await asyncio.sleep(0.01)
    try:
        async with listening(services, arguments.protocol) as url:
            return await run_all(url, arguments, profiler)
    finally:
        await router.aclose()
        await tokenizer.aclose()


@asynccontextmanager
async def listening(services: ApiServices, protocol: str) -> AsyncIterator[str]:
    """The address of a server of that protocol."""
    if protocol == "grpc":
        server, port = build_grpc_server(services, "127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(None)
        return
    (port,) = free_ports(1)
    http = HttpServer(build_http_app(services), 90, 5.0)
    await http.start(bind_shared("127.0.0.1", port))
    yield f"http://127.0.0.1:{port}"
    await http.stop()


async def run_all(
    url: str, arguments: argparse.Namespace, profiler: cProfile.Profile | None
) -> list[Cost]:
    levels = [
        Level(name, streams, streams * rounds, str(arguments.input_len), str(length))
        for name, streams, rounds, length in (
            ("warm-up", arguments.streams, 1, SHORT_TOKENS),
            ("short", arguments.streams, 4, SHORT_TOKENS),
            ("long", arguments.streams, 2, arguments.output_len),
        )
    ]
    plan = Plan(way=arguments.protocol, levels=levels, vocab_size=4096, address=url, share=Share())
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.overhead_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 28,
    )
    if client.stdin is None or client.stdout is None:
        raise RuntimeError("pipes were asked for")
    client.stdin.write(msgspec.json.encode(plan) + b"\n")
    while (await client.stdout.readline()).strip().decode() != READY:
        pass
    costs = []
    for level in levels:
        if profiler is not None and level.name == arguments.profile:
            profiler.enable()
        before_s = _cpu_s()
        client.stdin.write(f"0 {level.name}\n".encode())
        line = await client.stdout.readline()
        spent_s = _cpu_s() - before_s
        if profiler is not None:
            profiler.disable()
        costs.append(cost_of(msgspec.json.decode(line, type=RunRecord), spent_s))
    client.stdin.close()
    await client.wait()
    return costs


def cost_of(record: RunRecord, cpu_s: float) -> Cost:
    result = summarize(merge_records([record]), is_open_loop=False)
    if result.errors or result.ttft_s is None:
        sys.exit(f"requests failed: {result.errors}: {result.example_error}")
    return Cost(
        result.num_ok,
        result.num_output_tokens,
        cpu_s,
        result.ttft_s.p50 * 1e3,
        record.cpu_s / result.num_output_tokens * 1e6,
    )


def report(costs: list[Cost], profiler: cProfile.Profile | None) -> None:
    """Two runs, two unknowns: tokens beyond the first few of a request, and requests."""
    _, short, long = costs
    token_s = (long.cpu_s - short.cpu_s * long.num_requests / short.num_requests) / (
        long.num_tokens - short.num_tokens * long.num_requests / short.num_requests
    )
    request_s = (short.cpu_s - short.num_tokens * token_s) / short.num_requests
    print(f"ingress: {token_s * 1e6:.1f} us a token, {request_s * 1e6:.0f} us a request")
    print(f"client: {long.client_cpu_us:.1f} us a token")
    print(f"TTFT p50: {short.ttft_p50_ms:.1f} ms (short outputs), {long.ttft_p50_ms:.1f} ms (long)")
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def _raise(failure: BaseException) -> None:
    raise EngineFailedError(str(failure))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
