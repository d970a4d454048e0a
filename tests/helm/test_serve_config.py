"""The Serve configuration inside the RayService: Ray's schema and the service itself accept it."""

import json
import shlex

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources
from ray.serve.schema import ServeDeploySchema

from service.app import SHUTDOWN_MARGIN_S, build
from service.autoscaling.serve_options import scaling_options
from service.config import load_config
from tests.helm.rendering import CI_VALUES

EVERY_SET = [(), *((path,) for path in CI_VALUES)]


def name_of(values):
    return values[0].name.removesuffix("-values.yaml") if values else "defaults"


@pytest.fixture(scope="session", params=EVERY_SET, ids=name_of)
def service(request, renderer):
    objects = renderer.render(request.param)
    return next(one["spec"] for one in objects if one["kind"] == "RayService")


@pytest.fixture(scope="session")
def serve_config(service):
    return yaml.safe_load(service["serveConfigV2"])


def deployments_of(arguments):
    """What build_app makes of the arguments, by name; needs no cluster."""
    ingress = build(arguments)._bound_deployment
    _, _, *engines = ingress.init_args
    return {one.name: one for one in (ingress, *(engine._bound_deployment for engine in engines))}


def without_custom(resources):
    return {name: amount for name, amount in resources.items() if "tessera-" not in name}


def test_serve_accepts_it(serve_config):
    schema = ServeDeploySchema.model_validate(serve_config)
    written = set(serve_config["applications"][0])
    assert written <= set(type(schema.applications[0]).model_fields)


def test_the_service_accepts_its_arguments(serve_config):
    for application in serve_config["applications"]:
        config = load_config(None, {}, application["args"])
        assert config.app_name == application["name"]
        assert config.channel.transport == "unix+tcp"
        hosts = {config.http.host, config.grpc.host, config.metrics.host}
        assert hosts == {serve_config["http_options"]["host"]}


def test_groups_do_not_share_a_metrics_port(serve_config):
    ports = [one["args"]["metrics"]["port"] for one in serve_config["applications"]]
    assert len(set(ports)) == len(ports)


def test_deployments_ask_for_what_the_service_asks_and_their_own_pods(serve_config):
    """Serve replaces ray_actor_options whole, so what the chart writes must say all of it."""
    for application in serve_config["applications"]:
        built = deployments_of(application["args"])
        assert {one["name"] for one in application["deployments"]} == set(built)
        for one in application["deployments"]:
            role = one["name"].lower()
            options = dict(one["ray_actor_options"])
            assert options.pop("resources") == {f"tessera-{role}-{application['name']}": 1}
            own = built[one["name"]].ray_actor_options
            assert options == {key: own[key] for key in options}
            assert own.get("num_gpus", 0) == options.get("num_gpus", 0)


def test_ranks_are_placed_as_the_service_places_them(serve_config):
    for application in serve_config["applications"]:
        built = deployments_of(application["args"])["Engine"]
        own = built._replica_config.placement_group_bundles
        engine = application["deployments"][0]
        given = engine.get("placement_group_bundles")
        assert (own is None) == (given is None)
        if own is not None:
            assert [without_custom(bundle) for bundle in given] == own
            assert engine["placement_group_strategy"] == "STRICT_PACK"
            resource = f"tessera-engine-{application['name']}"
            assert all(bundle[resource] == 1 for bundle in given)


def test_counts_are_no_arguments(serve_config):
    """The configuration is an argument of every replica: another one restarts all of them."""
    for application in serve_config["applications"]:
        counts = {"num_replicas", "num_ingresses", "autoscaling"}
        assert not counts & set(application["args"])


def test_a_pod_holds_exactly_one_replica(service, serve_config):
    groups = {one["groupName"]: one for one in service["rayClusterConfig"]["workerGroupSpecs"]}
    for application in serve_config["applications"]:
        name, arguments = application["name"], application["args"]
        config = load_config(None, {}, arguments)
        engine, ingress = groups[f"{name}-engine"], groups[f"{name}-ingress"]
        tp_size = config.engine.tp_size
        parameters = engine["rayStartParams"]
        assert int(parameters["num-cpus"]) == tp_size * config.replica.cpus_per_rank
        assert int(parameters["num-gpus"]) == tp_size * config.replica.gpus_per_rank
        assert ray_resources(parameters) == {f"tessera-engine-{name}": tp_size}
        assert ray_resources(ingress["rayStartParams"]) == {f"tessera-ingress-{name}": 1}
        for one in application["deployments"]:
            pods = {"Ingress": ingress, "Engine": engine}[one["name"]]
            least, most = bounds_of(one)
            assert pods["minReplicas"] <= least <= most <= pods["maxReplicas"]
            assert least <= pods["replicas"] <= most
        container = engine["template"]["spec"]["containers"][0]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert gpus == tp_size * config.replica.gpus_per_rank


