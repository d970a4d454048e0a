"""What single values do to the rendered objects, and what the templates themselves refuse."""

import tarfile

import pytest
import yaml

from tests.helm.objects import cluster_of, environment_of, one_of, worker
from tests.helm.rendering import CI_VALUES, RenderError

TWO_GROUPS = [{"name": "a"}, {"name": "b", "metricsPort": 9401}]
DOWNLOAD = {"name": "a", "model": {"huggingFace": {"repository": "org/model"}}}

REFUSED = {
    "a group that is there twice": (
        {"engineGroups": [{"name": "a"}, {"name": "a"}]},
        '"a" is there twice',
    ),
    "a proxy before two groups": (
        {"engineGroups": TWO_GROUPS, "http": {"proxy": "haproxy"}},
        "one engine group",
    ),
    "autoscaling without an autoscaler": (
        {"engineGroups": [{"name": "a", "autoscaling": {"enabled": True}}]},
        "needs autoscaler.enabled",
    ),
    "bounds the wrong way round": (
        {
            "engineGroups": [
                {"name": "a", "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}
            ],
            "autoscaler": {"enabled": True},
        },
        "more than maxReplicas",
    ),
    "more replicas than pods": (
        {
            "engineGroups": [
                {"name": "a", "replicas": 3, "autoscaling": {"enabled": True, "maxReplicas": 2}}
            ],
            "autoscaler": {"enabled": True},
        },
        "must lie within",
    ),
    "a download with nowhere to go": ({"engineGroups": [DOWNLOAD]}, "needs a place"),
    "a download into a read-only volume": (
        {"engineGroups": [DOWNLOAD], "weights": {"type": "emptyDir", "readOnly": True}},
        "readOnly: false",
    ),
    "a node's cache of what is on the node": (
        {"weights": {"type": "hostPath", "nodeCache": {"type": "hostPath"}}},
        "copies what lies on a claim",
    ),
    "a node's cache on a claim without a name": (
        {
            "weights": {
                "type": "persistentVolumeClaim",
                "nodeCache": {"type": "persistentVolumeClaim"},
            }
        },
        "a claim needs a name",
    ),
    "certificates for a proxy that speaks plain HTTP": (
        {"http": {"proxy": "haproxy", "tls": {"existingSecret": "tls"}}},
        "speak plain HTTP",
    ),
    "a grace period within the drain": (
        {"drainTimeoutSeconds": 100, "terminationGracePeriodSeconds": 120},
        "cuts its streams",
    ),
    "a metrics port for two": (
        {"engineGroups": [{"name": "a"}, {"name": "b"}]},
        '"a" and "b" both have metrics port 9400',
    ),
    "no group that is enabled": (
        {"engineGroups": [{"name": "a", "enabled": False}]},
        "no group is enabled",
    ),
    "a name that no RayService may have": ({"fullnameOverride": "9lives"}, "a letter first"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_the_templates_refuse(case, renderer):
    values, reason = REFUSED[case]
    with pytest.raises(RenderError, match=reason):
        renderer.render([values])


@pytest.mark.parametrize("proxy", ["direct", "serve", "haproxy"])
def test_the_proxy_decides_who_answers_the_readiness_probe(proxy, renderer):
    objects = renderer.render([{"http": {"proxy": proxy}}])
    config = yaml.safe_load(one_of(objects, "RayService")["spec"]["serveConfigV2"])
    spec = worker(objects, "builtin-ingress")
    probe = spec["containers"][0]["readinessProbe"]["httpGet"]
    is_direct = proxy == "direct"
    assert config["proxy_location"] == ("Disabled" if is_direct else "EveryNode")
    assert probe == {"path": "/health/ready" if is_direct else "/-/healthz", "port": "http"}
    assert ("RAY_SERVE_ENABLE_HA_PROXY" in environment_of(spec)) == (proxy == "haproxy")


@pytest.mark.parametrize("kind", ["none", "emptyDir", "hostPath", "persistentVolumeClaim"])
def test_weights_are_mounted_in_all_workers_and_not_in_the_head(kind, renderer):
    objects = renderer.render([{"weights": {"type": kind}}])
    head = cluster_of(objects)["headGroupSpec"]["template"]["spec"]
    assert "weights" not in {volume["name"] for volume in head["volumes"]}
    for name in ("builtin-engine", "builtin-ingress"):
        volumes = {volume["name"]: volume for volume in worker(objects, name)["volumes"]}
        assert ("weights" in volumes) == (kind != "none")
        assert kind == "none" or kind in volumes["weights"]
    claims = [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == (kind == "persistentVolumeClaim")


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"type": "hostPath", "hostPath": "/disk"}, {"path": "/disk", "type": "Directory"}),
        ({"type": "persistentVolumeClaim", "existingClaim": "disk"}, {"claimName": "disk"}),
    ],
)
def test_engines_read_a_claims_weights_through_their_nodes_cache(cache, source, renderer):
    values = {
        "engineGroups": [DOWNLOAD, {"name": "b", "metricsPort": 9401}],
        "weights": {"type": "persistentVolumeClaim", "nodeCache": {**cache, "maxBytes": 1 << 40}},
    }
    objects = renderer.render([values])
    spec = worker(objects, "a-engine")
    (volume,) = [one for one in spec["volumes"] if one["name"] == "node-weights"]
    assert volume[cache["type"]] == source
    (mount,) = [
        one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "node-weights"
    ]
    config = yaml.safe_load(one_of(objects, "RayService")["spec"]["serveConfigV2"])
    downloaded, builtin = (one["args"]["engine"] for one in config["applications"])
    assert downloaded["weights_cache_dir"] == mount["mountPath"]
    assert downloaded["weights_cache_bytes"] == 1 << 40
    assert not mount.get("readOnly", False)
    assert "weights_cache_dir" not in builtin
    ingress = worker(objects, "a-ingress")
    assert "node-weights" not in {one["name"] for one in ingress["volumes"]}


