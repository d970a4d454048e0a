"""The chart's Serve configuration with `http.proxy: haproxy` on a real Ray, as in its pods.

    python -m tests.integration.chart_haproxy

Prints what clients and the readiness probe saw through HAProxy, as JSON. A process of its own: Ray
reads the switch for HAProxy when it starts. One node stands for all pods, the built-in model on CPU
for the group's; Kubernetes and KubeRay have no part in it.
"""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.integration.chart_cluster import OBJECT_STORE_BYTES, wait_until

OBJECTS = Path(__file__).parents[1] / "helm" / "golden" / "haproxy.yaml"
BASE_PORT = 18840
NUM_TOKENS = 40
BODY = {"model": "builtin", "prompt": "import os\n", "ignore_eos": True, "temperature": 0}
# Where HAProxy answers itself, in place of 8404 and 9101.
PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": "18847", "RAY_SERVE_HAPROXY_METRICS_PORT": "18848"}


def rendered_service() -> dict[str, Any]:
    documents = yaml.safe_load_all(OBJECTS.read_text())
    return next(one["spec"] for one in documents if one["kind"] == "RayService")


def ingress_container(service: dict[str, Any]) -> dict[str, Any]:
    groups = service["rayClusterConfig"]["workerGroupSpecs"]
    (ingress,) = [group for group in groups if group["groupName"].endswith("-ingress")]
    container: dict[str, Any] = ingress["template"]["spec"]["containers"][0]
    return container


def on_this_machine(config: dict[str, Any]) -> dict[str, Any]:
    """As rendered, but on loopback, on ports of its own, with a model and devices that are here."""
    arguments = config["applications"][0]["args"]
    for index, section in enumerate(("http", "grpc", "metrics")):
        arguments[section] |= {"host": "127.0.0.1", "port": BASE_PORT + index}
    config["http_options"] |= {"host": "127.0.0.1", "port": BASE_PORT}
    arguments["engine"] = {"model": "builtin", "device": "cpu", "kv_cache_bytes": 1 << 26}
    arguments["replica"] = {"cpus_per_rank": 0.1, "gpus_per_rank": 0}
    del arguments["auth"]
    for deployment in config["applications"][0]["deployments"]:
        deployment["ray_actor_options"] |= {"num_cpus": 0.1, "num_gpus": 0}
        deployment["num_replicas"] = 1
    return config


def resources(config: dict[str, Any]) -> dict[str, float]:
    deployments = config["applications"][0]["deployments"]
    return {name: 1.0 for one in deployments for name in one["ray_actor_options"]["resources"]}


def is_ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def observe(url: str, probe: str) -> dict[str, Any]:
    wait_until(lambda: is_ok(f"{url}/health/ready"))
    wait_until(lambda: is_ok(url + probe))
    one = httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": NUM_TOKENS}, timeout=60)
    streamed = BODY | {"max_tokens": NUM_TOKENS, "stream": True}
    events = []
    with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as answer:
        events += [line for line in answer.iter_lines() if line.startswith("data: {")]
        headers = dict(answer.headers)
    wrong = httpx.post(f"{url}/v1/completions", json=BODY | {"model": "other"}, timeout=60)
    choices = [choice for line in events for choice in json.loads(line[6:])["choices"]]
    return {
        "text": one.json()["choices"][0]["text"],
        "streamed_text": "".join(choice["text"] for choice in choices),
        "num_events": len(events),
        "content_type": headers["content-type"],
        "error": (wrong.status_code, wrong.json()["error"]["code"]),
        "statistics_port_answers": is_ok("http://127.0.0.1:18847/stats"),
    }


def main() -> None:
    service = rendered_service()
    container = ingress_container(service)
    for variable in container["env"]:
        if variable["name"].startswith("RAY_"):
            os.environ[variable["name"]] = variable["value"]
    os.environ |= {"RAY_AUTH_MODE": "disabled"} | PORTS
    config = on_this_machine(yaml.safe_load(service["serveConfigV2"]))
    ray.init(
        address="local",
        num_cpus=4,
        resources=resources(config),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        options = HTTPOptions(**config["http_options"])
        serve.start(proxy_location=config["proxy_location"], http_options=options)
        schema = ServeDeploySchema.model_validate(config)
        _get_global_client().deploy_apps(schema, _blocking=False)
        probe = container["readinessProbe"]["httpGet"]["path"]
        print(json.dumps(observe(f"http://127.0.0.1:{BASE_PORT}", probe)))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
