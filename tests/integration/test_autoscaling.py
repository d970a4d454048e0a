"""Scaling with real Ray and paced fake engines: up under load, to zero without, and back."""

import asyncio
import json
from dataclasses import dataclass

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from service.app import build_app
from service.autoscaling.serve_options import scaling_options
from service.config import parse_config
from service.deployments.control_plane import close_control_plane
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.services import (
    READY_TIMEOUT_S,
    RunningService,
    is_ready,
    replica_processes,
    wait_until,
)

NAME = "scaling"
PORT = 18760
NUM_STREAMS = 12
NUM_TOKENS = 300
MAX_REQUESTS = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def service(ray_session):
    config = parse_config(
        {
            "app_name": NAME,
            "drain_timeout_s": 30.0,
            "http": {"port": PORT},
            "grpc": {"port": PORT + 1},
            "metrics": {"port": PORT + 2, "push_interval_s": 0.2},
            "replica": {"cpus_per_rank": 0.1},
            "autoscaling": {
                "min_replicas": 0,
                "max_replicas": 2,
                "target_requests": MAX_REQUESTS,
                "upscale_delay_s": 0.5,
                "downscale_delay_s": 0.5,
                "scale_to_zero_after_s": 0.5,
            },
        }
    )
    # Eight at a time: the ninth request waits, which is what asks for the second replica.
    app = build_app(config, FakeEngineFactory(step_s=0.02, max_running=MAX_REQUESTS))
    serve.run(app, name=NAME, route_prefix=f"/{NAME}")
    yield RunningService(config)
    serve.delete(NAME)
    close_control_plane(NAME)


@dataclass
class Outcome:
    """What one streaming client saw."""

    status: int
    num_tokens: int = 0
    error: str = ""
    is_done: bool = False


async def stream(client, num_tokens=NUM_TOKENS) -> Outcome:
    body = {
        "model": "builtin",
        "prompt": [7, 8, 9],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        outcome = Outcome(answer.status_code)
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                outcome.error = outcome.error or event.get("error", {}).get("code", "")
                for choice in event.get("choices", ()):
                    outcome.num_tokens += len(choice.get("token_ids") or ())
    return outcome


def num_replicas() -> int:
    states = serve.status().applications[NAME].deployments["Engine"].replica_states
    return sum(states.values())


def target_replicas(service) -> float | None:
    return service.metric("tessera_autoscaling_target_replicas")


async def load_until_two(url: str) -> list[Outcome]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(stream(client)) for _ in range(NUM_STREAMS)]
        while num_replicas() < 2:
            await asyncio.sleep(0.2)
            assert not all(task.done() for task in tasks), "the load ended before a replica came"
        return await asyncio.gather(*tasks)


def is_whole(outcome: Outcome, num_tokens=NUM_TOKENS) -> bool:
    return outcome == Outcome(200, num_tokens, "", is_done=True)


def test_a_model_scales_up_under_load_to_zero_without_and_back_for_a_request(service):
    wait_until(lambda: is_ready(service.url), 60)
    assert num_replicas() == 1, "the first start needs one replica, to know that the model loads"

    outcomes = asyncio.run(load_until_two(service.url))
    assert all(map(is_whole, outcomes)), outcomes

    wait_until(lambda: num_replicas() == 0, 40)
    assert is_ready(service.url), "an ingress must be sent the request that wakes its model"
    wait_until(lambda: target_replicas(service) == 0)

    async def wake():
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            models = await client.get("/v1/models")
            too_long = await client.post("/v1/completions", json={"model": "builtin", "n": 10**6})
            return (
                models.json()["data"][0]["id"],
                too_long.status_code,
                await asyncio.gather(*(stream(client, 20) for _ in range(3))),
            )

    name, refused_status, outcomes = asyncio.run(wake())
    assert (name, refused_status) == ("builtin", 400)
    assert all(is_whole(outcome, 20) for outcome in outcomes), outcomes
    assert service.metric("tessera_scale_up_wait_seconds_count") == 3


DECLARED = "scaling-declared"
DECLARED_ARGS = {
    "app_name": DECLARED,
    "engine": {"kv_cache_bytes": 16 << 20},
    "http": {"port": PORT + 3},
    "grpc": {"port": PORT + 4},
    "metrics": {"port": PORT + 5},
    "replica": {"cpus_per_rank": 0.1},
}


def declare(num_replicas: int) -> None:
    """As the chart has it: bounds beside the arguments, not among them."""
    bounds = {"min_replicas": num_replicas, "max_replicas": num_replicas}
    (model,) = parse_config({**DECLARED_ARGS, "autoscaling": bounds}).served_models()
    application = {
        "name": DECLARED,
        "route_prefix": f"/{DECLARED}",
        "import_path": "service.app:build",
        "args": DECLARED_ARGS,
        "deployments": [{"name": "Engine", **scaling_options(DECLARED, model)}],
    }
    schema = ServeDeploySchema.model_validate({"applications": [application]})
    _get_global_client().deploy_apps(schema, _blocking=False)


def engine_pids() -> set[int]:
    return {process.pid for process in replica_processes(DECLARED, "Engine")}


@pytest.mark.nightly
def test_other_bounds_in_serves_yaml_restart_no_replica(ray_session):
    config = parse_config(DECLARED_ARGS)
    declare(1)
    try:
        service = RunningService(config)
        wait_until(lambda: is_ready(service.url), READY_TIMEOUT_S)
        first = engine_pids()
        assert len(first) == 1
        declare(2)
        wait_until(lambda: service.metric("tessera_connected_replicas") == 2, READY_TIMEOUT_S)
        assert first < engine_pids()
    finally:
        serve.delete(DECLARED)
        close_control_plane(DECLARED)
