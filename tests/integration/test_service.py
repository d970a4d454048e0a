"""The service on a real Ray with a fake engine: both protocols, healing, draining, metrics."""

import asyncio
import json
import os
import signal
import time

import grpc
import httpx
import psutil
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from service.app import build_app
from service.config import parse_config
from service.deployments.control_plane import close_control_plane, get_registry
from service.proto import inference_pb2, inference_pb2_grpc
from tests.fakes.engine_factory import FakeEngineFactory

CONFIG = parse_config(
    {
        "num_replicas": 2,
        "app_name": "service-test",
        "drain_timeout_s": 5.0,
        "http": {"port": 18000},
        "grpc": {"port": 19000},
        "metrics": {"port": 19400, "push_interval_s": 0.2},
        "replica": {"cpus_per_rank": 0.0},
        "channel": {"heartbeat_timeout_s": 2.0},
    }
)
URL = "http://127.0.0.1:18000"
COMPLETION = {"model": "builtin", "prompt": "def main():", "max_tokens": 8}


@pytest.fixture(scope="module")
def service(ray_session):
    serve.run(
        build_app(CONFIG, FakeEngineFactory(step_s=0.01)), name=CONFIG.app_name, route_prefix="/"
    )
    wait_until(lambda: httpx.get(f"{URL}/health/ready").status_code == 200)
    yield
    serve.delete(CONFIG.app_name)
    close_control_plane(CONFIG.app_name)


def wait_until(condition, timeout_s=30.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.05)


def stream_chunks(max_tokens):
    body = {**COMPLETION, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line.startswith("data: "))


def test_http_answers_and_streams_the_same_text(service):
    whole = httpx.post(f"{URL}/v1/completions", json=COMPLETION).json()
    assert whole["usage"]["completion_tokens"] == 8
    chunks = [json.loads(line[6:]) for line in stream_chunks(8) if line != "data: [DONE]"]
    text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
    assert text == whole["choices"][0]["text"]


def test_grpc_answers_a_stock_client(service):
    with grpc.insecure_channel("127.0.0.1:19000") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text=inference_pb2.Text(text="def main():"))
        request.sampling.max_tokens = 8
        answer = stub.Generate(request, timeout=10)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    text = httpx.post(f"{URL}/v1/completions", json=COMPLETION).json()["choices"][0]["text"]
    assert answer.choices[0].text == text
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_that_leaves_frees_its_request(service):
    stream = stream_chunks(1500)
    next(stream)
    stream.close()
    wait_until(lambda: metric("tessera_running_requests") == 0)


def metric(name):
    lines = httpx.get("http://127.0.0.1:19400/metrics").text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
    return sum(values) if values else None


def test_metrics_of_all_processes_are_in_one_place(service):
    httpx.post(f"{URL}/v1/completions", json=COMPLETION)
    text = ""

    def is_complete():
        nonlocal text
        text = httpx.get("http://127.0.0.1:19400/metrics").text
        return text.count("tessera_engine_info{") == 2 and "tessera_connected_replicas{" in text

    wait_until(is_complete)
    assert metric("tessera_connected_replicas") == 2
    wait_until(lambda: (metric("tessera_time_to_first_token_seconds_count") or 0) > 0)
    assert metric("tessera_serve_overhead_seconds_count") > 0


async def generate(client, max_tokens):
    body = {**COMPLETION, "max_tokens": max_tokens, "prompt": os.urandom(8).hex()}
    return await client.post(f"{URL}/v1/completions", json=body, timeout=60)


def replica_pids():
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ServeReplica:service-test:Engine" in " ".join(process.info["cmdline"] or [])
    ]


def test_a_killed_replica_is_replaced_and_every_request_succeeds(service):
    wait_until(lambda: len(replica_pids()) == 2)

    async def run():
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
            tasks = [asyncio.create_task(generate(client, 200)) for _ in range(24)]
            await asyncio.sleep(0.7)
            os.kill(replica_pids()[0], signal.SIGKILL)
            tasks += [asyncio.create_task(generate(client, 20)) for _ in range(8)]
            return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {200}
    wait_until(lambda: metric("tessera_connected_replicas") == 2, timeout_s=60)


def test_draining_refuses_new_requests_and_lets_streams_finish(service):
    stream = stream_chunks(150)
    next(stream)
    ray.get(get_registry(CONFIG.app_name).begin_drain.remote("test"))
    wait_until(lambda: httpx.get(f"{URL}/health/ready").status_code == 503, timeout_s=5)
    refused = httpx.post(f"{URL}/v1/completions", json=COMPLETION)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.get(f"{URL}/health/live").status_code == 200
    with grpc.insecure_channel("127.0.0.1:19000") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(
                inference_pb2.GenerateRequest(text=inference_pb2.Text(text="x")), timeout=10
            )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert list(stream)[-1] == "data: [DONE]"
