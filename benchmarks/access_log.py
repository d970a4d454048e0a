"""What the access log costs: CPU time of a serving process per request, with its lines and without.

    python -m benchmarks.access_log [--requests 400] [--rounds 5]

The whole HTTP server (uvicorn, routes, handler, rendering) before a fake engine that answers at
once, in a process of its own whose standard error is a pipe that somebody reads, as a container's
is. Rounds alternate, and the least CPU time of each side counts, so a busy machine disturbs little.
The shortest request there is shows the worst ratio. Bar: 1 % of a streamed request of 128 tokens.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from service.api.auth import OpenAuthenticator
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.deployments.listeners import HttpServer, bind_shared
from service.observability.request_log.formatting import configure_logging
from service.observability.request_log.observer import NoTracing, RequestObserver
from service.observability.request_log.settings import LoggingSettings
from tests.fakes.backend import make_outputs
from tests.fakes.text import make_bench

WAYS = {"one token": {"max_tokens": 1}, "128 tokens streamed": {"max_tokens": 128, "stream": True}}

NUM_CLIENTS = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of the serving process per request."""

    without_us: float
    with_us: float

    @property
    def share(self) -> float:
        return self.with_us / self.without_us - 1


async def _serve(is_access_log_enabled: bool, log_format: str, pipe: Connection) -> None:
    configure_logging(LoggingSettings.model_validate({"format": log_format}))
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder), lambda request: make_outputs(request, [5] * 128))
        services = ApiServices(
            models=bench.models,
            authenticator=OpenAuthenticator(),
            is_ready=lambda: True,
            version="0",
            started_s=0,
            observer=RequestObserver(NoTracing(), is_access_log_enabled=is_access_log_enabled),
        )
        server = HttpServer(build_http_app(services), 90, 1)
        listener = bind_shared("127.0.0.1", 0)
        await server.start(listener)
        pipe.send(listener.getsockname()[1])
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        await server.stop()


def _run_server(is_enabled: bool, log_format: str, pipe: Connection, stderr: int) -> None:
    os.dup2(stderr, 2)
    asyncio.run(_serve(is_enabled, log_format, pipe))


class Server:
    """A serving process. cpu_s(): what it has used so far."""

    def __init__(self, is_access_log_enabled: bool, log_format: str) -> None:
        reader, writer = os.pipe()
        self._pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = (is_access_log_enabled, log_format, other, writer)
        self._process = context.Process(target=_run_server, args=arguments, daemon=True)
        self._process.start()
        os.close(writer)
        self.num_log_bytes = 0
        self._reader = threading.Thread(target=self._drain, args=(reader,))
        self._reader.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}/v1/completions"

    def cpu_s(self) -> float:
        self._pipe.send(True)
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()
        self._reader.join()

    def _drain(self, reader: int) -> None:
        while data := os.read(reader, 1 << 16):
            self.num_log_bytes += len(data)
        os.close(reader)


async def _send(url: str, body: dict[str, object], num_requests: int) -> None:
    """NUM_CLIENTS at once: what a process costs matters when it is busy."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def send(count: int) -> None:
            for _ in range(count):
                (await client.post(url, json=body)).raise_for_status()

        await asyncio.gather(*(send(num_requests // NUM_CLIENTS) for _ in range(NUM_CLIENTS)))


def measure(log_format: str, fields: dict[str, object], num_requests: int, rounds: int) -> Cost:
    servers = [Server(False, log_format), Server(True, log_format)]
    best_s = [float("inf"), float("inf")]
    body = {"model": "tiny", "prompt": "hello", **fields}
    for _ in range(rounds):
        for index, server in enumerate(servers):
            before_s = server.cpu_s()
            asyncio.run(_send(server.url, body, num_requests))
            best_s[index] = min(best_s[index], server.cpu_s() - before_s)
    for server in servers:
        server.close()
    if servers[0].num_log_bytes or servers[1].num_log_bytes < 100 * rounds * num_requests:
        raise RuntimeError("the lines that were to be measured were not written")
    without_us, with_us = (1e6 * seconds / num_requests for seconds in best_s)
    return Cost(without_us, with_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help=f"of one round, by {NUM_CLIENTS}")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = Table("format", "request", "us without", "us with", "share")
    for log_format in ("text", "json"):
        for name, fields in WAYS.items():
            cost = measure(log_format, fields, arguments.requests, arguments.rounds)
            cells = (f"{cost.without_us:.0f}", f"{cost.with_us:.0f}", f"{cost.share:+.1%}")
            table.add_row(log_format, name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
