"""The rendered objects: golden, valid for Kubernetes, KubeRay and Prometheus, and safe."""

import difflib
import json
from pathlib import Path

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator

from tests.helm.objects import of_kind, pods_of
from tests.helm.rendering import (
    CI_VALUES,
    chart_with_stub_files,
    golden_file,
    golden_text,
)

KUBERNETES = "1.31"
CUSTOM = json.loads((Path(__file__).parent / "schemas" / "custom_resources.json").read_text())
EVERY_SET = [(), *((path,) for path in CI_VALUES)]


def name_of(values):
    return values[0].name.removesuffix("-values.yaml") if values else "defaults"


@pytest.fixture(scope="session", params=EVERY_SET, ids=name_of)
def objects(request, renderer):
    return renderer.render(request.param)


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)
def test_the_objects_are_the_golden_ones(values, renderer, tmp_path):
    text = golden_text(renderer.render([values], chart_with_stub_files(tmp_path)))
    expected = golden_file(values).read_text()
    difference = "".join(difflib.unified_diff(expected.splitlines(True), text.splitlines(True)))
    assert not difference, "if it is meant: python -m tests.helm.rendering"


def test_kubernetes_accepts_every_object(objects):
    for one in objects:
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_kubernetes_accepts_every_pod_template(objects):
    for name, template in pods_of(objects).items():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**template["metadata"], "name": name}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_operators_accept_their_objects(objects):
    for one in objects:
        if one["kind"] in CUSTOM:
            problems = list(Draft202012Validator(CUSTOM[one["kind"]]).iter_errors(one))
            assert not problems, problems


def test_those_two_checks_can_fail():
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    service = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "a"}}
    service["spec"] = {"rayClusterConfig": {"headGroupSpec": {"template": {"spec": {}}, "x": 1}}}
    assert list(Draft202012Validator(CUSTOM["RayService"]).iter_errors(service))


def test_names_are_unique_by_kind(objects):
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)


def test_volume_names_and_mounts_fit(objects):
    for template in pods_of(objects).values():
        spec = template["spec"]
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_port_names_are_short_and_unique_in_a_pod(objects):
    for template in pods_of(objects).values():
        ports = template["spec"]["containers"][0]["ports"]
        assert all(len(port["name"]) <= 15 for port in ports)
        assert len({port["name"] for port in ports}) == len(ports)
        assert len({port["containerPort"] for port in ports}) == len(ports)


def test_no_container_is_root_or_writes_its_root(objects):
    for template in pods_of(objects).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_a_head_with_an_autoscaler_has_a_token(objects):
    cluster = of_kind(objects, "RayService")[0]["spec"]["rayClusterConfig"]
    for name, template in pods_of(objects).items():
        needs_one = name == "head" and cluster["enableInTreeAutoscaling"]
        assert template["spec"]["automountServiceAccountToken"] is needs_one


def test_no_service_variable_can_become_a_setting(objects):
    """Kubernetes would set TESSERA_PORT for a Service called tessera: no such setting."""
    for template in pods_of(objects).values():
        assert template["spec"]["enableServiceLinks"] is False
        environment = template["spec"]["containers"][0]["env"]
        assert not any(variable["name"].startswith("TESSERA_") for variable in environment)


def test_every_container_says_how_much_memory_it_needs(objects):
    for template in pods_of(objects).values():
        spec = template["spec"]
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert "memory" in container["resources"]["limits"]
            assert "cpu" in container["resources"]["requests"]


def test_keys_reach_ingress_pods_only(objects):
    for name, template in pods_of(objects).items():
        has_keys = "auth" in {volume["name"] for volume in template["spec"]["volumes"]}
        assert not has_keys or name.endswith("-ingress")


def test_the_services_select_ingress_pods_and_their_ports(objects):
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"]
        if "tessera.dev/group" not in selector:
            continue
        pods = [
            template
            for template in pods_of(objects).values()
            if selector.items() <= template["metadata"]["labels"].items()
        ]
        assert len(pods) == 1
        names = {port["name"] for port in pods[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        assert len(service["metadata"]["name"]) <= 63
