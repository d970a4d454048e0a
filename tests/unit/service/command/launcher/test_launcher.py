"""What the launcher sets up before Ray is imported."""

from service.command.launcher import RayTarget, prepare_environment
from service.config import parse_config

OWN = RayTarget(None)


def prepared(config=None, target=OWN, environment=None):
    environment = dict(environment or {})
    prepare_environment(parse_config(config or {}), target, environment)
    return environment


def test_a_ray_of_our_own_is_confined_and_guarded():
    environment = prepared()
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_joined_cluster_keeps_its_addresses():
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in prepared(target=RayTarget("auto"))


def test_a_replica_that_hangs_is_not_asked_politely_to_stop():
    assert prepared()["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] == "1"
    kept = prepared(environment={"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "0"})
    assert kept["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] == "0"


def test_haproxy_is_switched_on_only_when_asked_for():
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in prepared()
    assert prepared({"http": {"proxy": "haproxy"}})["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_what_the_operator_set_stays():
    assert prepared(environment={"RAY_AUTH_MODE": "disabled"})["RAY_AUTH_MODE"] == "disabled"