def bounds_of(deployment):
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return deployment["num_replicas"], deployment["num_replicas"]
    return scaling["min_replicas"], scaling["max_replicas"]


SCALED = [
    {"name": "a", "autoscaling": {"minReplicas": 0, "maxReplicas": 3}},
    {
        "name": "b",
        "autoscaling": {
            "maxReplicas": 2,
            "targetQueuedTokens": 1000,
            "targetKvUsage": 0.5,
            "targetRequests": 20,
            "upscaleDelaySeconds": 1,
            "downscaleDelaySeconds": 2,
            "scaleToZeroAfterSeconds": 3,
        },
        "config": {"engine": {"max_running_requests": 99, "served_model_name": "mine"}},
    },
]


@pytest.mark.parametrize("group", SCALED, ids=["defaults", "everything given"])
def test_the_chart_scales_as_the_service_would(renderer, group):
    """The chart says it in its own words, so that other bounds restart no replica."""
    given = {**group, "autoscaling": {"enabled": True, **group["autoscaling"]}}
    objects = renderer.render([{"engineGroups": [given], "autoscaler": {"enabled": True}}])
    service = next(one["spec"] for one in objects if one["kind"] == "RayService")
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    names = {"KvUsage": "kv_usage", "QueuedTokens": "queued_tokens", "Requests": "requests"}
    values = group["autoscaling"]
    settings = {
        "min_replicas": values.get("minReplicas", 1),
        "max_replicas": values["maxReplicas"],
        **{
            f"target_{ours}": values[f"target{name}"]
            for name, ours in names.items()
            if f"target{name}" in values
        },
        **{
            f"{ours}_s": values[f"{name}Seconds"]
            for name, ours in DELAYS.items()
            if f"{name}Seconds" in values
        },
    }
    config = load_config(None, {}, {**application["args"], "autoscaling": settings})
    (model,) = config.served_models()
    engine = next(one for one in application["deployments"] if one["name"] == "Engine")
    assert "num_replicas" not in engine
    expected = scaling_options(config.app_name, model)["autoscaling_config"]
    assert engine["autoscaling_config"] == expected


DELAYS = {
    "upscaleDelay": "upscale_delay",
    "downscaleDelay": "downscale_delay",
    "scaleToZeroAfter": "scale_to_zero_after",
}


def ray_resources(parameters):
    """The three readers of one string: the shell, Ray's autoscaler and KubeRay."""
    text = parameters["resources"]
    (argument,) = shlex.split(f"--resources={text}")
    by_shell = json.loads(argument.removeprefix("--resources="))
    by_autoscaler = _get_custom_resources({}, parameters, "group")
    by_kuberay = json.loads(text.strip("'\"` "))
    assert by_shell == by_autoscaler == by_kuberay
    return by_shell


def test_the_engine_is_told_its_device(serve_config):
    """Serve builds the application before workers have joined, so "auto" would see no GPU."""
    for application in serve_config["applications"]:
        arguments = application["args"]
        is_gpu = arguments["replica"]["gpus_per_rank"] > 0
        assert arguments["engine"]["device"] == ("cuda" if is_gpu else "cpu")


def test_pods_outlive_their_drain(service, serve_config):
    cluster = service["rayClusterConfig"]
    drain_s = max(one["args"]["drain_timeout_s"] for one in serve_config["applications"])
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        (flag,) = [
            part
            for part in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            if part.startswith("--timeout-s=")
        ]
        pre_stop_s = int(flag.removeprefix("--timeout-s="))
        assert drain_s + SHUTDOWN_MARGIN_S < pre_stop_s < spec["terminationGracePeriodSeconds"]


def test_every_model_folder_is_on_a_mounted_volume(service, serve_config):
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        name = group["groupName"].removesuffix("-engine").removesuffix("-ingress")
        model = next(
            one["args"]["engine"]["model"]
            for one in serve_config["applications"]
            if one["name"] == name
        )
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        is_mounted = any(model.startswith(f"{mount['mountPath']}/") for mount in mounts)
        assert model.startswith("builtin") or is_mounted
