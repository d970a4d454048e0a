"""What Prometheus is told to scrape: targets that answer, each group a job of its own."""

import re

import pytest
import yaml

from tests.helm.objects import of_kind, one_of, pods_of, ray_container

NAMESPACE = "default"
GROUPS = [{"name": "a"}, {"name": "b", "metricsPort": 9500}]
KINDS = ["PodMonitor", "ServiceMonitor"]


@pytest.fixture(params=KINDS)
def objects(request, renderer):
    return renderer.render([{"engineGroups": GROUPS, "monitoring": {"kind": request.param}}])


def endpoints(monitor):
    spec = monitor["spec"]
    return spec["podMetricsEndpoints"] if "podMetricsEndpoints" in spec else spec["endpoints"]


def monitor_of(objects, name):
    (found,) = [one for kind in KINDS for one in of_kind(objects, kind)
                if one["metadata"]["name"] == name]  # fmt: skip
    return found


def targets(objects, monitor):
    """(kind of pod, port) of everything that a monitor scrapes, as the operator would find it."""
    labels = monitor["spec"]["selector"]["matchLabels"]
    if monitor["kind"] == "PodMonitor":
        for name, template in pods_of(objects).items():
            if labels.items() <= template["metadata"]["labels"].items():
                declared = {p["name"]: p["containerPort"] for p in ray_container(template)["ports"]}
                yield from ((name, port_of(end, declared)) for end in endpoints(monitor))
        return
    (service,) = [one for one in of_kind(objects, "Service")
                  if labels.items() <= one["metadata"]["labels"].items()]  # fmt: skip
    selector = service["spec"]["selector"].items()
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for name, template in pods_of(objects).items():
        if selector <= template["metadata"]["labels"].items():
            yield from ((name, ports[end["port"]]) for end in endpoints(monitor))


def port_of(end, declared):
    """The port after relabelling, as Prometheus does it with an address of IPv6."""
    address = f"[fd00::1]:{declared[end['port']]}"
    for rule in end.get("relabelings", []):
        if rule["targetLabel"] == "__address__":
            match = re.fullmatch(rule["regex"], address)
            address = rule["replacement"].replace("${1}", match.group(1))
    assert address.startswith("[fd00::1]:")
    return int(address.rpartition(":")[2])


def test_each_group_has_one_target_and_it_is_on_the_head(objects):
    """TargetDown of kube-prometheus-stack asks whether every target of a job answers."""
    monitor = monitor_of(objects, "tessera")
    assert sorted(targets(objects, monitor)) == [("head", 9400), ("head", 9500)]


def test_the_targets_are_where_the_service_listens(objects):
    config = yaml.safe_load(one_of(objects, "RayService")["spec"]["serveConfigV2"])
    listening = {one["args"]["metrics"]["port"] for one in config["applications"]}
    assert {port for _, port in targets(objects, monitor_of(objects, "tessera"))} == listening


def test_ray_answers_on_every_pod(objects):
    scraped = set(targets(objects, monitor_of(objects, "tessera-ray")))
    assert scraped == {(name, 8080) for name in pods_of(objects)}


@pytest.mark.parametrize("kind", KINDS)
def test_rays_own_metrics_can_be_left_out(kind, renderer):
    objects = renderer.render([{"monitoring": {"kind": kind, "includeRay": False}}])
    assert [one["metadata"]["name"] for one in of_kind(objects, kind)] == ["tessera"]


def test_every_group_is_a_job_of_its_own_in_the_whole_cluster(objects):
    """Dashboards and alerts tell services apart by job; names are only unique in a namespace."""
    jobs = [
        rule["replacement"]
        for end in endpoints(monitor_of(objects, "tessera"))
        for rule in end["relabelings"]
        if rule["targetLabel"] == "job"
    ]
    assert jobs == [f"{NAMESPACE}/tessera-a", f"{NAMESPACE}/tessera-b"]


def test_scrapers_reach_those_ports(renderer):
    prometheus = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    values = {"engineGroups": GROUPS, "networkPolicy": {"metricsFrom": prometheus}}
    objects = renderer.render([values])
    ports = {
        one["metadata"]["name"]: [port["port"] for port in rule["ports"]]
        for one in of_kind(objects, "NetworkPolicy")
        for rule in one["spec"]["ingress"]
        if rule.get("from") == prometheus
    }
    assert ports == {"tessera": ["metrics"], "tessera-head": [9400, 9500]}