def test_the_autoscaler_is_as_confined_as_the_rest(renderer):
    options = cluster_of(renderer.render([{"autoscaler": {"enabled": True}}]))["autoscalerOptions"]
    assert options["securityContext"]["readOnlyRootFilesystem"]
    assert options["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]


def test_budgets_leave_one_pod_to_evict(renderer):
    values = {"engineGroups": [{"name": "a", "replicas": 3, "ingress": {"replicas": 2}}]}
    budgets = {
        one["metadata"]["name"]: one["spec"]["minAvailable"]
        for one in renderer.render([values])
        if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"tessera-a-engine": 2, "tessera-a-ingress": 1, "tessera-head": 1}


def test_a_groups_settings_go_over_those_of_all(renderer):
    values = {
        "config": {"limits": {"max_n": 4, "max_logprobs": 5}},
        "engineGroups": [
            {"name": "a", "config": {"limits": {"max_n": 2}}},
            {"name": "b", "metricsPort": 9401},
        ],
    }
    service = one_of(renderer.render([values]), "RayService")["spec"]
    first, second = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert first["args"]["limits"] == {"max_n": 2, "max_logprobs": 5}
    assert second["args"]["limits"] == {"max_n": 4, "max_logprobs": 5}
    assert {first["route_prefix"], second["route_prefix"]} == {"/a", "/b"}


def test_a_digest_decides_over_a_tag(renderer):
    digest = "sha256:" + "0" * 64
    objects = renderer.render([{"image": {"tag": "1", "digest": digest}}])
    assert worker(objects, "builtin-engine")["containers"][0]["image"] == f"tessera@{digest}"


def test_network_policies_close_what_nobody_needs(renderer):
    objects = renderer.render([{"http": {"proxy": "haproxy"}}])
    ports = {
        port["port"]
        for one in objects
        if one["kind"] == "NetworkPolicy"
        for rule in one["spec"]["ingress"]
        for port in rule.get("ports", [])
    }
    assert ports == {"http", "grpc", "dashboard", "metrics", 9400}
    lookups = {
        (port["port"], port["protocol"])
        for one in objects
        if one["kind"] == "NetworkPolicy"
        for rule in one["spec"].get("egress", [])
        for port in rule.get("ports", [])
        if "protocol" in port
    }
    assert lookups == {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
    assert not [
        one
        for one in renderer.render([{"networkPolicy": {"enabled": False}}])
        if one["kind"] == "NetworkPolicy"
    ]


def test_notes_warn_of_what_is_open(renderer):
    text = renderer.notes([{"ray": {"authMode": "disabled"}}])
    assert "no API keys" in text
    assert "can run code in these pods" in text
    closed = renderer.notes([{"auth": {"existingSecret": "keys"}}])
    assert "WARNING" not in closed


@pytest.mark.parametrize("values", [None, *CI_VALUES], ids=lambda path: path and path.stem)
def test_helm_has_nothing_to_complain_about(values, renderer):
    assert "0 chart(s) failed" in renderer.lint([] if values is None else [values])


def test_a_package_renders_as_the_folder_does(renderer, tmp_path):
    """What .helmignore leaves out must not be what templates read."""
    given = {"monitoring": {"rules": True, "dashboards": {"enabled": True}}}
    archive = renderer.package(tmp_path)
    assert renderer.render([given], archive) == renderer.render([given])
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert "tessera/values.schema.json" in names
    assert not [name for name in names if name.startswith("tessera/ci/")]


def test_helm_refuses_what_the_schema_refuses(renderer):
    with pytest.raises(RenderError, match="engineGroup"):
        renderer.render([{"engineGroup": []}])
