"""What single values do to the rendered objects, and what the templates themselves refuse."""

import shutil
import subprocess

import pytest
import yaml

from tests.helm.rendering import CHART, CI_VALUES, RenderError

DOWNLOAD = {"name": "a", "model": {"huggingFace": {"repository": "org/model"}}}

REFUSED = {
    "a group that is there twice": (
        {"engineGroups": [{"name": "a"}, {"name": "a"}]},
        '"a" is there twice',
    ),
    "a proxy before two groups": (
        {"engineGroups": [{"name": "a"}, {"name": "b"}], "http": {"proxy": "haproxy"}},
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
    "a grace period within the drain": (
        {"drainTimeoutSeconds": 100, "terminationGracePeriodSeconds": 120},
        "cuts its streams",
    ),
    "an ingress without hosts": ({"ingress": {"enabled": True}}, "leads nowhere"),
    "an ingress to nobody": (
        {"ingress": {"enabled": True, "hosts": [{"host": "h", "group": "x"}]}},
        'no engine group is called "x"',
    ),
    "a gateway without parents": (
        {"gateway": {"enabled": True, "routes": [{"group": "builtin"}]}},
        "a route needs a Gateway",
    ),
    "a gateway without routes": (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}]}},
        "nothing is routed",
    ),
    "a route to nobody": (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "routes": [{"group": "x"}]}},
        'no engine group is called "x"',
    ),
    "a name that no RayService may have": ({"fullnameOverride": "9lives"}, "a letter first"),
}


def one_of(objects, kind, name=None):
    found = [one for one in objects if one["kind"] == kind]
    found = [one for one in found if name in (None, one["metadata"]["name"])]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def cluster_of(objects):
    return one_of(objects, "RayService")["spec"]["rayClusterConfig"]


def worker(objects, name):
    groups = cluster_of(objects)["workerGroupSpecs"]
    return next(group["template"]["spec"] for group in groups if group["groupName"] == name)


def environment_of(spec):
    variables = spec["containers"][0]["env"]
    return {variable["name"]: variable.get("value") for variable in variables}


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


def test_engine_pods_are_ready_without_a_proxy(renderer):
    """KubeRay's own probe would ask Serve's proxy, which direct mode does not have."""
    container = worker(renderer.render(), "builtin-engine")["containers"][0]
    assert container["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def test_a_download_sees_the_token_and_only_it_does(renderer):
    values = {
        "engineGroups": [DOWNLOAD],
        "weights": {"type": "emptyDir"},
        "huggingFace": {"existingSecret": "hugging-face"},
    }
    objects = renderer.render([values])
    for name, has_weights in (("a-engine", True), ("a-ingress", False)):
        spec = worker(objects, name)
        (download,) = spec["initContainers"]
        tokens = [variable for variable in download["env"] if variable["name"] == "HF_TOKEN"]
        assert tokens[0]["valueFrom"]["secretKeyRef"] == {"name": "hugging-face", "key": "token"}
        assert "--local-dir=/models/org/model" in download["command"]
        assert ("--include=*.safetensors" in download["command"]) == has_weights
        assert "HF_TOKEN" not in environment_of(spec)
        assert environment_of(spec)["HF_HUB_OFFLINE"] == "1"


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
        "engineGroups": [DOWNLOAD, {"name": "b"}],
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


def test_keys_are_mounted_from_their_secret(renderer):
    objects = renderer.render([{"auth": {"existingSecret": "keys", "secretKey": "list"}}])
    service = one_of(objects, "RayService")["spec"]
    arguments = yaml.safe_load(service["serveConfigV2"])["applications"][0]["args"]
    spec = worker(objects, "builtin-ingress")
    (volume,) = [one for one in spec["volumes"] if one["name"] == "auth"]
    assert volume["secret"]["items"] == [{"key": "list", "path": "api-keys"}]
    assert arguments["auth"] == {"api_key_file": "/etc/tessera/auth/api-keys"}


def test_an_autoscaler_may_move_engine_pods_only_within_their_bounds(renderer):
    scaling = {"enabled": True, "minReplicas": 0, "maxReplicas": 5}
    values = {
        "autoscaler": {"enabled": True},
        "engineGroups": [{"name": "a", "replicas": 2, "autoscaling": scaling}],
    }
    engine, ingress = cluster_of(renderer.render([values]))["workerGroupSpecs"]
    counts = ("minReplicas", "replicas", "maxReplicas")
    assert [engine[key] for key in counts] == [0, 2, 5]
    assert [ingress[key] for key in counts] == [1, 1, 1]


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
        "engineGroups": [{"name": "a", "config": {"limits": {"max_n": 2}}}, {"name": "b"}],
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
    assert not [
        one
        for one in renderer.render([{"networkPolicy": {"enabled": False}}])
        if one["kind"] == "NetworkPolicy"
    ]


def test_notes_warn_of_what_is_open(renderer):
    text = renderer.render_text([{"ray": {"authMode": "disabled"}}])
    assert "no API keys" in text
    assert "can run code in these pods" in text
    closed = renderer.render_text([{"auth": {"existingSecret": "keys"}}])
    assert "WARNING" not in closed


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)
def test_helm_itself_accepts_the_chart(values):
    for command in (["lint", "--strict"], ["template", "tessera"]):
        done = subprocess.run(
            ["helm", *command, str(CHART), "-f", str(values)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
