"""The ways in from outside: Ingress, HTTPRoute, GRPCRoute."""

import pytest

from tests.helm.objects import of_kind, one_of
from tests.helm.rendering import CI_VALUES, RenderError

GROUPS = {
    "engineGroups": [
        {"name": "large", "model": {"path": "/models/Qwen/Qwen2.5-32B"}},
        {
            "name": "small",
            "metricsPort": 9401,
            "config": {"engine": {"served_model_name": "team/small"}},
        },
    ]
}


def gateway(*routes, **more):
    return {
        **GROUPS,
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}], "routes": [*routes], **more},
    }


def ingress(*hosts, **more):
    return {**GROUPS, "ingress": {"enabled": True, "hosts": [*hosts], **more}}


REFUSED = {
    "an ingress without hosts": (ingress(), "leads nowhere"),
    "an ingress to nobody": (
        ingress({"host": "h", "group": "x"}),
        'no engine group is called "x"',
    ),
    "a host for nobody": (ingress({"host": "h"}), "a host needs a group, or byModel"),
    "gRPC by paths": (ingress({"host": "h", "byModel": True, "protocol": "grpc"}), "gRPC has not"),
    "one place for two": (
        ingress(
            {"host": "h", "group": "large"}, {"host": "h", "group": "large", "protocol": "grpc"}
        ),
        '"h/" is there twice',
    ),
    "a gateway without parents": (
        {"gateway": {"enabled": True, "routes": [{"group": "builtin"}]}},
        "a route needs a Gateway",
    ),
    "a gateway without routes": (gateway(), "nothing is routed"),
    "a route to nobody": (gateway({"group": "x"}), 'no engine group is called "x"'),
    "a route for nobody": (gateway({"hostnames": ["h"]}), "a route needs a group, or byModel"),
    "two routes of one name": (
        gateway({"group": "large", "hostnames": ["a"]}, {"group": "large", "hostnames": ["b"]}),
        'two routes are called "large"',
    ),
    "a host name for two kinds of routes": (
        gateway(
            {"group": "large", "hostnames": ["a.example.com"]},
            {"group": "large", "protocol": "grpc", "hostnames": ["a.example.com"]},
        ),
        "a Gateway accepts one of them",
    ),
    "a host name below another": (
        gateway(
            {"group": "large", "hostnames": ["*.example.com"]},
            {"group": "large", "protocol": "grpc", "hostnames": ["a.example.com"]},
        ),
        "a Gateway accepts one of them",
    ),
    "every host name for two kinds of routes": (
        gateway({"group": "large"}, {"group": "large", "protocol": "grpc"}),
        "a Gateway accepts one of them",
    ),
    "a path of gRPC": (
        gateway({"group": "large", "protocol": "grpc", "path": "/a"}),
        "has no path",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_the_templates_refuse(case, renderer):
    values, reason = REFUSED[case]
    with pytest.raises(RenderError, match=reason):
        renderer.render([values])


def test_a_group_may_have_several_routes(renderer):
    objects = renderer.render(
        [
            gateway(
                {"group": "large", "hostnames": ["a.example.com"]},
                {"name": "second", "group": "large", "hostnames": ["b.example.com"], "path": "/b"},
                {"group": "large", "protocol": "grpc", "hostnames": ["rpc.example.com"]},
            )
        ]
    )
    names = [one["metadata"]["name"] for one in of_kind(objects, "HTTPRoute")]
    assert sorted(names) == ["tessera-large", "tessera-second"]
    (rpc,) = of_kind(objects, "GRPCRoute")
    assert rpc["spec"]["hostnames"] == ["rpc.example.com"]
    assert rpc["spec"]["rules"][0]["backendRefs"] == [{"name": "tessera-large", "port": 9000}]


def test_one_host_name_leads_to_every_group_by_its_models_name(renderer):
    route = {"byModel": True, "group": "large", "hostnames": ["all.example.com"]}
    objects = renderer.render([gateway(route, modelHeader="X-Model")])
    rules = one_of(objects, "HTTPRoute", "tessera-large")["spec"]["rules"]
    by_backend = [(rule["backendRefs"][0]["name"], rule["matches"]) for rule in rules]
    for (backend, matches), (group, model) in zip(
        by_backend, [("large", "Qwen2.5-32B"), ("small", "team/small")], strict=False
    ):
        assert backend == f"tessera-{group}"
        assert matches[0]["path"]["value"] == f"/models/{model}"
        assert matches[1]["headers"] == [{"name": "X-Model", "value": model}]
    assert by_backend[2:] == [
        ("tessera-large", [{"path": {"type": "PathPrefix", "value": "/"}}]),
    ]


def test_grpc_by_model_goes_by_metadata(renderer):
    route = {"byModel": True, "protocol": "grpc", "hostnames": ["rpc.example.com"]}
    objects = renderer.render([gateway(route)])
    rules = one_of(objects, "GRPCRoute", "tessera-models-grpc")["spec"]["rules"]
    headers = [match["headers"][0]["value"] for rule in rules for match in rule["matches"]]
    assert headers == ["Qwen2.5-32B"] * 2 + ["team/small"] * 2


def test_http_and_grpc_have_an_ingress_each(renderer):
    """The backend's protocol is an annotation of the object: one would break the other."""
    hosts = [
        {"host": "a.example.com", "group": "large"},
        {"host": "rpc.example.com", "group": "large", "protocol": "grpc"},
    ]
    tls = [{"secretName": "cert", "hosts": ["a.example.com", "rpc.example.com"]}]
    objects = renderer.render(
        [ingress(*hosts, annotations={"a": "1"}, grpcAnnotations={"backend": "GRPC"}, tls=tls)]
    )
    seen = {}
    for one in of_kind(objects, "Ingress"):
        ports = {
            path["backend"]["service"]["port"]["name"]
            for rule in one["spec"]["rules"]
            for path in rule["http"]["paths"]
        }
        seen[one["metadata"]["name"]] = (ports, one["metadata"]["annotations"], one["spec"]["tls"])
    assert seen == {
        "tessera": ({"http"}, {"a": "1"}, [{"secretName": "cert", "hosts": ["a.example.com"]}]),
        "tessera-grpc": (
            {"grpc"},
            {"backend": "GRPC"},
            [{"secretName": "cert", "hosts": ["rpc.example.com"]}],
        ),
    }


def test_an_ingress_leads_to_every_group_by_its_models_path(renderer):
    objects = renderer.render([ingress({"host": "h", "byModel": True, "group": "small"})])
    (rule,) = one_of(objects, "Ingress")["spec"]["rules"]
    paths = {path["path"]: path["backend"]["service"]["name"] for path in rule["http"]["paths"]}
    assert paths == {
        "/models/Qwen2.5-32B": "tessera-large",
        "/models/team/small": "tessera-small",
        "/": "tessera-small",
    }


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)
def test_every_route_leads_to_a_port_of_a_service(values, renderer):
    objects = renderer.render([values])
    ports = {
        one["metadata"]["name"]: {
            key for port in one["spec"]["ports"] for key in (port["name"], port["port"])
        }
        for one in of_kind(objects, "Service")
    }
    for one in of_kind(objects, "Ingress"):
        for rule in one["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                assert backend["port"]["name"] in ports[backend["name"]]
    for one in of_kind(objects, "HTTPRoute") + of_kind(objects, "GRPCRoute"):
        for rule in one["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert backend["port"] in ports[backend["name"]]
