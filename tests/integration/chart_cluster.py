"""A Ray cluster as the chart would have it, on one machine: its Serve configuration, its nodes, its
drain. Prints what happened to a stream while the node under it was drained, as JSON.

    python -m tests.integration.chart_cluster engine|ingress

A process of its own, because Ray in the tests' process is another cluster. One node (a raylet)
stands for one pod; each kind of pod has a spare, so that Serve can start a replacement. Kubernetes
and KubeRay have no part in it.
"""

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).parents[2]
PRE_STOP = runpy.run_path(str(ROOT / "helm" / "tessera" / "files" / "pre_stop.py"))
# What tests/helm compares the rendered chart with.
OBJECTS = ROOT / "tests" / "helm" / "golden" / "cpu-builtin.yaml"
BASE_PORT = 18800
OBJECT_STORE_BYTES = 80 << 20
# Replacements that start take the CPU from the stream that is to end: the rendered 10 seconds are
# not enough for it on a busy machine.
DRAIN_TIMEOUT_S = 60.0
NODE_DRAIN_S = 80
TIMEOUT_S = 120.0
NUM_TOKENS = 600


def rendered_service() -> dict[str, Any]:
    documents = yaml.safe_load_all(OBJECTS.read_text())
    return next(one["spec"] for one in documents if one["kind"] == "RayService")


def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    """As rendered, but on loopback, on ports of its own and with a longer drain."""
    config: dict[str, Any] = yaml.safe_load(service["serveConfigV2"])
    arguments = config["applications"][0]["args"]
    for index, section in enumerate(("http", "grpc", "metrics")):
        arguments[section] |= {"host": "127.0.0.1", "port": BASE_PORT + index}
    arguments["drain_timeout_s"] = DRAIN_TIMEOUT_S
    config["http_options"]["host"] = "127.0.0.1"
    return config


def start_cluster(service: dict[str, Any]) -> Cluster:
    head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for group in service["rayClusterConfig"]["workerGroupSpecs"] * 2:
        parameters = group["rayStartParams"]
        cluster.add_node(
            num_cpus=int(parameters["num-cpus"]),
            resources=json.loads(parameters["resources"].strip("'")),
            object_store_memory=OBJECT_STORE_BYTES,
        )
    return cluster


def node_of(deployment: str) -> str | None:
    """Where the live replica, or actor of that class, is; None while there is none."""
    for actor in actors().values():
        name = actor["ActorClassName"]
        if actor["State"] == "ALIVE" and name.rpartition(":")[2] == deployment:
            return str(actor["Address"]["NodeID"])
    return None


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Any) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(serve.status())
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Here old and new ingress share a port, so a request may still meet the one that ends."""
    body = {"model": "builtin", "prompt": "a", "max_tokens": 2}
    try:
        return httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    except httpx.TransportError:
        return False


def stream(url: str, result: dict[str, Any]) -> None:
    body = {"model": "builtin", "prompt": "import os\n", "stream": True, "ignore_eos": True}
    body |= {"max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1, "return_token_ids": True}
    result["num_tokens"] = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            result["error"] = event.get("error", result["error"])
            for choice in event.get("choices", []):
                result["num_tokens"] += len(choice["token_ids"])
                result["finish_reason"] = choice["finish_reason"]


def drain(cluster: Cluster, deployment: str) -> tuple[str, str]:
    """Run the chart's command against the replica's node; returns the nodes before and after."""
    before = node_of(deployment)
    known = {node["NodeID"] for node in PRE_STOP["live_nodes"](cluster.address)}
    if before not in known:
        raise RuntimeError(f"{before} is not among the nodes that the script sees")
    command = PRE_STOP["drain_command"](cluster.address, before, NODE_DRAIN_S)
    program = Path(sys.executable).parent / command[0]
    subprocess.run([str(program), *command[1:]], check=True, stdout=subprocess.DEVNULL)
    wait_until(lambda: node_of(deployment) not in (before, None))
    return before, str(node_of(deployment))


def observe(cluster: Cluster, deployment: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{BASE_PORT}"
    wait_until(lambda: is_ready(url))
    result: dict[str, Any] = {"error": None, "finish_reason": None}
    streaming = threading.Thread(target=stream, args=(url, result))
    streaming.start()
    wait_until(lambda: result.get("num_tokens", 0) > 10)
    result["tokens_before_drain"] = result["num_tokens"]
    before, after = drain(cluster, deployment)
    streaming.join()
    wait_until(lambda: answers(url))
    is_on_head = node_of("ExporterActor") == cluster.head_node.node_id
    return result | {
        "has_moved": before != after,
        "answers_after": True,
        "is_exporter_on_head": is_on_head,
    }


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    service = rendered_service()
    cluster = start_cluster(service)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        config = ServeDeploySchema.model_validate(serve_config(service))
        _get_global_client().deploy_apps(config, _blocking=False)
        print(json.dumps(observe(cluster, sys.argv[1].capitalize())))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
