"""Starting and asking a whole service in tests: real Ray, real engine, real clients."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
from openai import OpenAI
from ray import serve

from service.app import build_app
from service.config import ServeConfig, parse_config
from service.deployments.control_plane import close_control_plane
from service.proto import inference_pb2, inference_pb2_grpc

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunningService:
    """A deployed service and how to reach it."""

    config: ServeConfig

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.http.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.config.grpc.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.config.metrics.port}/metrics"

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str) -> float | None:
        """The sum over all series of a name, None when there is no such series."""
        lines = httpx.get(self.metrics_url).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
        return sum(values) if values else None


@contextmanager
def running_service(name: str, base_port: int, **settings: Any) -> Iterator[RunningService]:
    """Deploy with three consecutive ports, wait until ready, delete at the end."""
    config = parse_config(
        {
            "app_name": name,
            "drain_timeout_s": 5.0,
            "http": {"port": base_port},
            "grpc": {"port": base_port + 1},
            "metrics": {"port": base_port + 2, "push_interval_s": 0.2},
            "replica": {"cpus_per_rank": 0.1},
            "auth": {"priorities": {"max_priority": 2}},
            **settings,
        }
    )
    serve.run(build_app(config), name=name, route_prefix=f"/{name}")
    try:
        service = RunningService(config)
        wait_until(lambda: is_ready(service.url), READY_TIMEOUT_S)
        yield service
    finally:
        serve.delete(name)
        close_control_plane(name)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.05)


def settled(read, still_s: float = 3.0, timeout_s: float = 60.0):
    """What read() gives once that has not changed for still_s, many intervals of what is pushed:
    whatever was done before has been told by then."""
    end_s = time.monotonic() + timeout_s
    found, since_s = read(), time.monotonic()
    while time.monotonic() < since_s + still_s:
        assert time.monotonic() < end_s, "it goes on changing"
        time.sleep(0.05)
        if (now := read()) != found:
            found, since_s = now, time.monotonic()
    return found


def replica_processes(app_name: str, deployment: str = "") -> list[psutil.Process]:
    """The live processes of an application's Serve replicas."""
    wanted = f"ServeReplica:{app_name}:{deployment}"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if wanted in " ".join(process.info["cmdline"] or [])
    ]


def http_text(service: RunningService, prompt: str, max_tokens: int) -> str:
    answer = service.openai().completions.create(
        model="builtin", prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    return answer.choices[0].text


def http_stream_text(service: RunningService, prompt: str, max_tokens: int) -> str:
    chunks = service.openai().completions.create(
        model="builtin", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def grpc_request(prompt: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=inference_pb2.Text(text=prompt))
    request.sampling.max_tokens = max_tokens
    request.sampling.temperature = 0.0
    return request


def grpc_text(service: RunningService, prompt: str, max_tokens: int) -> str:
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return stub.Generate(grpc_request(prompt, max_tokens), timeout=120).choices[0].text


def grpc_stream_text(service: RunningService, prompt: str, max_tokens: int) -> str:
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        events = stub.GenerateStream(grpc_request(prompt, max_tokens), timeout=120)
        return "".join(event.choice.text for event in events if event.HasField("choice"))
