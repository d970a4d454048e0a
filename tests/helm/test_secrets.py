"""Keys and certificates: where ingress pods find them, and that they follow their secrets."""

from pathlib import Path

import pytest
import yaml

from service.listening import HttpSettings
from service.security.settings import AuthSettings
from service.security.tls import TlsSettings
from tests.helm.objects import of_kind, one_of, pods_of, ray_container, worker

TLS = {
    "http": {"tls": {"existingSecret": "web", "certificateKey": "cert"}},
    "grpc": {"tls": {"existingSecret": "rpc", "clientAuthoritiesKey": "ca"}},
}


def arguments_of(objects):
    config = yaml.safe_load(one_of(objects, "RayService")["spec"]["serveConfigV2"])
    return config["applications"][0]["args"]


def mounted_files(spec):
    """Files of secrets in Ray's container, by path: (secret, key)."""
    volumes = {one["name"]: one for one in spec["volumes"]}
    return {
        Path(mount["mountPath"]) / item["path"]: (secret["secretName"], item["key"])
        for mount in spec["containers"][0]["volumeMounts"]
        if (secret := volumes[mount["name"]].get("secret")) is not None
        for item in secret["items"]
    }


def test_keys_are_mounted_from_their_secret(renderer):
    objects = renderer.render([{"auth": {"existingSecret": "keys", "secretKey": "list"}}])
    file = Path(arguments_of(objects)["auth"]["api_key_file"])
    assert mounted_files(worker(objects, "builtin-ingress")) == {file: ("keys", "list")}


def test_what_keys_may_is_set_beside_their_secret(renderer):
    auth = {"limits": {"requests_per_minute": 60}, "priorities": {"max_priority": 3}}
    objects = renderer.render([{"auth": {"existingSecret": "keys"}, "config": {"auth": auth}}])
    rendered = arguments_of(objects)["auth"]
    assert AuthSettings(**rendered) == AuthSettings(**auth, api_key_file=rendered["api_key_file"])
    assert rendered["priorities"] == {"max_priority": 3}


def test_certificates_are_mounted_from_their_secrets(renderer):
    objects = renderer.render([TLS])
    arguments = arguments_of(objects)
    files = mounted_files(worker(objects, "builtin-ingress"))
    http = HttpSettings(**arguments["http"]).tls
    grpc = TlsSettings(**arguments["grpc"]["tls"])
    assert files[http.certificate_file] == ("web", "cert")
    assert files[http.key_file] == ("web", "tls.key")
    assert http.client_ca_file is None
    assert files[grpc.certificate_file] == ("rpc", "tls.crt")
    assert files[grpc.key_file] == ("rpc", "tls.key")
    assert files[grpc.client_ca_file] == ("rpc", "ca")
    assert len(files) == 5


def test_no_secret_is_mounted_by_a_path_within_it(renderer):
    """The kubelet renews a mounted secret, but never a subPath of it."""
    objects = renderer.render([TLS, {"auth": {"existingSecret": "keys"}}])
    for template in pods_of(objects).values():
        for mount in ray_container(template)["volumeMounts"]:
            assert "subPath" not in mount


def test_only_ingress_pods_see_certificates(renderer):
    objects = renderer.render([TLS])
    for name, template in pods_of(objects).items():
        assert bool(mounted_files(template["spec"])) == name.endswith("-ingress")


@pytest.mark.parametrize("values", [{}, TLS], ids=["plain", "tls"])
def test_probe_service_and_test_speak_what_the_listener_speaks(values, renderer):
    objects = renderer.render([values])
    probe = ray_container(pods_of(objects)["builtin-ingress"])["readinessProbe"]["httpGet"]
    protocols = {
        port["name"]: port["appProtocol"]
        for port in one_of(objects, "Service", "tessera-builtin")["spec"]["ports"]
    }
    (test,) = of_kind(objects, "Pod")
    assert probe.get("scheme", "HTTP") == ("HTTPS" if values else "HTTP")
    assert protocols["http"] == ("https" if values else "http")
    assert protocols["grpc"] == ("https" if values else "kubernetes.io/h2c")
    scheme = "https" if values else "http"
    assert (
        f'"{scheme}://tessera-builtin:8000/health/ready"'
        in test["spec"]["containers"][0]["command"][-1]
    )
    assert f"curl {scheme}://" in renderer.notes([values])
