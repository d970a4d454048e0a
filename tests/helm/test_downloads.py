"""The container that downloads weights: what it runs, what it sees, whom it may reach."""

import pytest
from typer.testing import CliRunner

from service.cli import app
from tests.helm.objects import environment_of, of_kind, worker

DOWNLOAD = {
    "engineGroups": [{"name": "a", "model": {"huggingFace": {"repository": "org/model"}}}],
    "weights": {"type": "emptyDir"},
}


def download_of(objects, name="a-engine"):
    (container,) = worker(objects, name)["initContainers"]
    return container


def variables(container):
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_a_download_sees_the_token_and_only_it_does(renderer):
    objects = renderer.render([DOWNLOAD, {"huggingFace": {"existingSecret": "hugging-face"}}])
    for name in ("a-engine", "a-ingress"):
        token = variables(download_of(objects, name))["HF_TOKEN"]
        assert token["secretKeyRef"] == {"name": "hugging-face", "key": "token"}
        spec = worker(objects, name)
        assert "HF_TOKEN" not in environment_of(spec)
        assert environment_of(spec)["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("name", "has_weights"), [("a-engine", True), ("a-ingress", False)])
def test_it_runs_the_command_that_marks_what_is_complete(name, has_weights, renderer):
    """`hf download` succeeds on half a folder when the hub does not answer."""
    command = download_of(renderer.render([DOWNLOAD]), name)["command"]
    assert command[:3] == ["tessera", "fetch", "org/model"]
    assert ("--text-only" in command) != has_weights
    known = CliRunner().invoke(app, ["fetch", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    for flag in command[3:]:
        assert flag.partition("=")[0] in known.output


def test_every_revision_has_a_folder_of_its_own(renderer):
    """The old cluster of an upgrade still reads its files while the new one downloads."""
    folders = set()
    for revision in ("main", "0123abc"):
        model = {"huggingFace": {"repository": "org/model", "revision": revision}}
        values = {**DOWNLOAD, "engineGroups": [{"name": "a", "model": model}]}
        command = download_of(renderer.render([values]))["command"]
        folders |= {flag for flag in command if flag.startswith("--to=")}
    assert folders == {
        "--to=/models/revisions/main/org/model",
        "--to=/models/revisions/0123abc/org/model",
    }


def test_it_goes_through_a_proxy_with_authorities_of_its_own(renderer):
    settings = {
        "proxy": {"https": "http://proxy.example.com:3128", "exceptions": ".svc"},
        "authorities": {"configMap": "authorities", "key": "bundle.pem"},
        "endpoint": "https://hub.example.com:8443",
        "extraEnv": [{"name": "HF_HUB_DOWNLOAD_TIMEOUT", "value": "60"}],
    }
    objects = renderer.render([DOWNLOAD, {"huggingFace": settings}])
    container = download_of(objects)
    given = variables(container)
    assert given["HTTPS_PROXY"] == "http://proxy.example.com:3128"
    assert given["NO_PROXY"] == ".svc"
    assert given["HF_HUB_DOWNLOAD_TIMEOUT"] == "60"
    assert "HTTP_PROXY" not in given
    assert given["SSL_CERT_FILE"] == given["REQUESTS_CA_BUNDLE"]
    folder, _, file = given["SSL_CERT_FILE"].rpartition("/")
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == folder]
    (volume,) = [
        one for one in worker(objects, "a-engine")["volumes"] if one["name"] == mount["name"]
    ]
    assert volume["configMap"]["items"] == [{"key": "bundle.pem", "path": file}]
    assert {443, 3128, 8443} <= egress_ports(objects)


def test_nothing_of_it_is_there_without_a_download(renderer):
    settings = {"huggingFace": {"authorities": {"configMap": "authorities"}}}
    objects = renderer.render([settings])
    assert "authorities" not in {
        one["name"] for one in worker(objects, "builtin-engine")["volumes"]
    }
    assert 443 not in egress_ports(objects)


def egress_ports(objects):
    return {
        port["port"]
        for policy in of_kind(objects, "NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        for port in rule.get("ports", [])
    }
