"""Sessions on a real Ray: two ingresses send one to the same replica, until that is lost."""

import os

import grpc
import httpx
import pytest
import ray
from ray import serve

from service.app import build_app
from service.config import parse_config
from service.deployments.control_plane import close_control_plane
from service.proto import inference_pb2, inference_pb2_grpc
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.services import RunningService, is_ready, wait_until

SESSION = {"x-session-id": "a conversation"}
NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def service(ray_session):
    config = parse_config(
        {
            "num_replicas": 2,
            "num_ingresses": 2,
            "app_name": "sessions",
            "drain_timeout_s": 5.0,
            "http": {"port": 18580},
            "grpc": {"port": 18581},
            "metrics": {"port": 18582, "push_interval_s": 0.2},
            "replica": {"cpus_per_rank": 0.0},
            "channel": {"heartbeat_timeout_s": 2.0},
        }
    )
    serve.run(build_app(config, FakeEngineFactory(step_s=0.002)), name="sessions", route_prefix="/")
    running = RunningService(config)
    wait_until(lambda: is_ready(running.url), 120)
    wait_until(lambda: running.metric("tessera_connected_replicas") == 4, 60)
    yield running
    serve.delete("sessions")
    close_control_plane("sessions")


def series(service, name, **labels):
    """The values of a metric by replica, of the series that have these labels."""
    found = {}
    for line in httpx.get(service.metrics_url).text.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            replica_id = line.split('replica="')[1].split('"')[0]
            found[replica_id] = float(line.rsplit(" ", 1)[1])
    return found


def num_finished(service):
    return series(service, "tessera_engine_finished_requests_total")


def ingresses_that_kept_to_it(service):
    """Those that have told of a request that went where its session was."""
    by_ingress = series(service, "tessera_routing_decisions_total", reason="session")
    return [ingress for ingress, count in by_ingress.items() if count]


def ask(service, number_of_requests):
    """Each over a connection of its own, so that any ingress may get it; prompts share nothing."""
    for _ in range(number_of_requests):
        body = {"model": "builtin", "prompt": os.urandom(64).hex(), "max_tokens": 2}
        answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=SESSION, timeout=30)
        assert answer.status_code == 200, answer.text


def served_by(service, before, count):
    """How many requests each replica finished since `before`, once all `count` are counted."""

    def grown():
        now = num_finished(service)
        return {r: n - before.get(r, 0) for r, n in now.items() if n > before.get(r, 0)}

    wait_until(lambda: sum(grown().values()) == count)
    return grown()


def test_a_session_stays_on_every_ingress_and_both_protocols_and_survives_its_replica(service):
    before = num_finished(service)
    ask(service, NUM_REQUESTS)
    with grpc.insecure_channel(service.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(text=inference_pb2.Text(text="something else"))
        request.sampling.max_tokens = 2
        stub = inference_pb2_grpc.InferenceStub(channel)
        stub.Generate(request, timeout=30, metadata=tuple(SESSION.items()))
    (home,) = served_by(service, before, NUM_REQUESTS + 1)
    wait_until(lambda: len(ingresses_that_kept_to_it(service)) == 2)

    ray.kill(ray.get_actor(actor_name(home), namespace="serve"))
    wait_until(lambda: home not in num_finished(service), 60)
    before = num_finished(service)
    ask(service, NUM_REQUESTS)
    assert home not in served_by(service, before, NUM_REQUESTS)


def actor_name(replica_id):
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.endswith(replica_id)]
    return name
