"""A service small enough to run short of memory, and the traffic that fills every dashboard.

Shared prefixes and their lack, streams over HTTP and gRPC, clients that leave, requests that are
refused: whatever a panel shows happens within a minute.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx

from service.proto import inference_pb2_grpc
from tests.integration.services import RunningService, grpc_request

NUM_REPLICAS = 2
# Few enough pages for a dozen sequences to preempt each other, with room for one of any length.
ENGINE = {
    "page_size": 8,
    "num_pages": 120,
    "max_context_len": 640,
    "num_cpu_threads": 1,
    "speculative": "ngram",
}
ADMISSION = {"max_live_requests": 20}
# Of the order of one CPU core; the roofline's scale here, not a claim about any machine.
PEAKS = {"peak_bytes_per_s": 2e10, "peak_flops_per_s": 1e11}
MAX_CLIENTS = 24
SHARED_PREFIXES = [
    "\n".join(f"def helper_{topic}_{line}(value):\n    return value + {line}" for line in range(12))
    for topic in ("paths", "dates", "queues")
]


def service_settings(base_port: int) -> dict:
    """What running_service() takes beside a name and base_port."""
    return {
        # A policy whose bounds leave it no choice: its metrics are to be seen, nothing is to move.
        "autoscaling": {"min_replicas": NUM_REPLICAS, "max_replicas": NUM_REPLICAS},
        "engine": ENGINE,
        "admission": ADMISSION,
        "metrics": {"port": base_port + 2, "push_interval_s": 0.5, **PEAKS},
    }


@contextmanager
def running_load(service: RunningService, num_clients: Callable[[float], int]) -> Iterator[None]:
    """Traffic for as long as the context lasts. num_clients: how many at a time, by elapsed s."""
    stop = threading.Event()
    start_s = time.monotonic()

    def wanted() -> int:
        return num_clients(time.monotonic() - start_s)

    clients = [
        threading.Thread(target=_run_client, args=(service, index, wanted, stop), daemon=True)
        for index in range(MAX_CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(60)


def _run_client(
    service: RunningService, index: int, wanted: Callable[[], int], stop: threading.Event
) -> None:
    rng = random.Random(index)
    with httpx.Client(timeout=60) as http, grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while not stop.is_set():
            if index >= wanted():
                stop.wait(0.1)
            elif rng.random() < 0.25:
                _ask_grpc(stub, rng)
            else:
                _ask_http(http, service.url, rng)


def _prompt(rng: random.Random) -> str:
    question = f"\n\ndef function_{rng.randrange(10_000)}(name, size):\n"
    return (rng.choice(SHARED_PREFIXES) if rng.random() < 0.7 else "import os") + question


def _ask_http(http: httpx.Client, url: str, rng: random.Random) -> None:
    """A stream, now and then given up by the client or refused by the service."""
    max_tokens = 100_000 if rng.random() < 0.03 else rng.choice([16, 48, 96])
    body = {"prompt": _prompt(rng), "max_tokens": max_tokens, "temperature": 0.7, "stream": True}
    leaves = rng.random() < 0.05
    with http.stream("POST", f"{url}/v1/completions", json={"model": "builtin", **body}) as answer:
        for line in answer.iter_lines():
            if leaves and line.startswith("data:"):
                return
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        time.sleep(0.5)


def _ask_grpc(stub: inference_pb2_grpc.InferenceStub, rng: random.Random) -> None:
    try:
        for _ in stub.GenerateStream(grpc_request(_prompt(rng), 48), timeout=60):
            pass
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        time.sleep(0.5)
